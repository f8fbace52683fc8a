// What is shown: groups of events, and requests by their id and the phases that they were in.

const undrawn = new Set(picture.undrawn);
const filter = { hidden: new Set(undrawn), phase: "", text: "" };
const shown = { lanes: [], marks: [], places: new Map() };

function isLike(lane) {
  const { phase, text } = filter;
  if (text && !lane.request_id.includes(text) && String(lane.number) !== text) return false;
  if (phase === "alone") return lane.alone.length > 0;
  return !phase || lane.times.has(phase);
}

const isDrawn = (mark) => !filter.hidden.has(mark.entry.group);

function applyFilter() {
  shown.lanes = lanes.filter(isLike);
  shown.places = new Map(shown.lanes.map((lane, place) => [lane.index, place]));
  shown.marks = marks.filter(
    (mark) => isDrawn(mark) && (mark.row === rail || shown.places.has(mark.row.index)),
  );
  shown.marks.forEach((mark, place) => {
    mark.place = place;
  });
}
