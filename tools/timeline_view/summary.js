// What there is to see, in a sentence, and who was held: the first thing that people look for.

const HOLDS_AT_ONCE = 100;

// Held is from when its KV was saved until it goes on or ends: held_ms of the view `pauses`.
function heldNs(hold) {
  const end = hold.end_ns ?? picture.end_ns;
  return end - (hold.paused_ns ?? end);
}

function reasonsGist() {
  const counts = new Map();
  for (const { reason } of holds) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  return sorted.map(([reason, number]) => `${number} × ${reasonText(reason)}`).join(", ");
}

function outcomesGist() {
  const counts = new Map();
  for (const lane of lanes) {
    const name = lane.outcome || "open";
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, number]) => `${number} ${name}`).join(", ");
}

function bad(text) {
  return make("strong", { className: "bad", textContent: text });
}

function highest(name) {
  return samples.reduce((best, each) => (each[name] > best[name] ? each : best));
}

// What was measured and what is counted against the marks are two numbers.
function memoryGist() {
  const [read, usage] = [highest("read"), highest("usage")];
  const ceiling = usage.ceiling === null ? "" : `, ceiling ${bytesText(usage.ceiling)}`;
  return (
    `memory read up to ${bytesText(read.read)}, ` +
    `used and reserved up to ${bytesText(usage.usage)}${ceiling}`
  );
}

function gistParts() {
  const parts = [[`${count(lanes.length, "request")}: ${outcomesGist() || "none"}`]];
  const total = holds.reduce((sum, hold) => sum + heldNs(hold), 0);
  if (holds.length) {
    const requests = new Set(holds.map((hold) => hold.lane)).size;
    const who = `${count(requests, "request")} held ${count(holds.length, "time")}`;
    parts.push([bad(who), ` for ${durationText(total)} in all (${reasonsGist()})`]);
  } else parts.push(["nobody was held"]);
  if (samples.length) parts.push([memoryGist()]);
  const deaths = picture.aways.filter((away) => away.died).length;
  if (deaths) parts.push([bad(`the server died ${deaths === 1 ? "once" : `${deaths} times`}`)]);
  return parts;
}

function holdNumbers(hold) {
  if (hold.rank === null) return "";
  const place = hold.rank ? `Rank ${hold.rank} of ${hold.num_candidates}` : "Named, not chosen";
  const frees = `frees ${bytesText(hold.frees_bytes)}, ${bytesText(hold.unsaved_bytes)} to save`;
  return `${place}; ${frees}; used and reserved ${ofCeiling(hold, "usage_bytes")}.`;
}

function holdThen(hold) {
  if (hold.end_ns === null) return "Still held at the end.";
  const then =
    hold.became === "waiting" ? "back in the queue" : (PHASE_WORDS[hold.became] ?? hold.became);
  return `Then ${then}.`;
}

function holdItem(hold) {
  const { lane } = hold;
  const from = hold.begin_ns < 0 ? "before" : clockText(hold.begin_ns);
  const button = make("button", { type: "button", textContent: "Show" });
  button.setAttribute("aria-label", `Show where request ${lane.number} was held at ${from}`);
  button.addEventListener("click", () => showHold(hold));
  const link = make("a", { href: `#${lane.request_id}`, className: "id", textContent: lane.short });
  link.setAttribute("aria-label", `Events of ${lane.request_id}`);
  const length = hold.paused_ns === null ? "being saved" : `held for ${durationText(heldNs(hold))}`;
  const when = ` (request ${lane.number}) from ${from}, ${length}`;
  const item = make("div", { className: "hold" }, button, make("p", {}, link, when));
  item.setAttribute("role", "listitem");
  item.append(make("p", { className: "why", textContent: titleOf(reasonText(hold.reason)) }));
  const rest = [holdNumbers(hold), holdThen(hold)].filter(Boolean).join(" ");
  item.append(make("p", { className: "numbers", textContent: rest }));
  return item;
}

// The hold with some of what was before and after it.
function showHold(hold) {
  const length = Math.max((hold.end_ns ?? picture.end_ns) - hold.begin_ns, WHOLE_NS / 200);
  show(hold.begin_ns - length * 0.6, hold.begin_ns + length * 1.8);
  revealLane(hold.lane);
  const mark = hold.lane.marks.find((each) => each.entry.seq === hold.seq);
  list.focus();
  if (mark && isDrawn(mark) && mark.place !== undefined) activate(mark, { reveal: false });
  else redraw();
}

function drawHolds(from) {
  const items = holds.slice(from, from + HOLDS_AT_ONCE).map(holdItem);
  const box = byId("held-list");
  box.append(...items);
  const left = holds.length - from - items.length;
  if (left > 0) {
    const more = make("button", { type: "button", textContent: `Show more (${left} left)` });
    more.addEventListener("click", () => {
      more.remove();
      drawHolds(from + HOLDS_AT_ONCE);
    });
    box.append(more);
  }
}

// Without events, the picture shows what went on between two.
function seqsText() {
  const { first_seq: first, last_seq: last, num_events: number } = picture;
  return number ? `seq ${first} to ${last}` : `between seq ${last} and ${first}`;
}

function drawSummary() {
  const begin = `${dayText(0)} ${clockText(0, 0)}`;
  byId("window").textContent =
    `${picture.journal} · ${picture.model || "no model"} · ${begin} UTC, ` +
    `${durationText(picture.end_ns)} · ` +
    `${seqsText()} (${picture.what})`;
  document.title = `Fermata timeline: ${picture.journal}, ${begin}`;
  gistParts().forEach((part, index) => byId("gist").append(...(index ? [" · "] : []), ...part));
  if (!holds.length) {
    byId("held-list").append(make("p", { className: "none", textContent: "Nobody." }));
    return;
  }
  byId("held-list").setAttribute("role", "list");
  drawHolds(0);
}
