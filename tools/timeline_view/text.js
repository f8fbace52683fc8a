// How times, sizes and events are said to people. Exact numbers stand beside every rounded one.

const NS_PER_MS = 1e6;
const NS_PER_S = 1e9;
const picture = JSON.parse(document.getElementById("data").textContent);
const baseNs = BigInt(picture.base_ns);

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function grouped(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${value.toFixed(digits)} ${units[unit]}`;
}

function durationText(ns) {
  const s = Math.abs(ns) / NS_PER_S;
  if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  if (s >= 120) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s >= 10) return `${s.toFixed(1)} s`;
  if (s >= 1) return `${s.toFixed(2)} s`;
  if (s >= 1e-3) return `${(s * 1e3).toFixed(s >= 0.1 ? 0 : 1)} ms`;
  return `${grouped(Math.round(s * 1e6))} µs`;
}

function exactNs(at) {
  return (baseNs + BigInt(Math.round(at))).toString();
}

// Clock times are those of UTC, so that two people see the same.
function clockText(at, digits = 3) {
  const ns = baseNs + BigInt(Math.round(at));
  const date = new Date(Number(ns / 1000000n));
  const whole = date.toISOString().slice(11, 19);
  const fraction = (ns % 1000000000n).toString().padStart(9, "0").slice(0, digits);
  return digits ? `${whole}.${fraction}` : whole;
}

function dayText(at) {
  return new Date(Number((baseNs + BigInt(Math.round(at))) / 1000000n)).toISOString().slice(0, 10);
}

function titleOf(kind) {
  const words = kind.replaceAll("_", " ").replace("kv", "KV");
  return words[0].toUpperCase() + words.slice(1);
}

const PHASE_WORDS = {
  waiting: "waiting",
  prefilling: "prefill",
  decoding: "decode",
  pausing: "pausing",
  paused: "paused",
  resuming: "resuming",
};

const REASONS = {
  high: "memory over the high mark",
  emergency: "memory over the emergency mark",
  no_room: "no room for the next chunk",
  operator: "held by hand",
  client_gone: "its client was lost",
  drain: "the server stops",
};

function reasonText(reason) {
  return REASONS[reason] ?? titleOf(reason || "held").toLowerCase();
}

const count = (number, one, many = `${one}s`) => `${grouped(number)} ${number === 1 ? one : many}`;

function ofCeiling(body, name) {
  const used = bytesText(body[name]);
  return body.ceiling_bytes === null ? used : `${used} of ${bytesText(body.ceiling_bytes)}`;
}

function rowText(body) {
  const needs = `needs ${bytesText(body.reserved_bytes)}`;
  if (body.ceiling_bytes === null) return `${needs}; no ceiling`;
  const free = bytesText(body.ceiling_bytes - body.in_use_bytes);
  return `${needs}; ${free} free of a ceiling of ${bytesText(body.ceiling_bytes)}`;
}

// One line about what an event says; kinds that are not here are told by their numbers alone.
const LINES = {
  pause_started: (b) =>
    `${reasonText(b.reason)}: rank ${b.rank} of ${b.num_candidates}, frees ` +
    `${bytesText(b.frees_bytes)}, ${bytesText(b.unsaved_bytes)} to save; ` +
    `used and reserved ${ofCeiling(b, "usage_bytes")}`,
  request_paused: (b) => `${reasonText(b.reason)}; ${count(b.num_cached_tokens, "token")} kept`,
  kv_dropped: (b) => `held with its tokens only: ${b.reason.replaceAll("_", " ")}`,
  chain_pinned: (b) => `${count(b.num_blocks, "block")}, tail ${bytesText(b.tail_bytes)}`,
  resume_started: (b) => `${rowText(b)}; held for ${durationText(b.held_ns)} by then`,
  request_resumed: (b) =>
    `${count(b.num_cached_tokens, "token")} are there, ${grouped(b.num_lost_tokens)} are lost`,
  request_received: (b) => `${count(b.num_prompt_tokens, "prompt token")}`,
  request_queued: (b) => `at most ${count(b.max_tokens, "token")}; ${b.num_waiting} wait`,
  request_admitted: (b) =>
    `${rowText(b)}; ${grouped(b.num_cached_tokens)} of ${count(b.num_known_tokens, "token")} saved`,
  request_deferred: (b) => `waits for a block that request ${b.computed_by} computes`,
  request_finished: (b) =>
    `${b.reason.replaceAll("_", " ")}, ${count(b.num_output_tokens, "token")}`,
  request_cancelled: (b) =>
    `${b.reason.replaceAll("_", " ")}, ${count(b.num_output_tokens, "token")}`,
  request_aborted: (b) => `${b.reason.replaceAll("_", " ")}: ${b.detail}`,
  request_rejected: (b) => b.reason.replaceAll("_", " "),
  request_joined: (b) => `is the same as ${b.joined_id}, by ${b.by}`,
  request_adopted: (b) =>
    `by ${b.adopter_id}, known by ${b.by}; without a client for ${durationText(b.orphaned_ns)}`,
  reclaim_started: (b) =>
    `${bytesText(b.expected_bytes)} expected; used and reserved ${ofCeiling(b, "usage_bytes")}`,
  memory_reclaimed: (b) => `${bytesText(b.freed_bytes)} given back`,
  tier_shrunk: (b) => `${bytesText(b.freed_bytes)} leave memory: ${b.reason}`,
  emergency_declared: (b) =>
    `used and reserved ${ofCeiling(b, "usage_bytes")}, ${count(b.num_admitted, "row")}`,
  blocks_evicted: (b) => `${bytesText(b.freed_bytes)} leave disk: ${b.reason.replaceAll("_", " ")}`,
  saving_stopped: (b) => `${b.reason.replaceAll("_", " ")}: ${b.detail}`,
  engine_failed: (b) => `during ${b.during}: ${b.error}`,
  server_started: (b) => `policy ${b.policy_version}, model ${b.model.name}`,
  server_stopping: (b) => b.reason,
  server_died: (b) => `away for ${durationText(b.away_ns)}; its last event is ${b.last_seq}`,
  memory_sampled: (b) =>
    `read ${bytesText(b.active_bytes)} given out, ${bytesText(b.cached_bytes)} kept`,
  tokens_decoded: (b) => `${count(b.num_steps, "step")} of batch ${b.batch}`,
  prefill_chunk_planned: (b) => `${count(b.length, "token")} from ${grouped(b.start)} on`,
  prefill_chunk_done: (b) => `${count(b.length, "token")} in ${durationText(b.duration_ns)}`,
};

function lineOf(entry) {
  const line = LINES[entry.kind];
  return line ? line(entry.body) : "";
}

// A field as it stands in the journal, with what it comes to where it has a unit.
function valueText(name, value) {
  if (typeof value === "number") {
    if (name.endsWith("_bytes")) return `${grouped(value)} B (${bytesText(value)})`;
    if (name.endsWith("_ns")) return `${grouped(value)} ns (${durationText(value)})`;
    return grouped(value);
  }
  if (value === null) return "none";
  if (Array.isArray(value)) return value.map((v) => valueText("", v)).join(", ") || "none";
  if (typeof value === "object") return JSON.stringify(value, null, 1);
  return String(value) || "none";
}

function fieldsOf(entry, { whole }) {
  const list = make("dl");
  for (const [name, value] of Object.entries(entry.body)) {
    const isNested = value !== null && typeof value === "object" && !Array.isArray(value);
    if (isNested && !whole) continue;
    const text = valueText(name, value);
    list.append(make("dt", { textContent: name }));
    list.append(make("dd", {}, isNested ? make("pre", { textContent: text }) : text));
  }
  return list;
}
