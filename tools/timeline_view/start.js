// The filter's controls, the legend, and the first picture.

function drawSample(canvas, paint) {
  const { ink, width, height } = inkOf(canvas);
  ink.clearRect(0, 0, width, height);
  paint(ink, width, height);
}

const samplesDrawn = [];

function sampleCanvas(paint) {
  const canvas = make("canvas");
  canvas.setAttribute("aria-hidden", "true");
  samplesDrawn.push(() => drawSample(canvas, paint));
  return canvas;
}

function groupBox(group, words) {
  const number = entries.filter((entry) => entry.group === group).length;
  const box = make("input", { type: "checkbox", checked: !filter.hidden.has(group) });
  box.dataset.group = group;
  box.addEventListener("change", () => {
    if (box.checked) filter.hidden.delete(group);
    else filter.hidden.add(group);
    refilter();
  });
  const glyph = sampleCanvas((ink) => drawGlyph(ink, group, 8, 8));
  const counted = make("span", { className: "count", textContent: grouped(number) });
  return make("label", {}, box, glyph, words, " ", counted);
}

function legendItem(words, paint) {
  return make("li", {}, sampleCanvas(paint), words);
}

function drawLegend() {
  const items = picture.phases.map((phase) =>
    legendItem(PHASE_WORDS[phase], (ink, width, height) =>
      drawBar(ink, phase, 1, height / 2, width - 2),
    ),
  );
  const line = (stroke) => (ink, width, height) => {
    ink.beginPath();
    ink.moveTo(1, height / 2);
    ink.lineTo(width - 1, height / 2);
    stroke(ink);
  };
  items.push(
    legendItem("memory as read", line(strokeRead)),
    legendItem("memory used and reserved", line(strokeUsage)),
    legendItem("without a client", (ink, width) => {
      ink.fillStyle = colors.alone;
      for (let x = 1; x < width; x += 6) ink.fillRect(x, 8, 4, 2.5);
    }),
    legendItem("no server", (ink, width, height) => {
      ink.fillStyle = colors.away;
      ink.fillRect(1, 0, width - 2, height);
    }),
  );
  byId("legend").append(...items);
}

function refilter() {
  applyFilter();
  if (active.mark && !shown.marks.includes(active.mark)) active.mark = null;
  crosshair.at = active.mark?.at ?? null;
  hideTip();
  updateOptions();
  byId("nobody").hidden = shown.lanes.length > 0;
  layOut();
  redraw();
  const found = `${count(shown.lanes.length, "request")}, ${count(shown.marks.length, "event")}`;
  byId("said").textContent = `${found} shown`;
}

function clearRequestFilter() {
  filter.phase = "";
  filter.text = "";
  filter.inView = false;
  byId("in-view").checked = false;
  byId("phase").value = "";
  byId("find").value = "";
  refilter();
}

function drawFilters() {
  for (const [group, words] of Object.entries(picture.groups)) {
    byId("groups").append(groupBox(group, words));
  }
  for (const phase of [...picture.phases, "alone"]) {
    const words = PHASE_WORDS[phase] ?? "without a client";
    byId("phase").append(make("option", { value: phase, textContent: words }));
  }
  byId("phase").addEventListener("change", (event) => {
    filter.phase = event.target.value;
    refilter();
  });
  byId("in-view").addEventListener("change", (event) => {
    filter.inView = event.target.checked;
    refilter();
  });
  byId("find").addEventListener("input", (event) => {
    filter.text = event.target.value.trim();
    refilter();
  });
}

function repaint() {
  readColors();
  layOut();
  samplesDrawn.forEach((draw) => draw());
  redraw();
}

drawFilters();
drawLegend();
drawSummary();
showAll();
applyFilter();
updateOptions();
repaint();
drawNow();
followAddress();
new ResizeObserver(() => {
  layOut();
  redraw();
}).observe(scroller);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
window.addEventListener("resize", repaint);
document.documentElement.dataset.ready = "true";
