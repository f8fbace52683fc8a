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

// One line over the readings in view: between two of them usage is what it was.
function usagePath(ink) {
  const first = Math.max(0, firstFrom(samples, view.begin) - 1);
  let isBegun = false;
  let lastX = -1;
  let last = null;
  for (let i = first; i < samples.length; i += 1) {
    const sample = samples[i];
    const x = Math.max(view.left, placeOf(sample.at));
    const y = heightOf(sample.usage);
    if (!isBegun) ink.moveTo(x, y);
    else if (x - lastX >= 0.5 || sample.usage > last.usage) {
      ink.lineTo(x, heightOf(last.usage));
      ink.lineTo(x, y);
    }
    isBegun = true;
    lastX = x;
    last = sample;
    if (sample.at > view.end) break;
  }
  return last && { from: Math.max(view.left, placeOf(samples[first].at)), last };
}

function drawUsage(ink) {
  if (!samples.length) return;
  ink.beginPath();
  const path = usagePath(ink);
  const endX = Math.min(placeOf(picture.end_ns), view.left + view.width);
  ink.lineTo(Math.max(endX, placeOf(path.last.at)), heightOf(path.last.usage));
  ink.strokeStyle = colors.usage;
  ink.lineWidth = 1.75;
  ink.stroke();
  ink.lineTo(Math.max(endX, placeOf(path.last.at)), memory.bottom);
  ink.lineTo(path.from, memory.bottom);
  ink.fillStyle = colors["usage-fill"];
  ink.fill();
  fillOver(ink, 1, colors.high);
  fillOver(ink, 2, colors.emergency);
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

function sampleAt(at) {
  const place = firstFrom(samples, at);
  if (samples[place]?.at === at) return samples[place];
  return place > 0 ? samples[place - 1] : null;
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
