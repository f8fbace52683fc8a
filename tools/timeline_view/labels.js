// The lanes' names: a link for each request to its events. Only those in view are elements; one of
// them is in the order of focus, and the arrow keys go on from it.

const labels = byId("labels");
const label = { lane: null };
const drawnLabels = new Map();

function makeLabel(lane) {
  const link = make("a", { href: `#${lane.request_id}` });
  const isBad = lane.outcome === "aborted" || lane.outcome === "cancelled";
  link.append(
    make("span", { className: "number", textContent: lane.number }),
    make("span", { className: "id", textContent: lane.short }),
    make("span", {
      className: isBad ? "outcome bad" : "outcome",
      textContent: lane.outcome || "open",
    }),
  );
  link.title = lane.request_id;
  link.setAttribute("aria-label", `Events of ${lane.request_id}: ${laneGist(lane)}`);
  link.addEventListener("focus", () => {
    label.lane = lane;
    redraw();
  });
  return make("li", {}, link);
}

function drawLabels() {
  const first = Math.floor(scroller.scrollTop / LANE_HEIGHT);
  const end = Math.ceil((scroller.scrollTop + scroller.clientHeight) / LANE_HEIGHT);
  const wanted = shown.lanes.slice(first, end);
  const isIn = new Set(wanted);
  for (const [lane, item] of drawnLabels) {
    if (isIn.has(lane)) continue;
    item.remove();
    drawnLabels.delete(lane);
  }
  const tabbed = isIn.has(label.lane) ? label.lane : wanted[0];
  wanted.forEach((lane, offset) => {
    let item = drawnLabels.get(lane);
    if (!item) {
      item = makeLabel(lane);
      drawnLabels.set(lane, item);
      const next = wanted.slice(offset + 1).find((each) => drawnLabels.has(each));
      labels.insertBefore(item, next ? drawnLabels.get(next) : null);
    }
    item.style.top = `${(first + offset) * LANE_HEIGHT - scroller.scrollTop}px`;
    const link = item.firstChild;
    link.tabIndex = lane === tabbed ? 0 : -1;
    if (lane === details.lane) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  });
}

function focusLabel(place) {
  const lane = shown.lanes[Math.min(Math.max(place, 0), shown.lanes.length - 1)];
  label.lane = lane;
  scrollToLane(lane);
  drawNow();
  drawnLabels.get(lane).firstChild.focus({ preventScroll: true });
}

labels.addEventListener("keydown", (event) => {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12 };
  const place = shown.places.get(label.lane?.index);
  if (place === undefined) return;
  if (event.key in steps) focusLabel(place + steps[event.key]);
  else if (event.key === "Home") focusLabel(0);
  else if (event.key === "End") focusLabel(shown.lanes.length - 1);
  else return;
  event.preventDefault();
});
