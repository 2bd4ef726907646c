// Figures as text, the order of tables, and what needs attention: nothing here knows the document.

const THIN = "\u202f";

function whole(number) {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, THIN);
}

// Three digits that count: 12.3 k.
function short(number) {
  let value = Math.abs(number);
  if (value < 9999.5) return (number < 0 ? "-" : "") + (value < 9.95 && value % 1 >= 0.05
    ? value.toFixed(1) : whole(value));
  for (const unit of ["k", "M", "G", "T"]) {
    value /= 1000;
    if (value < 999.5 || unit === "T") return (number < 0 ? "-" : "")
      + (value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : whole(value)) + THIN + unit;
  }
}

// By 1024, as the command line writes and reads sizes.
function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (count < 999.5 || unit === "TiB")
      return `${count < 9.95 && unit !== "B" ? +count.toFixed(1) : whole(count)}${THIN}${unit}`;
    count /= 1024;
  }
}

// Two units at most, so that ages can be compared at a glance.
function age(ms) {
  if (ms === null || ms === undefined) return "–";
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
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}${THIN}%`;
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

// #/?q=orders&sort=lag_ms&dir=down is the list, #/sales/orders one table.
function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#(table-|\/)?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(part => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  const asked = new URLSearchParams(query), sort = asked.get("sort");
  if (parts.length) return { table: parts.length === 1 && !parts[0].includes(".") ? `default.${parts[0]}` : parts.join(".") };
  return { table: null, search: asked.get("q") ?? "", only: asked.get("only") ?? "",
    sort: SORTS.includes(sort) ? sort : "state", isDown: asked.get("dir") === "down" };
}
function routeOfTable(name) {
  return `#/${name.split(".").map(encodeURIComponent).join("/")}`;
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
  return [...status.tables, ...(status.damaged_tables ?? []).map(t => ({ table: t.table, shard: t.shard, damaged: t.reason,
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
    state: (a, b) => STATES[stateOf(a)].rank - STATES[stateOf(b)].rank || lateness(b) - lateness(a),
    table: byName,
    shard: (a, b) => String(a.shard ?? "").localeCompare(String(b.shard ?? ""), "en", { numeric: true }),
  }[sort] ?? ((a, b) => (a[sort] ?? 0) - (b[sort] ?? 0));
  return [...tables].sort((a, b) => (isDown ? -1 : 1) * compare(a, b) || byName(a, b));
}

function debtText(debt) {
  if (debt.maintenance_error) return `maintenance failed: ${debt.maintenance_error}`;
  if (debt.is_scattered)
    return `a round writes ${whole(debt.round_files)} files for ${whole(debt.round_rows)} rows: `
      + "fewer buckets or coarser partitions, or a longer table.datalake.freshness";
  const parts = [`${whole(debt.small_files)} small files`, `${whole(debt.delete_files)} delete files`];
  if (debt.deleted_share >= 0.001) parts.push(`${percent(debt.deleted_share)} of the rows deleted`);
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

const JOURNAL_LAG_MS_HIGH = 5000;

// The lag is that of the last sample: by now there may be nothing left to wait.
function waiting(rows) {
  return rows ? `; ${whole(rows)} ${rows === 1 ? "row waits" : "rows wait"}` : "";
}

// What somebody has to look after, the worst first.
function troubles(status) {
  const found = [], add = (rank, kind, word, text, table = null, weight = 0) =>
    found.push({ rank, kind, word, text, table, weight });
  for (const s of status.shards ?? []) if (!s.answers) add(0, "bad", "away",
    `Shard ${s.shard} does not answer: its tables are not shown.`);
  const services = (status.shards ?? []).length > 1
    ? status.shards.filter(s => s.service).map(s => [`Shard ${s.shard}: `, s.service]) : [["", status.service]];
  for (const [whose, service] of services) {
    if (!service) continue;
    const share = service.disk_bytes_max ? service.disk_bytes / service.disk_bytes_max : 0;
    const room = `${bytes(service.disk_bytes)} of ${bytes(service.disk_bytes_max)} (--disk-max)`;
    if (share > 1) add(0, "bad", "disk full", `${whose}Writes are refused: rows take ${room}.`);
    else if (share > 0.8) add(3.5, "warn", "disk", `${whose}Rows take ${room}.`);
    const journal = service.journal;
    if (journal?.damaged_files?.length) add(0, "bad", "damaged", `${whose}Journalled files are damaged: ${journal.damaged_files.join(", ")}.`);
    if (journal?.lag_ms > JOURNAL_LAG_MS_HIGH) add(1, "bad", "journal",
      `${whose}The journal is ${age(journal.lag_ms)} behind: ${bytes(journal.lag_bytes)} are not in the store.`);
    if (service.errors?.internal) add(1, "bad", "bug", `${whose}${whole(service.errors.internal)} requests met a bug: the log has them under their request ids.`);
  }
  for (const text of status.strangers ?? []) add(2, "warn", "stranger", text);
  for (const t of listed(status)) {
    const state = stateOf(t), tiering = t.tiering ?? {};
    const rounds = tiering.failures === 1 ? "The last round" : `${tiering.failures} rounds in a row`;
    const text = { damaged: `Not served: ${t.damaged}`, unusable: t.unusable?.[0], "two histories": tiering.diverged,
      failing: `${rounds} failed: ${tiering.last_error || "no reason was given"}`,
      late: `${age(t.lag_ms)} behind, ${age(t.freshness_ms)} wanted${waiting(tiering.untiered_rows)}`,
      debt: state === "debt" ? debtText(tiering.maintenance_debt) : "" }[state];
    if (text) add(STATES[state].rank, STATES[state].kind, state, text, t.table, lateness(t));
  }
  for (const c of status.consumers?.worst ?? []) if (c.rows_at_risk) add(3.2, "bad", "reader",
    `Reader ${c.name} has not read ${whole(c.rows_at_risk)} rows that leave the log soon.`, c.table, c.rows_at_risk);
  return found.sort((a, b) => a.rank - b.rank || b.weight - a.weight);
}
