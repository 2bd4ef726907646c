const byId = id => document.getElementById(id);
const KEY = "streamhouse-token";
const LINES_SHOWN = 5, ROWS_SHOWN = 100, BUCKETS_SHOWN = 32, LAG_LINES = 8;
// Points of a table's ten minutes in the list: a younger service has fewer.
const TREND_POINTS = 23;
const SVG = new Set(["svg", "path", "line", "rect"]);

// Text is only ever added as text: what a worker or an application is called is nobody's markup.
function make(tag, attributes = {}, ...children) {
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.flat().filter(child => child !== null).map(child => child instanceof Node ? child : String(child)));
  return made;
}
const link = name => make("a", { href: routeOfTable(name), "data-key": `table ${name}`, title: name }, name);
const word = (text, kind) => make("span", { class: `word ${kind}` }, text);
const perSecond = rate => `${short(rate)}/s`;

let route = parseRoute(location.hash), seen = null, token = sessionStorage.getItem(KEY);
let rowsShown = ROWS_SHOWN, whichWhole = new Set(), asking = null, timer = null, listTop = 0, said = "";

// -- pictures ---------------------------------------------------------------------------------

function spark(values, { top, colour = "var(--write)", label, points = 0 }) {
  const size = { width: 120, height: 20, top, points }, line = linePath(values, size), left = line.slice(1, line.indexOf(" "));
  const svg = make("svg", { viewBox: `0 0 ${size.width} ${size.height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (values.length > 1) svg.append(
    make("path", { d: `${line}L120 20L${left} 20Z`, fill: colour, opacity: .14 }),
    make("path", { d: line, fill: "none", stroke: colour, "stroke-width": 1.4, "vector-effect": "non-scaling-stroke" }));
  return svg;
}
function plot(series, { title, form, keys = [], limit = null, spanMs, topOf = scaleTop }) {
  const top = topOf(Math.max(limit ?? 0, ...series.flatMap(one => one.values))), size = { width: 300, height: 100, top };
  const svg = make("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}, at most ${form(Math.max(0, ...series.flatMap(one => one.values)))}` });
  for (const { values, colour } of series) if (values.length > 1) svg.append(make("path", { d: linePath(values, size),
    fill: "none", stroke: colour, "stroke-width": 1.5, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" }));
  const y = 99 - 98 * (limit ?? 0) / top;
  if (limit !== null) svg.append(make("line", { x1: 0, x2: 300, y1: y, y2: y, stroke: "var(--soft)", "stroke-dasharray": "5 4", "vector-effect": "non-scaling-stroke" }));
  return make("figure", { class: "sheet" }, make("figcaption", {}, title, keys.map(([text, kind]) => make("span", { class: kind }, text))),
    make("div", { class: "plot" }, make("span", { class: "top" }, form(top)), make("span", { class: "nought" }, "0"), svg,
      make("div", { class: "times" }, make("span", {}, `${age(spanMs)} ago`), make("span", {}, "now"))));
}
function bar(share, kind) {
  return make("svg", { class: `bar ${kind}`, viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
    make("rect", { width: Math.min(100, 100 * share), height: 4 }));
}
function tile(label, value, note, extra = null, kind = "") {
  return make("div", {}, make("dt", {}, label), make("dd", { class: "big" }, value),
    make("dd", {}, make("small", { class: kind }, note ?? ""), extra));
}

// -- the list ---------------------------------------------------------------------------------

function rateTile(label, service, name, colour) {
  const past = service.history[name], top = Math.max(1, ...past);
  return tile(label, perSecond(service[name]), past.length > 1 ? `at most ${perSecond(top)} in ${age(past.length * seen.sample_interval_ms)}` : "measuring",
    spark(past, { top, colour, label: `${label}, at most ${perSecond(top)}` }));
}
function latencyTile(label, figures) {
  return figures ? tile(label, age(figures.p99_ms), `p99 · median ${age(figures.p50_ms)}`) : tile(label, "–", "none in the last minute");
}
function strip(status) {
  const service = together(status), processes = (status.shards ?? []).filter(s => s.service).length || 1;
  if (!service) return [];
  const share = service.disk_bytes_max ? service.disk_bytes / service.disk_bytes_max : null;
  const level = share > 1 ? "bad" : share > 0.8 ? "warn" : "";
  const errors = Object.entries(service.errors), count = errors.reduce((sum, [, n]) => sum + n, 0);
  errors.sort((a, b) => b[1] - a[1]);
  const journal = (status.shards ?? []).map(s => s.service?.journal).concat(service.journal).filter(Boolean)
    .reduce((worst, one) => !worst || one.lag_ms > worst.lag_ms ? one : worst, null);
  return [
    rateTile("Rows in", service, "written_rows_per_s", "var(--write)"),
    rateTile("Rows out", service, "read_rows_per_s", "var(--read)"),
    latencyTile("Write latency", service.latency.write), latencyTile("Lookup latency", service.latency.lookup),
    tile("Memory", bytes(service.memory_bytes), `requests hold ${bytes(service.request_memory_bytes ?? 0)} · ${service.processor_share.toFixed(2)} cores` + (processes > 1 ? `, ${processes} processes` : "")),
    share === null
      ? tile("Log on disk", bytes(service.disk_bytes), `no budget · ${bytes(service.disk_free_bytes)} free`)
      : tile("Disk", bytes(service.disk_bytes), `${percent(share)} of ${bytes(service.disk_bytes_max)} · ${bytes(service.disk_free_bytes)} free`,
        bar(share, level), level),
    tile(`Errors, last ${age(Math.max(5000, service.errors_window_ms))}`, whole(count),
      errors.slice(0, 2).map(([code, n]) => `${code} ${whole(n)}`).join(", ") || "answered to requests"),
    ...(journal ? [tile("Journal", age(journal.lag_ms), `behind · ${bytes(journal.lag_bytes)} not stored`)] : []),
  ];
}
function facts(status) {
  const service = status.service, shards = status.shards ?? [];
  if (!service) return "";
  const role = shards.length > 1 ? `${shards.filter(s => s.answers).length} of ${shards.length} shards answer`
    : service.journal ? `owner, epoch ${service.journal.epoch}` : "one process";
  const sum = name => service.threads.reduce((total, of) => total + of[name], 0);
  const threads = service.threads ? [`${sum("alive")} of at most ${sum("bound")} threads`] : [];
  return [`version ${service.version}`, role, `up ${age(service.uptime_ms)}`, ...threads].join(" · ");
}
// A list that is cut after some lines, with a button for the others.
function cut(key, items, one, empty) {
  if (!items.length) return make("p", { class: "empty sheet" }, ...[empty].flat());
  const shown = whichWhole.has(key) ? items.slice(0, 200) : items.slice(0, LINES_SHOWN);
  const box = make("div", { class: "sheet" }, one(shown));
  if (items.length > LINES_SHOWN) {
    const button = make("button", { type: "button", class: "more", "data-key": `more ${key}`, "aria-expanded": whichWhole.has(key) },
      whichWhole.has(key) ? "Show fewer" : `Show ${whole(Math.min(200, items.length) - LINES_SHOWN)} more`);
    button.addEventListener("click", () => { whichWhole[whichWhole.has(key) ? "delete" : "add"](key); show(); });
    box.append(button);
    if (items.length > shown.length && whichWhole.has(key)) box.append(make("span", { class: "soft" }, `${whole(items.length - shown.length)} are not shown`));
  }
  return box;
}
function attention(found) {
  return cut("attention", found, shown => make("ul", { class: "lines" }, shown.map(t => make("li", {}, word(t.word, t.kind),
    ...(t.table ? [make("span", { class: "who name" }, link(t.table)), make("span", { class: "text", title: t.text }, t.text)]
      : [make("span", { class: "text whole", title: t.text }, t.text)])))),
  make("span", { class: "word fine" }, "Nothing is late or failing."));
}
function grid(heads, rows, { caption }) {
  return make("div", { class: "scroll big-list" }, make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, heads.map(([text, kind]) =>
    make("th", { scope: "col", class: kind ?? null }, text)))), make("tbody", {}, rows)));
}
// On a phone there are no heads: what a figure is stands before or behind it, in lines that `turn` ends.
const cell = (text, kind = null, label = null) => make("td", { class: kind, "data-label": label }, text);
const named = (name, text, kind = null) => make("td", { class: kind, "data-name": name }, text);
const turn = () => make("td", { class: "break narrow" });
function progress(worker) {
  const p = worker.progress;
  if (!p?.step) return "starting";
  return p.step === "writing" && p.rows_planned ? `writing, ${percent(p.rows_done / p.rows_planned)} of ${short(p.rows_planned)} rows` : p.step;
}
const IDLE = { not_due: "every table is fresh enough", nothing_to_tier: "the lake has every row",
  leased: "other rounds have the tables that are behind", no_tables: "there are no tables",
  paused_after_failure: "tables rest after a failed round", datalake_disabled: "no table is to be tiered",
  unreadable: "a log cannot be read" };
function workers(status) {
  const busy = [...status.workers].sort((a, b) => b.round_ms - a.round_ms);
  const idle = status.idle_workers.map(w => ({ ...w, isIdle: true }));
  return cut("workers", [...busy, ...idle], shown => grid([["Worker", "left"], ["Table", "left"], ["Doing", "left"], ["For"]],
    shown.map(w => make("tr", {}, make("td", { class: "name", title: w.worker_id }, w.worker_id),
      ...(w.isIdle ? [cell("idle", "left soft"), turn(), cell(IDLE[w.reason] ?? w.reason, "left soft"), cell("–", "zero")]
        : [make("td", { class: "name" }, link(w.table)), turn(), cell(progress(w), "left"), cell(age(w.round_ms))]))),
    { caption: "Tiering workers" }),
  ["No worker was heard of in the last minute. Start one with ", make("code", {}, "streamhouse tier"), ", or ", make("code", {}, "serve --tiering embedded"), "."]);
}
const lagOf = c => c.lag_ms === null ? "in the lake" : c.lag_rows ? age(c.lag_ms) : "none";
function readerRows(readers, ofTable) {
  return readers.map(c => make("tr", {}, make("td", { class: "name", title: c.name }, c.name),
    ...(ofTable ? [make("td", { class: "name" }, link(c.table))] : []), turn(),
    cell(whole(c.lag_rows), c.lag_rows ? null : "zero", "unread"), cell(lagOf(c), c.lag_rows ? null : "zero", c.lag_ms === null ? null : "lag"),
    cell(c.rows_at_risk ? whole(c.rows_at_risk) : "–", c.rows_at_risk ? "bad" : "zero", "at risk"),
    cell(`${age(Math.max(0, (seen.now_us - c.reported_us) / 1000))} ago`, "soft")));
}
const READER_HEADS = [["Unread rows"], ["Lag"], ["At risk"], ["Reported"]];
function readers(status) {
  const told = status.consumers ?? { count: 0, worst: [] };
  byId("readers-heading").textContent = told.count > told.worst.length
    ? `Readers: the ${told.worst.length} most late of ${whole(told.count)}` : "Readers, most late first";
  return cut("readers", told.worst, shown => grid([["Reader", "left"], ["Table", "left"], ...READER_HEADS], readerRows(shown, true), { caption: "Readers" }),
    "No reader has reported its position.");
}
function shards(status) {
  return grid([["Shard", "left"], ["State", "left"], ["Tables"], ["Rows in"], ["Rows out"], ["Write p99"], ["Memory"], ["Cores"], ["Journal lag"], ["Epoch"]],
    status.shards.map(s => { const of = s.service; return make("tr", {}, make("td", { class: "name" }, s.shard),
      make("td", { class: "left" }, s.answers ? word("answers", "fine") : word("away", "bad")), turn(), cell(whole(s.table_count), null, "tables"),
      ...(of ? [cell(perSecond(of.written_rows_per_s), null, "in"), cell(perSecond(of.read_rows_per_s), null, "out"),
        named("write p99", age(of.latency.write?.p99_ms)), cell(bytes(of.memory_bytes)), cell(of.processor_share.toFixed(2), null, "cores"),
        named("journal lag", age(of.journal?.lag_ms))] : Array.from({ length: 6 }, () => cell("–", "zero"))),
      named("epoch", whole(s.epoch))); }), { caption: "Shards" });
}
const COLUMNS = [["table", "Table", "left"], ["state", "State", "left"], ["shard", "Shard", "left"], ["row_count", "Rows"], ["written_rows_per_s", "In"],
  ["read_rows_per_s", "Out"], [null, "Written, last 10 min", "left trend"], ["log_bytes", "Log"], ["lag_ms", "Lake lag"], [null, "Wanted"]];
function tableHead(ofShards) {
  return make("thead", {}, make("tr", {}, COLUMNS.filter(([key]) => ofShards || key !== "shard").map(([key, text, kind]) => {
    if (!key) return make("th", { scope: "col", class: kind ?? null }, text);
    const button = make("button", { type: "button", "data-key": `sort ${key}` }, text);
    const isText = ["table", "state", "shard"].includes(key);
    button.addEventListener("click", () => {
      change({ sort: key, isDown: route.sort === key ? !route.isDown : !isText });
    });
    return make("th", { scope: "col", class: kind ?? null,
      "aria-sort": route.sort === key ? (route.isDown ? "descending" : "ascending") : null }, button);
  })));
}
function tableRow(t, ofShards) {
  const state = stateOf(t), past = t.history?.written_rows_per_s ?? [], top = Math.max(...past, 0);
  const rate = (value, kind, label) => cell(value ? perSecond(value) : "–", value ? kind : "zero", label);
  return make("tr", {},
    make("td", { class: "name" }, link(t.table), t.is_primary_key_table ? make("span", { class: "kind", title: "primary key table" }, "key") : null),
    make("td", { class: "left state" }, word(state, STATES[state].kind)), turn(),
    ofShards ? cell(t.shard ?? "", "left") : null,
    cell(t.damaged ? "–" : short(t.row_count), t.damaged ? "zero" : null, "rows"), rate(t.written_rows_per_s, null, "in"), rate(t.read_rows_per_s, "wide", null),
    make("td", { class: "trend" }, past.length > 1 && top ? make("span", {}, spark(past, { top, points: TREND_POINTS, label: `written to ${t.table}, at most ${perSecond(top)}` }),
      make("small", {}, `≤${THIN}${perSecond(top)}`)) : ""),
    cell(t.log_bytes ? bytes(t.log_bytes) : "–", t.log_bytes ? "wide" : "zero"),
    cell(t.is_tiered ? t.lag_ms ? age(t.lag_ms) : "none" : "–", t.is_tiered && t.lag_ms ? state === "late" ? "late" : null : "zero", "lag"),
    cell(t.is_tiered ? age(t.freshness_ms) : "–", t.is_tiered ? "soft" : "zero", "wanted"));
}
function tables(status) {
  const all = listed(status), found = inOrder(wanted(all, route), route), ofShards = (status.shards ?? []).length > 1;
  const missing = status.table_count - status.tables.length;
  byId("count").textContent = (found.length === all.length ? whole(all.length) : `${whole(found.length)} of ${whole(all.length)}`)
    + (missing > 0 ? `; ${whole(missing)} more are not shown, by name` : "");
  if (!all.length) return make("p", { class: "empty sheet" }, "No table yet. A write from Spark or from the client creates one.");
  if (!found.length) return make("p", { class: "empty sheet" }, route.search ? `No table has “${route.search}” in its name` : "No table is like that now",
    route.search && route.only ? " and is like that now." : ".");
  const box = make("div", { class: "sheet big-list" }, make("table", { "aria-labelledby": "tables-heading" }, tableHead(ofShards),
    make("tbody", {}, found.slice(0, rowsShown).map(t => tableRow(t, ofShards)))));
  if (found.length > rowsShown) {
    const button = make("button", { type: "button", class: "more", "data-key": "more tables" }, `Show ${whole(Math.min(ROWS_SHOWN, found.length - rowsShown))} more`);
    button.addEventListener("click", () => { rowsShown += ROWS_SHOWN; show(); });
    box.append(button, make("span", { class: "soft" }, `${whole(found.length - rowsShown)} more`));
  }
  return box;
}
function showList(status) {
  const found = troubles(status);
  byId("strip").replaceChildren(...strip(status));
  byId("attention-heading").textContent = found.length ? `Needs attention: ${whole(found.length)}` : "Needs attention";
  byId("attention").replaceChildren(attention(found));
  byId("shards-section").hidden = (status.shards ?? []).length < 2;
  if (!byId("shards-section").hidden) byId("shards").replaceChildren(make("div", { class: "sheet" }, shards(status)));
  byId("workers").replaceChildren(workers(status));
  byId("readers").replaceChildren(readers(status));
  byId("tables").replaceChildren(tables(status));
  for (const [id, value] of [["search", route.search], ["only", route.only], ["order", route.sort + (route.isDown ? " down" : "")]])
    if (byId(id) !== document.activeElement) byId(id).value = value;
  document.title = found.length ? `(${found.length}) Streamhouse` : "Streamhouse";
  say(found.length ? `${found.length} need attention` : "Nothing is late or failing");
}

// -- one table --------------------------------------------------------------------------------

function lake(table) {
  const t = table.tiering, debt = t.maintenance_debt, list = [];
  const add = (name, ...value) => list.push(make("dt", {}, name), make("dd", {}, ...value));
  if (!table.is_tiered) return [make("p", { class: "empty sheet" }, "This table has no lake: table.datalake.enabled is false.")];
  add("Rows that wait", whole(t.untiered_rows));
  add("Round now", t.worker_id && t.lease_left_ms ? `${t.tiering_epoch} by ${t.worker_id}, for ${age(t.round_ms)}, ${progress(t)}` : "none");
  add("Last round", t.last_round_ms ? `took ${age(t.last_round_ms)}` : "none since the service started");
  if (t.tiered_at_us) add("Last commit", moment(t.tiered_at_us));
  if (table.lake_snapshot_id) add("Snapshot", make("code", {}, table.lake_snapshot_id));
  if (debt) {
    add("Files", `${whole(debt.data_files)} data, of them ${whole(debt.small_files)} small; ${whole(debt.delete_files)} delete`);
    add("Deleted rows", percent(debt.deleted_share));
    add("Snapshots", whole(debt.snapshots));
    add("Maintained", debt.maintained_at_us ? moment(debt.maintained_at_us) : "not lately");
  }
  return [make("dl", { class: "facts sheet" }, list)];
}
function buckets(table) {
  const worst = [...table.buckets].sort((a, b) => b.lag_ms - a.lag_ms || a.bucket - b.bucket).slice(0, BUCKETS_SHOWN);
  if (worst.length === table.buckets.length) worst.sort((a, b) => a.bucket - b.bucket);
  return [make("h2", {}, worst.length < table.buckets.length ? `Buckets: the ${worst.length} most late of ${whole(table.buckets.length)}` : "Buckets"),
    make("div", { class: "sheet" }, grid([["Bucket", "left"], ["Log from"], ["Log to"], ["In the lake to"], ["Lag"]],
      worst.map(b => make("tr", {}, named("bucket", b.bucket, "left"), turn(), named("log", whole(b.log_start_offset)), named("to", whole(b.high_watermark)),
        named("lake", whole(b.tiered_offset)), cell(b.lag_ms ? age(b.lag_ms) : "none", b.lag_ms > table.freshness_ms ? "late" : b.lag_ms ? "" : "zero", "lag"))), { caption: "Buckets" }))];
}
function charts(status, table) {
  const past = table.history, spanMs = past.written_rows_per_s.length * status.sample_interval_ms;
  if (past.written_rows_per_s.length < 2) return make("p", { class: "empty sheet" }, "Charts begin with the third sample, in a few seconds.");
  const worst = table.buckets.map(b => b.bucket).sort((a, b) => table.buckets[b].lag_ms - table.buckets[a].lag_ms).slice(0, LAG_LINES);
  const lags = worst.map(b => ({ values: past.lag_ms.map(sample => sample[b] ?? 0), colour: "var(--write)" }));
  return make("div", { class: "charts" },
    plot([{ values: past.written_rows_per_s, colour: "var(--write)" }, { values: past.read_rows_per_s, colour: "var(--read)" }],
      { title: "Rows a second", form: short, spanMs, keys: [["written", "key of-write"], ["read", "key of-read"]] }),
    table.is_tiered ? plot(lags, { title: "Lake lag", form: age, topOf: scaleTopMs, limit: table.freshness_ms, spanMs,
      keys: [[lags.length > 1 ? `a line for each of ${lags.length} buckets` : "", "soft"], [`dashed: ${age(table.freshness_ms)} wanted`, "soft"]] }) : "");
}
function showOne(status) {
  const name = route.table, table = status.tables.find(t => t.table === name), damaged = (status.damaged_tables ?? []).find(t => t.table === name);
  const box = byId("one"), crumbs = make("p", { class: "crumbs" }, make("a", { href: routeOfList(lastList), "data-key": "back" }, "← All tables"));
  document.title = `${name} – Streamhouse`;
  if (!table) {
    box.replaceChildren(crumbs, make("h1", {}, name), make("p", { class: damaged ? "error bad" : "empty sheet" },
      damaged ? `Not served: ${damaged.reason}` : "There is no table of this name here. It may have been dropped, or its shard does not answer."));
    return;
  }
  const state = stateOf(table), t = table.tiering;
  const errors = [...table.unusable, t.diverged, t.last_error && `${t.failures === 1 ? "The last round" : `${whole(t.failures)} rounds in a row`} failed: ${t.last_error}`];
  const figures = [["Rows", short(table.row_count), table.row_count > 9999 ? whole(table.row_count) : "in the table"], ["In", perSecond(table.written_rows_per_s), "rows written"],
    ["Out", perSecond(table.read_rows_per_s), "rows read"], ["Log", bytes(table.log_bytes), `${table.buckets.length} bucket${table.buckets.length === 1 ? "" : "s"}`],
    ["Lake lag", table.is_tiered ? table.lag_ms ? age(table.lag_ms) : "none" : "–", table.is_tiered ? `${age(table.freshness_ms)} wanted` : "no lake"]];
  box.replaceChildren(crumbs, make("div", { class: "title" }, make("h1", {}, name), word(state, STATES[state].kind),
    make("span", { class: "soft" }, (table.is_primary_key_table ? "primary key table" : "log table") + (table.shard ? `, shard ${table.shard}` : ""))),
  ...errors.filter(Boolean).map(text => make("p", { class: "error bad" }, text)),
  ...(table.has_much_debt && t.maintenance_debt ? [make("p", { class: "error warn" }, debtText(t.maintenance_debt))] : []),
  make("dl", { class: "strip sheet" }, figures.map(figure => tile(...figure))),
  charts(status, table),
  make("div", { class: "columns" }, make("section", {}, make("h2", {}, "Lake"), lake(table)), make("section", {}, buckets(table))),
  table.constraints?.length ? make("section", {}, make("h2", {}, "Constraints"), make("div", { class: "sheet" },
    grid([["Constraint", "left"], ["Condition", "left"], ["Refused rows"], ["Rejected rows"]], table.constraints.map(c => make("tr", {},
      make("td", { class: "name" }, c.name), make("td", { class: "left" }, make("code", {}, c.predicate)), turn(),
      cell(whole(c.refused_rows), c.refused_rows ? null : "zero", "refused"), cell(whole(c.rejected_rows), c.rejected_rows ? null : "zero", "rejected"))),
      { caption: "Constraints" }))) : "",
  make("section", {}, make("h2", {}, "Readers, most late first"), table.consumers?.length
    ? make("div", { class: "sheet" }, grid([["Reader", "left"], ...READER_HEADS], readerRows(table.consumers, false), { caption: "Readers" }))
    : make("p", { class: "empty sheet" }, "No reader has reported its position.")));
  say(`${name}: ${state}`);
}

// -- moving about -----------------------------------------------------------------------------

let lastList = { search: "", only: "", sort: "state", isDown: false };

function say(text) {
  if (text !== said) byId("said").textContent = said = text;
}
function show() {
  if (!seen) return;
  // What has the focus is made anew: it is found by its key.
  const focused = document.activeElement?.dataset?.key;
  byId("list").hidden = route.table !== null;
  byId("one").hidden = route.table === null;
  byId("facts").textContent = facts(seen);
  if (route.table === null) showList(seen); else showOne(seen);
  if (focused && document.activeElement === document.body)
    [...document.querySelectorAll("[data-key]")].find(one => one.dataset.key === focused)?.focus({ preventScroll: true });
}
function change(changes) {
  Object.assign(route, changes);
  rowsShown = ROWS_SHOWN;
  history.replaceState(null, "", routeOfList(route));
  show();
}
function stamp(text, isStale) {
  byId("moment").textContent = text;
  byId("moment").className = isStale ? "stale" : "";
  byId("content").className = isStale && seen ? "stale" : "";
}
function askForToken(why) {
  seen = null;
  byId("login").hidden = false;
  byId("list").hidden = byId("one").hidden = true;
  byId("refused").textContent = why;
  stamp("not signed in", false);
  byId("facts").textContent = "";
  sessionStorage.removeItem(KEY);
  token = null;
}
async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  const own = asking = new AbortController();
  let pause = 2000;
  try {
    const query = route.table === null ? "detail=brief" : `table=${encodeURIComponent(route.table)}`;
    const answer = await fetch(`v1/status?${query}`, { cache: "no-store", signal: own.signal,
      headers: token ? { Authorization: `Bearer ${token}` } : {} });
    if (answer.status === 401) return askForToken(token ? "This token is wrong." : "");
    if (answer.status === 403) return askForToken("This token may not read the state of the service.");
    const status = await answer.json();
    if (!answer.ok) throw new Error(status.error?.message ?? `HTTP ${answer.status}`);
    byId("login").hidden = true;
    seen = status;
    // Nobody can copy what is made anew under the mouse.
    const isSelecting = document.getSelection()?.type === "Range" && (!byId("list").hidden || !byId("one").hidden);
    if (!isSelecting) show();
    stamp(isSelecting ? "paused while text is selected" : `as of ${moment(status.now_us).slice(11)}`, false);
    pause = Math.max(1000, status.sample_interval_ms);
  } catch (error) {
    if (own.signal.aborted) return;
    stamp(`no answer from the service: ${error.message}`, true);
    say("No answer from the service");
  }
  timer = setTimeout(refresh, document.hidden ? 12 * pause : pause);
}
addEventListener("hashchange", () => {
  const before = route;
  if (before.table === null) { lastList = before; listTop = scrollY; }
  route = parseRoute(location.hash);
  document.getSelection()?.removeAllRanges();
  if (route.table === before.table) return show();
  if (route.table !== null) { byId("one").replaceChildren(); byId("one").hidden = false; byId("list").hidden = true; }
  seen = null;
  refresh().then(() => {
    scrollTo(0, route.table === null ? listTop : 0);
    byId("content").focus({ preventScroll: true });
  });
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && (token !== null || seen !== null)) refresh(); });
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault();
  byId(route.table === null ? "search" : "content").focus();
});
byId("search").addEventListener("input", event => change({ search: event.target.value }));
byId("only").addEventListener("change", event => change({ only: event.target.value }));
byId("order").addEventListener("change", event => {
  const [sort, down] = event.target.value.split(" ");
  change({ sort, isDown: down === "down" });
});
byId("login").addEventListener("submit", event => {
  event.preventDefault();
  token = byId("token").value;
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  refresh();
});
refresh();
