// From times to places and back: what part of the picture is in view.

const WHOLE_NS = Math.max(picture.end_ns, 1000);
const LEAST_NS = 1000;
const MARGIN = 0.015;

const view = { begin: 0, end: 0, left: 0, width: 1 };

const spanOf = () => view.end - view.begin;
const placeOf = (at) => view.left + ((at - view.begin) / spanOf()) * view.width;
const timeAt = (place) => view.begin + ((place - view.left) / view.width) * spanOf();

function showAll() {
  view.begin = -WHOLE_NS * MARGIN;
  view.end = WHOLE_NS * (1 + MARGIN);
}

// Keeps the span within bounds, and something of the picture in view.
function show(begin, end) {
  const most = WHOLE_NS * (1 + 2 * MARGIN);
  const span = Math.min(Math.max(end - begin, LEAST_NS), most);
  const least = -WHOLE_NS * MARGIN;
  view.begin = Math.min(Math.max(begin, least), least + most - span);
  view.end = view.begin + span;
}

function zoom(factor, at = (view.begin + view.end) / 2) {
  show(at - (at - view.begin) * factor, at + (view.end - at) * factor);
}

function move(part) {
  const by = spanOf() * part;
  show(view.begin + by, view.end + by);
}

function bringIntoView(at) {
  const margin = spanOf() * 0.06;
  if (at < view.begin + margin) move((at - view.begin - margin) / spanOf());
  else if (at > view.end - margin) move((at - view.end + margin) / spanOf());
}

const S = NS_PER_S;
const STEPS = [1, 2, 5].flatMap((n) => [1e3, 1e4, 1e5, 1e6, 1e7, 1e8].map((unit) => n * unit));
STEPS.push(S, 2 * S, 5 * S, 10 * S, 15 * S, 30 * S, 60 * S, 120 * S, 300 * S, 600 * S, 900 * S);
STEPS.push(1800 * S, 3600 * S, 7200 * S, 21600 * S, 43200 * S, 86400 * S, 604800 * S);
STEPS.sort((a, b) => a - b);

// Round times in view, as far from each other as their texts need, counted from midnight.
function ticks(least) {
  const wanted = (spanOf() / view.width) * least;
  const step = STEPS.find((each) => each >= wanted) ?? STEPS.at(-1);
  const offset = Number(baseNs % BigInt(step));
  const found = [];
  let at = Math.ceil((view.begin + offset) / step) * step - offset;
  for (; at <= view.end; at += step) found.push(at);
  const digits = step >= S ? 0 : Math.min(9, Math.ceil(-Math.log10(step / S) - 1e-9));
  return { step, digits, found };
}
