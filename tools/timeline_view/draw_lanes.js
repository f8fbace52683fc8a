// Each request's bars, and the glyphs of events. Bars differ in height and pattern too, not in
// colour alone.

const LANE_HEIGHT = 26;
const BAR_HEIGHT = 14;
const BARS = {
  waiting: { height: 4, pattern: "" },
  prefilling: { height: BAR_HEIGHT, pattern: "" },
  decoding: { height: BAR_HEIGHT, pattern: "" },
  pausing: { height: BAR_HEIGHT, pattern: "dense" },
  paused: { height: BAR_HEIGHT, pattern: "sparse" },
  resuming: { height: BAR_HEIGHT, pattern: "dense" },
};

function patternOf(ink, color, density) {
  const size = density === "dense" ? 5 : 7;
  const tile = make("canvas", { width: size, height: size });
  const paint = tile.getContext("2d");
  paint.strokeStyle = color;
  paint.lineWidth = density === "dense" ? 2.2 : 1.4;
  for (const shift of [-size, 0, size]) {
    paint.moveTo(shift - 1, size + 1);
    paint.lineTo(shift + size + 1, -1);
  }
  paint.stroke();
  return ink.createPattern(tile, "repeat");
}

const patterns = new Map();

function fillOf(ink, phase) {
  const { pattern } = BARS[phase];
  if (!pattern) return colors[phase];
  if (!patterns.has(phase)) patterns.set(phase, patternOf(ink, colors[phase], pattern));
  return patterns.get(phase);
}

function drawBar(ink, phase, x, y, width) {
  const { height, pattern } = BARS[phase];
  const top = y - height / 2;
  ink.fillStyle = fillOf(ink, phase);
  ink.fillRect(x, top, width, height);
  if (pattern && width > 2) {
    ink.strokeStyle = colors[phase];
    ink.lineWidth = 1;
    ink.strokeRect(x + 0.5, top + 0.5, width - 1, height - 1);
  }
}

function wordsOf(stretch) {
  if (stretch.phase !== "paused") return PHASE_WORDS[stretch.phase];
  return stretch.hold ? `paused · ${stretch.hold.reason.replaceAll("_", " ")}` : "paused";
}

function drawWords(ink, stretch, x, y, width) {
  const text = wordsOf(stretch);
  if (stretch.phase === "waiting" || width < 44) return;
  const needed = ink.measureText(text).width + 22;
  if (needed > width) return;
  if (BARS[stretch.phase].pattern) {
    ink.fillStyle = colors.ground;
    ink.fillRect(x + 11, y - 6.5, needed - 14, 13);
  }
  ink.fillStyle = colors[`on-${stretch.phase}`] ?? colors.text;
  ink.fillText(text, x + 14, y);
}

// From the first stretch that is in view to the last; one that is too short to see keeps a pixel.
function drawStretches(ink, lane, y, right) {
  for (const stretch of lane.stretches) {
    if (stretch.end < view.begin) continue;
    if (stretch.begin > view.end) break;
    const x = Math.max(view.left - 2, placeOf(stretch.begin));
    const width = Math.max(1, Math.min(right + 2, placeOf(stretch.end)) - x);
    drawBar(ink, stretch.phase, x, y, width);
    drawWords(ink, stretch, Math.max(x, view.left), y, width);
  }
}

function drawAlone(ink, lane, y, right) {
  ink.fillStyle = colors.alone;
  for (const [begin, end] of lane.alone) {
    const x = Math.max(view.left, placeOf(begin));
    const to = Math.min(right, placeOf(end ?? lane.endAt));
    for (let at = x; at < to; at += 6) {
      ink.fillRect(at, y + BAR_HEIGHT / 2 + 1.5, Math.min(4, Math.max(1, to - at)), 2.5);
    }
  }
}

const GLYPHS = {
  pauses: (p) => {
    p.rect(-4, -5, 3, 10);
    p.rect(1, -5, 3, 10);
  },
  resumes: (p) => polygon(p, [-4, -5.5, 5, 0, -4, 5.5]),
  admissions: (p) => polygon(p, [-5, -4.5, 5, -4.5, 0, 5]),
  ends: (p) => p.rect(-4.2, -4.2, 8.4, 8.4),
  clients: (p) => polygon(p, [0, -6, 5.5, 0, 0, 6, -5.5, 0]),
  memory: (p) => polygon(p, [0, -6, 5.5, 4.5, -5.5, 4.5]),
  store: (p) => p.arc(0, 0, 4.6, 0, 7),
  server: (p) => polygon(p, [-1.5, -6.5, 6, -3, 0.5, 0, 0.5, 6.5, -1.5, 6.5]),
  steps: (p) => p.rect(-1, -4, 2, 8),
};
const BAD = new Set([
  "request_aborted",
  "request_cancelled",
  "emergency_declared",
  "server_died",
  "engine_failed",
  "saving_stopped",
  "block_corrupt",
  "blocks_lost",
]);

function polygon(path, points) {
  for (let i = 0; i < points.length; i += 2) path.lineTo(points[i], points[i + 1]);
  path.closePath();
}

const paths = new Map();
for (const [group, shape] of Object.entries(GLYPHS)) {
  const path = new Path2D();
  shape(path);
  paths.set(group, path);
}

// A glyph has an edge in the colour of the ground, so that it stands out of any bar.
function drawGlyph(ink, group, x, y, isBad = false) {
  const path = paths.get(group);
  ink.translate(x, y);
  ink.strokeStyle = colors.ground;
  ink.lineWidth = 3;
  ink.stroke(path);
  ink.fillStyle = isBad ? colors.paused : colors[group];
  ink.fill(path);
  ink.translate(-x, -y);
}

// Events of a group at the same place are drawn once, those of the graver group last.
function drawMarks(ink, row, y) {
  const reach = (spanOf() / view.width) * 8;
  const { marks: all } = row;
  const lastX = {};
  for (let i = firstFrom(all, view.begin - reach); i < all.length; i += 1) {
    const mark = all[i];
    if (mark.at > view.end + reach) break;
    if (!isDrawn(mark)) continue;
    const x = placeOf(mark.at);
    const { group, kind } = mark.entry;
    const isBad = BAD.has(kind);
    if (!isBad && x - (lastX[group] ?? -9) < 1.5) continue;
    lastX[group] = x;
    drawGlyph(ink, group, x, y, isBad);
  }
  if (active.mark?.row === row) drawRing(ink, active.mark, y);
}

// Around the active event, as the ring of focus goes around an element.
function drawRing(ink, mark, y) {
  const { entry } = mark;
  const x = placeOf(mark.at);
  drawGlyph(ink, entry.group, x, y, BAD.has(entry.kind));
  ink.strokeStyle = colors.ground;
  ink.lineWidth = 5;
  ink.strokeRect(x - 9, y - 9, 18, 18);
  ink.strokeStyle = colors.accent;
  ink.lineWidth = 2.5;
  ink.strokeRect(x - 9, y - 9, 18, 18);
}

function drawLane(ink, lane, y, width) {
  ink.fillStyle = colors.line;
  ink.fillRect(view.left, y + LANE_HEIGHT / 2 - 1, width - view.left, 1);
  drawStretches(ink, lane, y, width);
  drawAlone(ink, lane, y, width);
}

function drawLanes(ink, width, height, scrolled) {
  ink.clearRect(0, 0, width, height);
  const first = Math.floor(scrolled / LANE_HEIGHT);
  const last = Math.min(shown.lanes.length, Math.ceil((scrolled + height) / LANE_HEIGHT));
  ink.font = `11px ${colors.font}`;
  ink.textAlign = "left";
  ink.textBaseline = "middle";
  const yOf = (place) => place * LANE_HEIGHT + LANE_HEIGHT / 2 - scrolled;
  for (let i = first; i < last; i += 1) drawLane(ink, shown.lanes[i], yOf(i), width);
  drawAways(ink, 0, height);
  for (let i = first; i < last; i += 1) drawMarks(ink, shown.lanes[i], yOf(i));
  drawCrosshair(ink, 0, height);
}
