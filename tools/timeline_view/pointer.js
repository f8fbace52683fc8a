// By mouse, pen and finger: numbers under the pointer, zoom by the wheel, drag to move.

const REACH = 9;
const WHEEL_STEP = 0.0016;
const pointers = new Map();
let dragged = 0;
let lastGap = 0;

function rowAt(canvas, y) {
  if (canvas === topCanvas) return y > topCanvas.clientHeight - RAIL_HEIGHT - 2 ? rail : null;
  return shown.lanes[Math.floor((y + scroller.scrollTop) / LANE_HEIGHT)] ?? null;
}

function marksNear(row, at) {
  const reach = (spanOf() / view.width) * REACH;
  const first = nearest(row, at, reach);
  if (!first) return [];
  const found = [first];
  for (let i = firstFrom(row.marks, at - reach); i < row.marks.length; i += 1) {
    const mark = row.marks[i];
    if (mark.at > at + reach) break;
    if (mark !== first && isDrawn(mark)) found.push(mark);
  }
  return found;
}

function memoryTip(at) {
  if (awayAt(at)) return make("div", { className: "title", textContent: "No server, no memory" });
  const sample = sampleAt(at);
  if (!sample) return null;
  const level = levelAt(at);
  const fields = make("dl");
  const add = (name, bytes) => {
    fields.append(make("dt", { textContent: name }));
    fields.append(make("dd", { textContent: valueText("_bytes", bytes) }));
  };
  add("read", sample.read);
  add("used and reserved", sample.usage);
  if (level) {
    MARK_NAMES.forEach((name, index) =>
      add(`${name} mark`, Math.floor((level.ceiling * level.permille[index]) / 1000)),
    );
    add("ceiling", level.ceiling);
  }
  const title = sample.level ? `Memory: over the ${sample.level} mark` : "Memory";
  const when = `read at ${clockText(sample.at)} · seq ${sample.seq}`;
  return make(
    "div",
    {},
    make("div", { className: "title", textContent: title }),
    make("div", { className: "quiet", textContent: when }),
    fields,
  );
}

function stretchTip(lane, at) {
  const stretch = stretchAt(lane, at);
  if (!stretch) return null;
  const length = durationText(stretch.end - stretch.begin);
  const alone = lane.alone.some(([from, to]) => at >= from && at < (to ?? Infinity));
  const box = make(
    "div",
    {},
    make("div", { className: "title", textContent: `${titleOf(stretch.phase)} for ${length}` }),
    make("div", { className: "quiet", textContent: `request ${lane.number} (${lane.short})` }),
  );
  if (stretch.hold) box.append(make("div", { textContent: reasonText(stretch.hold.reason) }));
  if (alone) box.append(make("div", { textContent: "without a client" }));
  return box;
}

function hover(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left + (canvas === topCanvas ? 0 : view.left);
  const y = event.clientY - box.top;
  const at = timeAt(x);
  const row = rowAt(canvas, y);
  const found = row && x >= view.left - REACH ? marksNear(row, at) : [];
  crosshair.at = x >= view.left ? (found[0]?.at ?? at) : null;
  redraw();
  let content = null;
  if (found.length) content = tipOf(found);
  else if (x >= view.left && row && row !== rail) content = stretchTip(row, at);
  else if (x >= view.left && canvas === topCanvas && !row) content = memoryTip(at);
  if (content) showTip(content, event.clientX, event.clientY);
  else hideTip();
  return found[0] ?? null;
}

function gapOf() {
  const [a, b] = [...pointers.values()];
  return Math.abs(a - b);
}

// Two fingers pinch, one pointer drags.
function drag(event) {
  const before = pointers.get(event.pointerId);
  pointers.set(event.pointerId, event.clientX);
  if (pointers.size === 2) {
    const gap = gapOf();
    if (lastGap > 10 && gap > 10) zoom(lastGap / gap);
    lastGap = gap;
  } else {
    dragged += Math.abs(event.clientX - before);
    move((before - event.clientX) / view.width);
  }
  if (dragged > 4) hideTip();
  redraw();
}

function listen(canvas, target) {
  target.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, event.clientX);
    dragged = 0;
    lastGap = pointers.size === 2 ? gapOf() : 0;
    target.setPointerCapture(event.pointerId);
    target.classList.add("moving");
  });
  target.addEventListener("pointermove", (event) => {
    if (pointers.has(event.pointerId)) drag(event);
    else hover(event, canvas);
  });
  const release = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    target.classList.remove("moving");
    if (event.type === "pointerup" && dragged <= 4) openMark(hover(event, canvas));
  };
  target.addEventListener("pointerup", release);
  target.addEventListener("pointercancel", release);
  target.addEventListener("pointerleave", () => {
    crosshair.at = active.mark ? active.mark.at : null;
    hideTip();
    redraw();
  });
  target.addEventListener("wheel", (event) => wheel(event, canvas), { passive: false });
}

// Over lanes that do not all fit the wheel scrolls them, and zooms with Ctrl; else it zooms.
function wheel(event, canvas) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  const scrolls = canvas === lanesCanvas && scroller.scrollHeight > scroller.clientHeight + 1;
  if (scrolls && !sideways && !event.ctrlKey && !event.metaKey && !event.altKey) return;
  event.preventDefault();
  const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  if (sideways) move(((event.deltaX || event.deltaY) * unit) / view.width);
  else {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    zoom(
      Math.exp(event.deltaY * unit * WHEEL_STEP),
      timeAt(canvas === topCanvas ? x : x + view.left),
    );
  }
  hideTip();
  redraw();
}

listen(topCanvas, topCanvas);
listen(lanesCanvas, list);
scroller.addEventListener("scroll", () => {
  if (active.mark && document.activeElement === list) tipAtMark(active.mark);
  else hideTip();
  redraw();
});
