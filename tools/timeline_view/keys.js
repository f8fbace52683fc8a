// Everything by keyboard.

const PLOT_KEYS = {
  ArrowRight: () => step(1),
  ArrowLeft: () => step(-1),
  PageDown: () => step(20),
  PageUp: () => step(-20),
  ArrowDown: () => activate(besides(current(), 1)),
  ArrowUp: () => activate(besides(current(), -1)),
  Home: () => activate(shown.marks[0]),
  End: () => activate(shown.marks.at(-1)),
  Enter: () => openMark(active.mark),
  " ": () => openMark(active.mark),
};

// The active event, or the first one in view.
function current() {
  if (active.mark) return active.mark;
  return shown.marks[Math.min(firstFrom(shown.marks, view.begin), shown.marks.length - 1)];
}

function step(by) {
  if (!active.mark) {
    activate(current());
    return;
  }
  const place = Math.min(Math.max(active.mark.place + by, 0), shown.marks.length - 1);
  activate(shown.marks[place]);
}

list.addEventListener("keydown", (event) => {
  const action = PLOT_KEYS[event.key];
  if (!action || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (shown.marks.length) action();
});
list.addEventListener("focus", () => {
  if (shown.marks.length && list.matches(":focus-visible")) activate(current(), { reveal: false });
});
list.addEventListener("blur", hideTip);

function zoomBy(factor) {
  zoom(factor, active.mark ? active.mark.at : undefined);
  redraw();
  if (active.mark && document.activeElement === list) activate(active.mark);
}

function moveBy(part) {
  move(part);
  redraw();
}

function all() {
  showAll();
  redraw();
}

const VIEW_KEYS = { "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: all };

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches?.("input[type=search], select, textarea");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    escape();
  } else if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    moveBy(event.key === "ArrowLeft" ? -0.25 : 0.25);
    event.preventDefault();
  } else if (event.key in VIEW_KEYS) {
    VIEW_KEYS[event.key]();
    event.preventDefault();
  }
});

// A hint over the picture goes first, then the events of a request.
function escape() {
  if (!tip.hidden) hideTip();
  else if (details.lane) {
    location.hash = "";
    list.focus();
  }
}

byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
byId("zoom-out").addEventListener("click", () => zoomBy(2));
byId("zoom-all").addEventListener("click", all);
byId("move-left").addEventListener("click", () => moveBy(-0.25));
byId("move-right").addEventListener("click", () => moveBy(0.25));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  list.focus();
});
