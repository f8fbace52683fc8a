// The layer for assistive technology and the keyboard: one list of all events that are drawn, of
// which one is active. The neighbours of the active one are elements, the others are numbers.

const list = byId("marks");
const active = { mark: null, isShown: false };
const options = new Map();

function nameOf(mark) {
  const { entry, row } = mark;
  const where = row === rail ? "server" : `request ${row.number}`;
  const line = lineOf(entry);
  const seq = entry.lastSeq > entry.seq ? `${entry.seq} to ${entry.lastSeq}` : entry.seq;
  const what = `${titleOf(entry.kind)}, ${where}, ${clockText(entry.at)}`;
  return `${line ? `${what}: ${line}` : what}; seq ${seq}`;
}

function optionOf(mark) {
  const option = make("div", { id: `mark-${mark.order}` });
  option.setAttribute("role", "option");
  option.setAttribute("aria-label", nameOf(mark));
  return option;
}

function updateOptions() {
  const { place } = active.mark ?? { place: 0 };
  const near = active.mark ? shown.marks.slice(Math.max(0, place - 1), place + 2) : [];
  const wanted = near.length ? near : shown.marks.slice(0, 1);
  for (const [mark, option] of options) {
    if (wanted.includes(mark)) continue;
    option.remove();
    options.delete(mark);
  }
  wanted.forEach((mark) => {
    const option = options.get(mark) ?? optionOf(mark);
    options.set(mark, option);
    option.setAttribute("aria-posinset", mark.place + 1);
    option.setAttribute("aria-setsize", shown.marks.length);
    option.setAttribute("aria-selected", String(mark === active.mark));
    list.append(option);
  });
  if (active.mark) list.setAttribute("aria-activedescendant", `mark-${active.mark.order}`);
  else list.removeAttribute("aria-activedescendant");
}

// Where a mark is in the list's own coordinates; those of the rail are above it.
function spotOf(mark) {
  const x = placeOf(mark.at) - view.left;
  if (mark.row === rail) return { x, y: railY(topCanvas.clientHeight) - topCanvas.clientHeight };
  const place = shown.places.get(mark.row.index) ?? 0;
  return { x, y: place * LANE_HEIGHT + LANE_HEIGHT / 2 - scroller.scrollTop };
}

function placeOptions() {
  for (const [mark, option] of options) {
    const { x, y } = spotOf(mark);
    option.style.transform = `translate(${x - 10}px, ${Math.max(0, y - 12)}px)`;
  }
}

function activate(mark, { reveal = true } = {}) {
  active.mark = mark;
  crosshair.at = mark ? mark.at : null;
  if (mark && reveal) {
    bringIntoView(mark.at);
    if (filter.inView) followView();
    if (mark.row !== rail) scrollToLane(mark.row);
  }
  updateOptions();
  drawNow();
  if (mark) tipAtMark(mark);
  else hideTip();
}

function tipAtMark(mark) {
  const { x, y } = spotOf(mark);
  const box = list.getBoundingClientRect();
  showTip(tipOf([mark]), box.left + x, box.top + y);
}

// The event that is nearest in time, in the next lane that has one.
function besides(mark, direction) {
  const place = mark.row === rail ? -1 : shown.places.get(mark.row.index);
  for (let next = place + direction; next >= -1 && next < shown.lanes.length; next += direction) {
    const row = next === -1 ? rail : shown.lanes[next];
    const found = nearest(row, mark.at, Infinity);
    if (found) return found;
  }
  return mark;
}

function nearest(row, at, reach) {
  const middle = firstFrom(row.marks, at);
  let best = null;
  for (const direction of [-1, 1]) {
    for (
      let i = direction < 0 ? middle - 1 : middle;
      i >= 0 && i < row.marks.length;
      i += direction
    ) {
      const mark = row.marks[i];
      const away = Math.abs(mark.at - at);
      if (away > reach || (best && away >= Math.abs(best.at - at))) break;
      if (!isDrawn(mark)) continue;
      best = mark;
      break;
    }
  }
  return best;
}

function tipOf(found) {
  const [{ entry, row }] = found;
  const box = make("div");
  const at = `${clockText(entry.at)} · seq ${entry.seq}`;
  const where = row === rail ? "server" : `request ${row.number} (${row.short})`;
  box.append(
    make("div", { className: "title", textContent: titleOf(entry.kind) }),
    make("div", { className: "quiet", textContent: `${at} · ${where}` }),
  );
  const line = lineOf(entry);
  if (line) box.append(make("div", { textContent: line }));
  box.append(fieldsOf(entry, { whole: false }));
  if (found.length > 1) {
    const others = found.slice(1, 5).map((mark) => titleOf(mark.entry.kind).toLowerCase());
    const more = found.length > 5 ? `, and ${found.length - 5} more` : "";
    const text = `Also here: ${others.join(", ")}${more}. Zoom in to part them.`;
    box.append(make("div", { className: "quiet", textContent: text }));
  }
  return box;
}

const tip = byId("tip");

function showTip(content, x, y) {
  tip.replaceChildren(content);
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(8, x + 14), window.innerWidth - width - 8);
  const below = y + 18;
  const top = below + height > window.innerHeight - 8 ? Math.max(8, y - height - 14) : below;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  tip.hidden = true;
}
