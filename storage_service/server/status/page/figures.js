// Figures as text, the order of tables, and what needs attention: nothing here knows the document.

const THIN = "\u202f";

function whole(number) {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, THIN);
}

// Three digits that count.
function digits(value) {
  return value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : whole(value);
}
function short(number) {
  let value = Math.abs(number);
  const sign = number < 0 ? "-" : "";
  if (value < 999.5) return sign + (value < 9.95 && value % 1 >= 0.05 ? value.toFixed(1) : whole(value));
  for (const unit of ["k", "M", "G", "T"]) {
    value /= 1000;
    if (value < 999.5 || unit === "T") return sign + digits(value) + THIN + unit;
  }
}

// By 1024, as the command line writes and reads sizes.
function bytes(count) {
  if (count < 999.5) return `${whole(count)}${THIN}B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    count /= 1024;
    if (count < 999.5 || unit === "TiB") return digits(count) + THIN + unit;
  }
}

// Two units at most, so that ages can be compared at a glance.
function age(ms) {
  if (ms < 1) return ms > 0 ? `${ms.toFixed(1)}${THIN}ms` : `0${THIN}s`;
  if (ms < 10) return `${+ms.toFixed(1)}${THIN}ms`;
  if (ms < 999.5) return `${Math.round(ms)}${THIN}ms`;
  if (ms < 9950) return `${(ms / 1000).toFixed(1)}${THIN}s`;
  let seconds = Math.round(ms / 1000);
  if (seconds >= 5 * 60 && seconds < 3600) seconds = 60 * Math.round(seconds / 60);
  if (seconds >= 5 * 3600 && seconds < 86400) seconds = 3600 * Math.round(seconds / 3600);
  for (const [size, unit, below, part] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (seconds < size) continue;
    if (seconds >= 5 * size) return `${Math.round(seconds / size)}${THIN}${unit}`;
    const much = Math.floor(seconds / size), rest = Math.floor(seconds % size / below);
    return `${much}${THIN}${unit}` + (rest ? ` ${rest}${THIN}${part}` : "");
  }
  return `${seconds}${THIN}s`;
}

function percent(share) {
  return `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)}${THIN}%`;
}

// Every figure of the page: "–" for what is not known or does not apply, else three digits that count and the unit.
// Offsets, and how long a list is, are exact.
const UNITS = { B: bytes, ms: age, "%": percent, "/s": rate => `${short(rate)}/s`, cores: n => `${n.toFixed(2)}${THIN}cores`, exact: whole };
function figure(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return (UNITS[unit] ?? short)(value);
}
function counted(count, one, many = `${one}s`) {
  return `${figure(count)} ${count === 1 ? one : many}`;
}

// The top of a scale: 1, 2 or 5 and zeros, at least `most`.
function scaleTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map(n => n * power).find(top => top >= most * 0.999999);
}

// The same of times, where people count in seconds, minutes, hours and days.
function scaleTopMs(most) {
  const steps = [1, 2, 5, 10, 20, 30].flatMap(n => [n * 1e3, n * 60e3]).concat([1, 2, 3, 6, 12, 24].map(n => n * 3600e3)).sort((a, b) => a - b);
  return most < 1000 ? scaleTop(most) : steps.find(top => top >= most) ?? Math.ceil(most / 86400e3) * 86400e3;
}

// Local time, the same wherever one reads it: 2026-11-23 08:17:09.
function moment(us) {
  const at = new Date(us / 1000), two = number => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")}`;
}

// A line through values that are evenly spread over the width; fewer than `points` end at its right.
function linePath(values, { width, height, top, points = 0 }) {
  const missing = Math.max(0, points - values.length), step = width / Math.max(1, values.length + missing - 1);
  return values.map((value, i) =>
    `${i ? "L" : "M"}${((missing + i) * step).toFixed(1)} ${(height - 1 - (height - 2) * (top ? Math.min(1, value / top) : 0)).toFixed(1)}`).join("");
}

const SORTS = ["state", "table", "row_count", "written_rows_per_s", "read_rows_per_s", "log_bytes", "lag_ms", "shard"];

// #/?q=orders&sort=lag_ms&dir=down is the list, #/sales/orders one table, #/~docs/runbook/streamhousedown a document.
const DOCUMENTS = "~docs";
function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#(table-|\/)?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(part => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  const asked = new URLSearchParams(query), sort = asked.get("sort");
  if (parts[0] === DOCUMENTS) return { table: null, file: parts[1] ?? "README", at: parts[2] ?? "" };
  if (parts.length) return { table: parts.length === 1 && !parts[0].includes(".") ? `default.${parts[0]}` : parts.join(".") };
  return { table: null, search: asked.get("q") ?? "", only: asked.get("only") ?? "",
    sort: SORTS.includes(sort) ? sort : "state", isDown: asked.get("dir") === "down" };
}
function routeOfTable(name) {
  return `#/${name.split(".").map(encodeURIComponent).join("/")}`;
}
function routeOfDocument(file, at = "") {
  return `#/${[DOCUMENTS, file, ...(at ? [at.toLowerCase()] : [])].map(encodeURIComponent).join("/")}`;
}
function routeOfList({ search, only, sort, isDown }) {
  const asked = new URLSearchParams();
  if (search) asked.set("q", search);
  if (only) asked.set("only", only);
  if (sort !== "state" || isDown) asked.set("sort", sort);
  if (isDown) asked.set("dir", "down");
  return `#/${String(asked) ? `?${asked}` : ""}`;
}

const STATES = {
  damaged: { rank: 0, kind: "bad" }, unusable: { rank: 1, kind: "bad" },
  "two histories": { rank: 2, kind: "bad" }, failing: { rank: 3, kind: "bad" },
  late: { rank: 4, kind: "late" }, debt: { rank: 5, kind: "warn" },
  fresh: { rank: 6, kind: "fine" }, "no lake": { rank: 7, kind: "none" },
};
function stateOf(table) {
  if (table.damaged) return "damaged";
  if (table.unusable?.length) return "unusable";
  if (table.tiering?.diverged) return "two histories";
  if (table.tiering?.failures) return "failing";
  if (!table.is_tiered) return "no lake";
  if (table.lag_ms > table.freshness_ms) return "late";
  const debt = table.tiering?.maintenance_debt;
  if (debt && table.has_much_debt !== false) return "debt";
  return "fresh";
}
function lateness(table) {
  return table.is_tiered ? table.lag_ms / Math.max(1, table.freshness_ms) : 0;
}

// Damaged tables have no figures, and are looked for like all others.
function listed(status) {
  return [...status.tables, ...(status.damaged_tables ?? []).map(t => ({ table: t.table, shard: t.shard, damaged: t.reason, since_us: t.since_us,
    row_count: 0, log_bytes: 0, written_rows_per_s: 0, read_rows_per_s: 0, lag_ms: 0, is_tiered: false, tiering: {} }))];
}
function wanted(tables, { search, only }) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return tables.filter(t => words.every(word => t.table.toLowerCase().includes(word)) && (
    !only || (only === "trouble" ? STATES[stateOf(t)].rank <= 5 : only === "active" ? t.written_rows_per_s + t.read_rows_per_s > 0 : true)));
}
function inOrder(tables, { sort, isDown }) {
  const byName = (a, b) => a.table < b.table ? -1 : a.table > b.table ? 1 : 0;
  const compare = {
    // Tables without trouble keep their places: their lag goes up and down with each round.
    state: (a, b) => STATES[stateOf(a)].rank - STATES[stateOf(b)].rank
      || (STATES[stateOf(a)].rank < STATES.fresh.rank ? lateness(b) - lateness(a) : 0),
    table: byName,
    shard: (a, b) => String(a.shard ?? "").localeCompare(String(b.shard ?? ""), "en", { numeric: true }),
  }[sort] ?? ((a, b) => (a[sort] ?? 0) - (b[sort] ?? 0));
  return [...tables].sort((a, b) => (isDown ? -1 : 1) * compare(a, b) || byName(a, b));
}

function debtText(debt) {
  if (debt.maintenance_error) return `maintenance failed: ${debt.maintenance_error}`;
  if (debt.is_scattered)
    return `a round writes ${figure(debt.round_files)} files for ${figure(debt.round_rows)} rows: `
      + "fewer buckets or coarser partitions, or a longer table.datalake.freshness";
  const parts = [counted(debt.small_files, "small file"), counted(debt.delete_files, "delete file")];
  if (debt.deleted_share >= 0.001) parts.push(`${figure(debt.deleted_share, "%")} of the rows deleted`);
  return `maintenance does not keep up: ${parts.join(", ")}`;
}

// What a shard's process says, of all shards together: sums, and the worst of what is timed.
function together(status) {
  const told = (status.shards ?? []).map(s => s.service).filter(Boolean);
  if (told.length < 2) return status.service;
  const sum = name => told.reduce((total, one) => total + (one[name] ?? 0), 0);
  const worst = pick => told.map(pick).filter(Boolean).reduce((a, b) => !a || b.p99_ms > a.p99_ms ? b : a, null);
  const added = name => {
    const count = Math.min(...told.map(one => one.history[name].length));
    return Array.from({ length: count }, (_, i) =>
      told.reduce((total, one) => total + one.history[name].slice(-count)[i], 0));
  };
  const errors = {};
  for (const one of told) for (const [code, n] of Object.entries(one.errors)) errors[code] = (errors[code] ?? 0) + n;
  return { ...status.service, errors,
    ...Object.fromEntries(["written_rows_per_s", "read_rows_per_s", "memory_bytes", "request_memory_bytes", "disk_bytes", "processor_share"].map(n => [n, sum(n)])),
    disk_bytes_max: told.every(one => one.disk_bytes_max) ? sum("disk_bytes_max") : null,
    latency: { write: worst(one => one.latency.write), lookup: worst(one => one.latency.lookup) },
    history: { written_rows_per_s: added("written_rows_per_s"), read_rows_per_s: added("read_rows_per_s") } };
}

// The reason before the place: "/data/…/0.log at byte 0: checksum mismatch" is a checksum mismatch, wherever it is.
const PLACE = /\/|^(bucket|segment|line|shard|epoch) \S+$|\.\w{2,6}( at \S.*)?$/;
function causeOf(text) {
  const parts = String(text ?? "").split(": "), where = [];
  while (parts.length > 1 && (PLACE.test(parts[0]) || /^table '.*'$/.test(parts[0]))) where.push(parts.shift());
  const cause = parts.join(": ");
  return { cause: cause.charAt(0).toUpperCase() + cause.slice(1), where: where.filter(part => !/^table '/.test(part)).join(": ") };
}

const JOURNAL_LAG_MS_HIGH = 5000, READER_LAG_MS_HIGH = 600e3, SILENT_MS = 60e3;

// A slow reader reports and is behind; a silent reader has stopped to report.
function readerState(consumer, nowUs) {
  const silentMs = (nowUs - consumer.reported_us) / 1000;
  if (silentMs > SILENT_MS) return { word: "silent", kind: consumer.rows_at_risk ? "bad" : consumer.lag_rows ? "warn" : "none" };
  if (consumer.lag_rows && (consumer.lag_ms === null || consumer.lag_ms > READER_LAG_MS_HIGH))
    return { word: "slow", kind: consumer.rows_at_risk ? "bad" : "late" };
  return { word: "reads", kind: consumer.rows_at_risk ? "bad" : "fine" };
}
function readerTrouble(c, nowUs) {
  const { word } = readerState(c, nowUs), silentMs = (nowUs - c.reported_us) / 1000;
  const how = word === "silent" ? `has not reported for ${figure(silentMs, "ms")}`
    : word === "slow" ? `reports, and is ${c.lag_ms === null ? "at rows that only the lake has" : `${figure(c.lag_ms, "ms")} behind`}` : "reads";
  const unread = `${counted(c.lag_rows, "row")} unread`;
  const since_us = word === "silent" ? c.reported_us : c.lag_ms ? nowUs - 1000 * c.lag_ms : null;
  if (c.rows_at_risk) return { rank: 3.2, kind: "bad", word: "rows at risk", runbook: "StreamhouseReaderRowsAtRisk", since_us,
    text: `${counted(c.rows_at_risk, "row leaves", "rows leave")} the log soon. Reader ${c.name} ${how}, ${unread}` };
  if (word === "slow") return { rank: 4.5, kind: "late", word: "slow reader", runbook: "StreamhouseReaderLate", since_us, text: `Reader ${c.name} ${how}, ${unread}` };
  if (word === "silent" && c.lag_rows && silentMs > READER_LAG_MS_HIGH)
    return { rank: 4.6, kind: "warn", word: "silent reader", runbook: "StreamhouseReaderLate", since_us, text: `Reader ${c.name} ${how}, ${unread}` };
  return null;
}

const RUNBOOK = { damaged: "StreamhouseTableDamaged", unusable: "StreamhouseRowsByKeyUnusable", "two histories": "StreamhouseTwoHistories",
  failing: "StreamhouseTieringFails", late: "StreamhouseLakeLate" };

// What somebody has to look after, the worst first: the cause, the place, since when, and the document with the remedy.
function troubles(status) {
  const found = [], add = (rank, kind, word, text, { table = null, weight = 0, since_us = null, runbook = null, document = null } = {}) => {
    found.push({ rank, kind, word, ...causeOf(text), table, weight, since_us, document: runbook ? ["runbook", runbook] : document });
  };
  for (const s of status.shards ?? []) if (!s.answers) add(0, "bad", "away",
    `Shard ${s.shard} does not answer, so its tables are not shown`, { runbook: "StreamhouseShardWithoutOwner" });
  const services = (status.shards ?? []).length > 1
    ? status.shards.filter(s => s.service).map(s => [`Shard ${s.shard}: `, s.service]) : [["", status.service]];
  for (const [whose, service] of services) {
    if (!service) continue;
    const share = service.disk_bytes_max ? service.disk_bytes / service.disk_bytes_max : 0;
    const room = `${figure(service.disk_bytes, "B")} of ${figure(service.disk_bytes_max, "B")} (--disk-max)`;
    if (share > 1) add(0, "bad", "disk full", `${whose}Writes are refused: rows take ${room}`, { runbook: "StreamhouseDiskFilling" });
    else if (share > 0.8) add(3.5, "warn", "disk", `${whose}Rows take ${room}`, { runbook: "StreamhouseDiskFilling" });
    const journal = service.journal;
    if (journal?.damaged_files?.length) add(0, "bad", "damaged", `${whose}Journalled files are damaged: ${journal.damaged_files.join(", ")}`, { runbook: "StreamhouseFilesDamaged" });
    if (journal?.lag_ms > JOURNAL_LAG_MS_HIGH) add(1, "bad", "journal",
      `${whose}The journal is ${figure(journal.lag_ms, "ms")} behind: ${figure(journal.lag_bytes, "B")} are not in the store`,
      { runbook: "StreamhouseJournalBehind", since_us: status.now_us - 1000 * journal.lag_ms });
    if (service.errors?.internal) add(1, "bad", "bug", `${whose}${counted(service.errors.internal, "request")} met a bug: the log has them under their request ids`,
      { runbook: "StreamhouseInternalErrors" });
  }
  for (const text of status.strangers ?? []) add(2, "warn", "stranger", text, { document: ["operations", ""] });
  const late = [], isWithoutWorker = status.workers && !status.workers.length && !status.idle_workers.length;
  for (const t of listed(status)) {
    const state = stateOf(t), tiering = t.tiering ?? {};
    const rounds = tiering.failures === 1 ? "The last round" : `${tiering.failures} rounds in a row`;
    // Without a worker every table becomes late: the worker is what is missing.
    if (state === "late" && isWithoutWorker) { late.push(t); continue; }
    const text = { damaged: t.damaged, unusable: t.unusable?.[0], "two histories": tiering.diverged,
      failing: `${rounds} failed: ${tiering.last_error || "no reason was given"}`,
      late: `${figure(t.lag_ms, "ms")} behind, ${figure(t.freshness_ms, "ms")} wanted${tiering.untiered_rows ? `; ${counted(tiering.untiered_rows, "row waits", "rows wait")}` : ""}`,
      debt: state === "debt" ? debtText(tiering.maintenance_debt) : "" }[state];
    if (!text) continue;
    add(STATES[state].rank, STATES[state].kind, state, text, { table: t.table, weight: lateness(t), since_us: sinceOf(t, status.now_us),
      runbook: RUNBOOK[state] ?? null, document: ["maintenance", ""] });
  }
  if (late.length) add(STATES.late.rank, "late", "no worker",
    `No tiering worker was heard of in the last minute: ${counted(late.length, "table is", "tables are")} late, `
      + `${counted(late.reduce((sum, t) => sum + (t.tiering?.untiered_rows ?? 0), 0), "row waits", "rows wait")}`,
    { since_us: Math.min(...late.map(t => sinceOf(t, status.now_us))), document: ["watching", "a-lake-that-lags-behind"] });
  for (const c of status.consumers?.worst ?? []) {
    const trouble = readerTrouble(c, status.now_us);
    if (trouble) add(trouble.rank, trouble.kind, trouble.word, trouble.text, { ...trouble, table: c.table, weight: c.rows_at_risk || c.lag_ms || 0 });
  }
  return found.sort((a, b) => a.rank - b.rank || b.weight - a.weight);
}
// A late table is late since its freshness was over; of other troubles the service keeps the time.
function sinceOf(table, nowUs) {
  return stateOf(table) === "late" ? nowUs - 1000 * (table.lag_ms - table.freshness_ms) : table.since_us ?? null;
}
