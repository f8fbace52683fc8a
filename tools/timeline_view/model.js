// The picture as the program uses it: entries with names, lanes with their marks, marks in order.

const entries = picture.entries.map(([seq, step, at, kind, lanes, body, lastSeq, until]) => {
  const [name, group, source] = picture.kinds[kind];
  return { seq, step, at, kind: name, group, source, lanes, body, lastSeq, until };
});

// That a server died is in no event: the next run's start tells it.
for (const away of picture.aways.filter((each) => each.died)) {
  const body = {
    run_id: away.run_id,
    last_seq: away.last_seq,
    away_ns: away.end_ns - away.begin_ns,
  };
  const place = { seq: away.last_seq, step: 0, at: away.begin_ns, until: away.begin_ns };
  const kind = { kind: "server_died", group: "server", source: "fact", lastSeq: away.last_seq };
  entries.push({ ...place, ...kind, lanes: [], body });
}
entries.sort((a, b) => a.at - b.at || a.seq - b.seq);

const lanes = picture.lanes.map((lane, index) => ({ ...lane, index, entries: [], marks: [] }));
const rail = { index: -1, marks: [] };
const marks = [];
for (const entry of entries) {
  entry.lanes.forEach((index) => lanes[index].entries.push(entry));
  const rows = entry.lanes.length ? entry.lanes.map((index) => lanes[index]) : [rail];
  for (const row of rows) {
    const mark = { at: entry.at, entry, row, order: marks.length };
    marks.push(mark);
    row.marks.push(mark);
  }
}

// Ids as short as they still differ: those that count up from a common beginning differ at the end.
function shortIds() {
  const ids = lanes.map((lane) => lane.request_id.replace(/^req_/, ""));
  const distinct = (cut) => new Set(ids.map(cut)).size === new Set(ids).size;
  for (let length = 6; length < 26; length += 1) {
    if (distinct((id) => id.slice(0, length))) return ids.map((id) => id.slice(0, length));
    if (distinct((id) => id.slice(-length))) return ids.map((id) => `…${id.slice(-length)}`);
  }
  return ids;
}
shortIds().forEach((short, index) => {
  lanes[index].short = short;
});

for (const lane of lanes) {
  lane.endAt = lane.end_ns ?? picture.end_ns;
  lane.times = new Map();
  lane.stretches = lane.stretches.map(([begin, phase], index, all) => {
    const end = index + 1 < all.length ? all[index + 1][0] : lane.endAt;
    const name = picture.phases[phase];
    lane.times.set(name, (lane.times.get(name) ?? 0) + end - begin);
    return { begin, end, phase: name, hold: null };
  });
}
const holds = picture.holds.map((hold) => ({ ...hold, lane: lanes[hold.lane] }));
for (const hold of holds) {
  for (const stretch of hold.lane.stretches) {
    const inside = stretch.begin >= hold.begin_ns && stretch.begin < (hold.end_ns ?? Infinity);
    const held = stretch.phase === "pausing" || stretch.phase === "paused";
    if (held && (inside || hold.begin_ns < 0)) stretch.hold ??= hold;
  }
}

const laneById = new Map(lanes.map((lane) => [lane.request_id, lane]));

function laneGist(lane) {
  const times = picture.phases
    .filter((phase) => lane.times.has(phase))
    .map((phase) => `${PHASE_WORDS[phase]} ${durationText(lane.times.get(phase))}`);
  const end = lane.outcome || "open";
  const events = count(lane.entries.length, "event");
  return `number ${lane.number}, ${end}; ${times.join(", ")}; ${events}`;
}

function stretchAt(lane, at) {
  return lane.stretches.find((stretch) => at >= stretch.begin && at < stretch.end);
}

// The place of the first element that is not before `at`.
function firstFrom(sorted, at) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle].at < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

const samples = picture.samples.map(([at, seq, usage, read, ceiling, level]) => ({
  at,
  seq,
  usage,
  read,
  ceiling,
  level,
}));

// The marks from one moment on, in bytes. They follow the ceiling, which readings may change.
const levels = [];
for (const [at, low, high, emergency, ceiling] of picture.marks) {
  levels.push({ at, permille: [low, high, emergency], ceiling });
}
for (const sample of samples.filter((each) => each.ceiling !== null)) {
  const before = levels.findLast((level) => level.at <= sample.at);
  if (before && before.ceiling !== sample.ceiling) {
    levels.push({ at: sample.at, permille: before.permille, ceiling: sample.ceiling });
    levels.sort((a, b) => a.at - b.at);
  }
}
const MARK_NAMES = ["low", "high", "emergency"];
