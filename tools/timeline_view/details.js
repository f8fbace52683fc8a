// Beside the picture: one request's events in order, which `#req_…` in the address opens.

const AT_ONCE = 300;
const details = { lane: null, num: 0 };

function eventItem(entry, lane) {
  const head = make(
    "span",
    { className: "head" },
    make("span", { className: entry.source, textContent: titleOf(entry.kind) }),
    make("span", { className: "when", textContent: clockText(entry.at) }),
  );
  const seq =
    entry.lastSeq > entry.seq ? `seq ${entry.seq} to ${entry.lastSeq}` : `seq ${entry.seq}`;
  const since = durationText(entry.at - lane.stretches[0].begin);
  const texts = [seq, `step ${entry.step}`, `+${since}`];
  const summary = make("summary", {}, lineOf(entry));
  for (const text of texts) {
    if (summary.textContent) summary.append(" · ");
    summary.append(make("span", { textContent: text }));
  }
  const fields = make("details", {}, summary);
  fields.addEventListener("toggle", () => {
    if (fields.children.length > 1) return;
    fields.append(fieldsOf(entry, { whole: true }));
  });
  const item = make("li", { id: `event-${entry.seq}` }, head, fields);
  item.dataset.seq = entry.seq;
  return item;
}

function showMore(least = 0) {
  const { lane } = details;
  const end = Math.max(details.num + AT_ONCE, least);
  const next = lane.entries.slice(details.num, end);
  byId("one-events").append(...next.map((entry) => eventItem(entry, lane)));
  details.num += next.length;
  byId("more").hidden = details.num >= lane.entries.length;
  const left = lane.entries.length - details.num;
  byId("more").textContent = `Show more events (${grouped(left)} left)`;
}

function showDetails(lane) {
  details.lane = lane;
  details.num = 0;
  byId("held").hidden = lane !== null;
  byId("one").hidden = lane === null;
  byId("one-events").replaceChildren();
  redraw();
  if (!lane) return;
  byId("one-title").textContent = lane.request_id;
  byId("one-gist").textContent = laneGist(lane);
  showMore();
  byId("side").scrollTop = 0;
  revealLane(lane);
}

// A lane that the filter hides is no place to look: the filter gives way.
function revealLane(lane) {
  if (!shown.places.has(lane.index)) clearRequestFilter();
  scrollToLane(lane);
}

// The event in the list of its request; an event that is about no request has no such list.
function openMark(mark) {
  if (!mark) return;
  activate(mark, { reveal: false });
  if (mark.row === rail) {
    byId("said").textContent = nameOf(mark);
    return;
  }
  if (location.hash === `#${mark.row.request_id}`) showEvent(mark);
  else {
    details.wanted = mark;
    location.hash = mark.row.request_id;
  }
}

function showEvent(mark) {
  const place = mark.row.entries.indexOf(mark.entry);
  if (place >= details.num) showMore(place + 50);
  for (const item of byId("one-events").querySelectorAll(".active"))
    item.classList.remove("active");
  const item = byId(`event-${mark.entry.seq}`);
  item.classList.add("active");
  item.querySelector("details").open = true;
  item.scrollIntoView({ block: "center" });
  byId("said").textContent = `Events of request ${mark.row.number} are beside the picture`;
}

function followAddress() {
  const lane = laneById.get(decodeURIComponent(location.hash.slice(1))) ?? null;
  const isKnown = lane !== null || !location.hash.startsWith("#req_");
  byId("said").textContent = isKnown ? "" : "This request is not in the picture";
  showDetails(lane);
  if (lane && details.wanted?.row === lane) showEvent(details.wanted);
  else if (lane && document.activeElement?.closest("#labels, #held")) {
    byId("side").focus({ preventScroll: true });
  }
  details.wanted = null;
}

byId("more").addEventListener("click", () => showMore());
byId("back").addEventListener("click", (event) => {
  event.preventDefault();
  location.hash = "";
});
window.addEventListener("hashchange", followAddress);
