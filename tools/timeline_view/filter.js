// What is shown: groups of events, and requests by their id and the phases that they were in.

const filter = { hidden: new Set(picture.undrawn), phase: "", text: "", inView: false };
const shown = { like: [], lanes: [], marks: [], places: new Map() };

for (const lane of lanes) {
  lane.beginAt = lane.stretches[0]?.begin ?? 0;
  lane.lastAt = Math.max(lane.endAt, lane.entries.at(-1)?.at ?? 0);
}

function isLike(lane) {
  const { phase, text } = filter;
  if (text && !lane.request_id.includes(text) && String(lane.number) !== text) return false;
  if (phase === "alone") return lane.alone.length > 0;
  return !phase || lane.times.has(phase);
}

const isDrawn = (mark) => !filter.hidden.has(mark.entry.group);
const isInView = (lane) => lane.beginAt <= view.end && lane.lastAt >= view.begin;

// Which lanes are below each other. Where they follow the view, it changes with each move.
function applyView() {
  shown.lanes = filter.inView ? shown.like.filter(isInView) : shown.like;
  shown.places = new Map(shown.lanes.map((lane, place) => [lane.index, place]));
}

function applyFilter() {
  shown.like = lanes.filter(isLike);
  const isIn = new Set(shown.like);
  shown.marks = marks.filter((mark) => isDrawn(mark) && (mark.row === rail || isIn.has(mark.row)));
  shown.marks.forEach((mark, place) => {
    mark.place = place;
  });
  applyView();
}
