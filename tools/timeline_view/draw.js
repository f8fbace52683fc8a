// When and where it is drawn: both canvases at once, in the next frame, however much has changed.

const topCanvas = byId("top");
const lanesCanvas = byId("lanes");
const scroller = byId("scroller");
const colors = {};
const crosshair = { at: null };
const measured = { frames: 0, last_ms: 0, most_ms: 0 };
let isPlanned = false;

const COLOR_NAMES = [
  ...["ground", "raised", "line", "edge", "text", "quiet", "accent", "usage", "usage-fill"],
  ...["low", "high", "emergency", "ceiling", "away", "alone", "on-prefilling", "on-decoding"],
  ...["on-paused", ...Object.keys(BARS), ...Object.keys(GLYPHS)],
];

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of COLOR_NAMES) colors[name] = style.getPropertyValue(`--${name}`).trim();
  colors.font = style.getPropertyValue("--font").trim();
  patterns.clear();
}

function drawAways(ink, top, bottom) {
  for (const away of picture.aways) {
    const x = placeOf(away.begin_ns);
    const width = Math.max(2, placeOf(away.end_ns) - x);
    if (x + width < view.left || x > view.left + view.width) continue;
    const from = Math.max(view.left, x);
    ink.fillStyle = colors.away;
    ink.fillRect(from, top, x + width - from, bottom - top);
    ink.fillStyle = away.died ? colors.paused : colors.server;
    ink.fillRect(from, top, 1.5, bottom - top);
  }
}

function drawCrosshair(ink, top, bottom) {
  if (crosshair.at === null) return;
  const x = placeOf(crosshair.at);
  if (x < view.left) return;
  ink.fillStyle = colors.accent;
  ink.fillRect(Math.round(x), top, 1, bottom - top);
}

// The canvas's context, at the screen's own resolution.
function inkOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { ink, width, height };
}

const TOP_HEIGHT = { least: 170, most: 380 };

// Memory gets the room that few lanes leave.
function topHeight() {
  if (window.innerWidth <= 900) return TOP_HEIGHT.least;
  const both = topCanvas.clientHeight + scroller.clientHeight;
  const left = both - shown.lanes.length * LANE_HEIGHT - 60;
  return Math.min(Math.max(left, TOP_HEIGHT.least, both * 0.26), TOP_HEIGHT.most);
}

// Where all is below each other, few lanes leave no empty room.
function scrollerHeight() {
  if (window.innerWidth > 900) return "";
  const most = Math.round(window.innerHeight * 0.52);
  return `${Math.max(120, Math.min(most, shown.lanes.length * LANE_HEIGHT + 8))}px`;
}

// Labels and lanes stand side by side; the top canvas begins where the labels do.
function layOut() {
  const narrow = window.innerWidth <= 560;
  const labelWidth = narrow ? 96 : 186;
  scroller.style.height = scrollerHeight();
  topCanvas.style.height = `${Math.round(topHeight())}px`;
  byId("labels").style.width = `${labelWidth}px`;
  byId("sticky").style.height = `${scroller.clientHeight}px`;
  byId("spacer").style.height = `${Math.max(
    shown.lanes.length * LANE_HEIGHT,
    scroller.clientHeight,
  )}px`;
  topCanvas.style.width = `${scroller.clientWidth}px`;
  view.left = labelWidth;
  view.width = Math.max(1, scroller.clientWidth - labelWidth - 8);
}

function drawNow() {
  const began = performance.now();
  isPlanned = false;
  if (filter.inView) followView();
  const above = inkOf(topCanvas);
  drawTop(above.ink, above.width, above.height);
  const below = inkOf(lanesCanvas);
  below.ink.translate(-view.left, 0);
  drawLanes(below.ink, view.left + below.width, below.height, scroller.scrollTop);
  drawLabels();
  placeOptions();
  byId("span").textContent =
    `${clockText(Math.max(0, view.begin))} to ${clockText(Math.min(WHOLE_NS, view.end))}` +
    ` · ${durationText(Math.min(spanOf(), WHOLE_NS))}`;
  measured.frames += 1;
  measured.last_ms = performance.now() - began;
  measured.most_ms = Math.max(measured.most_ms, measured.last_ms);
}

// Lanes come and go with the view.
function followView() {
  const before = shown.lanes.length;
  applyView();
  if (shown.lanes.length !== before) layOut();
  byId("nobody").hidden = shown.lanes.length > 0;
}

function redraw() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(drawNow);
}

function scrollToLane(lane) {
  const place = shown.places.get(lane.index);
  if (place === undefined) return;
  const top = place * LANE_HEIGHT;
  const most = top + LANE_HEIGHT - scroller.clientHeight;
  if (scroller.scrollTop > top) scroller.scrollTop = top;
  else if (scroller.scrollTop < most) scroller.scrollTop = most;
}
