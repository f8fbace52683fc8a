// Above the lanes: the clock, memory against its marks, and a rail of what is about no request.

const AXIS_HEIGHT = 22;
const RAIL_HEIGHT = 30;
const memory = { top: AXIS_HEIGHT + 8, bottom: 0, most: 1 };

function mostBytes() {
  let most = 1;
  for (const sample of samples) most = Math.max(most, sample.usage, sample.ceiling ?? 0);
  for (const level of levels) most = Math.max(most, level.ceiling);
  return most * 1.04;
}
memory.most = mostBytes();

const heightOf = (bytes) => memory.bottom - (bytes / memory.most) * (memory.bottom - memory.top);

function drawAxis(ink, width) {
  const { found, digits } = ticks(digitsWidth() + 34);
  ink.font = `12px ${colors.font}`;
  ink.textBaseline = "middle";
  ink.textAlign = "center";
  for (const at of found) {
    const x = placeOf(at);
    ink.fillStyle = colors.line;
    ink.fillRect(Math.round(x), AXIS_HEIGHT - 4, 1, memory.bottom - AXIS_HEIGHT + 4);
    if (x < view.left + 36 || x > width - 36) continue;
    ink.fillStyle = colors.quiet;
    ink.fillText(clockText(at, digits), x, AXIS_HEIGHT / 2);
  }
  ink.textAlign = "left";
  ink.fillStyle = colors.quiet;
  ink.fillText(`${dayText(Math.max(0, view.begin))} UTC`, 16, AXIS_HEIGHT / 2);
}

const digitsWidth = () => (spanOf() / view.width < NS_PER_MS * 3 ? 96 : 60);

// Readings of one run follow each other; between two runs there is no memory to draw.
function piecesOf() {
  const ends = picture.aways.map((away) => ({ seq: away.last_seq, end: away.begin_ns }));
  ends.push({ seq: Infinity, end: picture.end_ns });
  const found = [];
  let first = 0;
  for (const { seq, end } of ends) {
    let next = first;
    while (next < samples.length && samples[next].seq <= seq) next += 1;
    if (next > first) found.push({ samples: samples.slice(first, next), end });
    first = next;
  }
  return found;
}
const pieces = piecesOf();

// One line over the readings of a piece that are in view: between two of them it is what it was.
function curve(ink, piece, name) {
  const all = piece.samples;
  const first = Math.max(0, firstFrom(all, view.begin) - 1);
  let lastX = -1;
  let last = null;
  ink.beginPath();
  for (let i = first; i < all.length; i += 1) {
    const sample = all[i];
    const x = Math.max(view.left, placeOf(sample.at));
    const y = heightOf(sample[name]);
    if (!last) ink.moveTo(x, y);
    else if (x - lastX >= 0.5 || sample[name] > last[name]) {
      ink.lineTo(x, heightOf(last[name]));
      ink.lineTo(x, y);
    }
    lastX = x;
    last = sample;
    if (sample.at > view.end) break;
  }
  const end = Math.min(placeOf(piece.end), view.left + view.width);
  const to = Math.max(end, placeOf(last.at));
  ink.lineTo(to, heightOf(last[name]));
  return { from: Math.max(view.left, placeOf(all[first].at)), to };
}

function closeBelow(ink, { from, to }) {
  ink.lineTo(to, memory.bottom);
  ink.lineTo(from, memory.bottom);
}

function strokeUsage(ink) {
  ink.strokeStyle = colors.usage;
  ink.lineWidth = 1.25;
  ink.setLineDash([4, 2]);
  ink.stroke();
  ink.setLineDash([]);
}

function strokeRead(ink) {
  ink.strokeStyle = colors.usage;
  ink.lineWidth = 1.75;
  ink.stroke();
}

// What was measured is filled; over it, what is used and reserved: that is held against the marks.
function drawUsage(ink) {
  for (const piece of pieces) {
    if (piece.end < view.begin || piece.samples[0].at > view.end) continue;
    const usage = curve(ink, piece, "usage");
    strokeUsage(ink);
    closeBelow(ink, usage);
    fillOver(ink, 1, colors.high);
    fillOver(ink, 2, colors.emergency);
    const read = curve(ink, piece, "read");
    strokeRead(ink);
    closeBelow(ink, read);
    ink.fillStyle = colors["usage-fill"];
    ink.fill();
  }
}

// What of the usage is over a mark, in that mark's colour.
function fillOver(ink, which, color) {
  ink.save();
  const above = new Path2D();
  levels.forEach((level, index) => {
    const y = heightOf((level.ceiling * level.permille[which]) / 1000);
    const from = Math.max(view.left, placeOf(level.at));
    const to = index + 1 < levels.length ? placeOf(levels[index + 1].at) : view.left + view.width;
    if (to > from) above.rect(from, 0, to - from, y);
  });
  ink.clip(above);
  ink.globalAlpha = 0.38;
  ink.fillStyle = color;
  ink.fill();
  ink.restore();
}

function drawLevel(ink, level, next, width) {
  const from = Math.max(view.left, placeOf(level.at));
  const to = Math.min(width, next ? placeOf(next.at) : width);
  if (to <= view.left || from >= width) return;
  const lines = level.permille.map((permille, index) => [
    MARK_NAMES[index],
    Math.floor((level.ceiling * permille) / 1000),
  ]);
  lines.push(["ceiling", level.ceiling]);
  for (const [name, bytes] of lines) {
    const y = Math.round(heightOf(bytes)) + 0.5;
    ink.strokeStyle = colors[name];
    ink.lineWidth = name === "ceiling" ? 1.5 : 1;
    ink.setLineDash(name === "ceiling" ? [] : [5, 3]);
    ink.beginPath();
    ink.moveTo(from, y);
    ink.lineTo(to, y);
    ink.stroke();
  }
  ink.setLineDash([]);
  return lines;
}

const NAME_HEIGHT = 13;

// The heights of the names: those of their marks, moved apart around their middle where they meet.
function namePlaces(lines) {
  const wanted = lines.map(([, bytes]) => heightOf(bytes));
  const places = [];
  wanted.forEach((y, index) => {
    places.push(index ? Math.max(y, places[index - 1] + NAME_HEIGHT) : y);
  });
  const tooLow = places.map((y, index) => y - wanted[index]);
  const shift = Math.min(Math.max(...tooLow) / 2, places[0] - AXIS_HEIGHT - NAME_HEIGHT / 2);
  return places.map((y, index) => (tooLow.some((low) => low > 0) ? y - shift : wanted[index]));
}

function drawLevelNames(ink, lines) {
  ink.font = `11px ${colors.font}`;
  ink.textAlign = "right";
  ink.textBaseline = "middle";
  const fromTop = lines.toReversed();
  const places = namePlaces(fromTop);
  fromTop.forEach(([name, bytes], index) => {
    ink.fillStyle = colors[name];
    const text = view.left > 120 ? `${name} ${bytesText(bytes)}` : name;
    ink.fillText(text, view.left - 6, places[index]);
  });
}

function drawMemory(ink, width) {
  ink.fillStyle = colors.line;
  ink.fillRect(view.left, memory.bottom, width - view.left, 1);
  if (!samples.length) {
    ink.font = `13px ${colors.font}`;
    ink.textAlign = "left";
    ink.fillStyle = colors.quiet;
    ink.fillText("No readings of memory here.", view.left + 10, (memory.top + memory.bottom) / 2);
  }
  drawUsage(ink);
  let current = null;
  levels.forEach((level, index) => {
    const lines = drawLevel(ink, level, levels[index + 1], width);
    current ??= lines;
    if (lines && level.at <= view.begin) current = lines;
  });
  if (current) drawLevelNames(ink, current);
}

const awayAt = (at) => picture.aways.find((away) => at > away.begin_ns && at < away.end_ns);

// The newest reading of the run that is there at this time, if one is.
function sampleAt(at) {
  const place = firstFrom(samples, at);
  if (samples[place]?.at === at) return samples[place];
  const last = samples[place - 1];
  if (!last) return null;
  const isGone = picture.aways.some((away) => last.seq <= away.last_seq && away.begin_ns < at);
  return isGone ? null : last;
}

const levelAt = (at) => levels.findLast((level) => level.at <= at) ?? null;

const railY = (height) => height - RAIL_HEIGHT / 2;

function drawTop(ink, width, height) {
  memory.bottom = height - RAIL_HEIGHT - 4;
  ink.clearRect(0, 0, width, height);
  drawAxis(ink, width);
  drawAways(ink, AXIS_HEIGHT, height);
  drawMemory(ink, width);
  ink.font = `12px ${colors.font}`;
  ink.textAlign = "right";
  ink.textBaseline = "middle";
  ink.fillStyle = colors.quiet;
  ink.fillText("server", view.left - 6, railY(height));
  drawMarks(ink, rail, railY(height));
  drawCrosshair(ink, AXIS_HEIGHT, height);
}
