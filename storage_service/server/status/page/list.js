// The first page: the service, what needs attention, workers, readers and tables.

function rateTile(label, service, name, colour) {
  const past = service.history[name], top = Math.max(1, ...past), rate = figure(top, "/s");
  return tile(label, figure(service[name], "/s"), past.length > 1 ? `at most ${rate} in ${figure(past.length * seen.sample_interval_ms, "ms")}` : "measuring",
    { picture: spark(past, { top, colour, label: `${label}, at most ${rate}` }) });
}
function latencyTile(label, of) {
  return of ? tile(label, figure(of.p99_ms, "ms"), `median ${figure(of.p50_ms, "ms")}`, { second: "p99 of the last minute" })
    : tile(label, figure(null), "none in the last minute");
}
function strip(status) {
  const service = together(status), processes = (status.shards ?? []).filter(s => s.service).length || 1;
  if (!service) return [];
  const share = service.disk_bytes_max ? service.disk_bytes / service.disk_bytes_max : null;
  const level = share > 1 ? "bad" : share > 0.8 ? "warn" : "", free = `${figure(service.disk_free_bytes, "B")} free`;
  const errors = Object.entries(service.errors), total = errors.reduce((sum, [, n]) => sum + n, 0);
  errors.sort((a, b) => b[1] - a[1]);
  const [first, second] = errors.map(([code, n]) => `${code} ${figure(n)}`);
  const journal = (status.shards ?? []).map(s => s.service?.journal).concat(service.journal).filter(Boolean)
    .reduce((worst, one) => !worst || one.lag_ms > worst.lag_ms ? one : worst, null);
  return [
    rateTile("Rows in", service, "written_rows_per_s", "var(--write)"),
    rateTile("Rows out", service, "read_rows_per_s", "var(--read)"),
    latencyTile("Write latency", service.latency.write), latencyTile("Lookup latency", service.latency.lookup),
    tile("Memory", figure(service.memory_bytes, "B"), `${figure(service.processor_share, "cores")}${processes > 1 ? `, ${processes} processes` : ""}`,
      { second: `requests hold ${figure(service.request_memory_bytes ?? 0, "B")}` }),
    share === null ? tile("Log on disk", figure(service.disk_bytes, "B"), free, { second: "no --disk-max" })
      : tile(`Disk, ${free}`, figure(service.disk_bytes, "B"), `${figure(share, "%")} of ${figure(service.disk_bytes_max, "B")}`,
        { picture: bar(share, level), kind: level }),
    tile(`Errors, last ${figure(Math.max(5000, service.errors_window_ms), "ms")}`, figure(total), first ?? "answered to requests", { second }),
    ...(journal ? [tile("Journal", figure(journal.lag_ms, "ms"), "behind", { second: `${figure(journal.lag_bytes, "B")} not stored` })] : []),
  ];
}
function facts(status) {
  const service = status.service, shards = status.shards ?? [];
  if (!service) return "";
  const role = shards.length > 1 ? `${shards.filter(s => s.answers).length} of ${shards.length} shards answer`
    : service.journal ? `owner, epoch ${figure(service.journal.epoch, "exact")}` : "one process";
  const sum = name => service.threads.reduce((total, of) => total + of[name], 0);
  const threads = service.threads ? [`${figure(sum("alive"))} of at most ${figure(sum("bound"))} threads`] : [];
  return [`version ${service.version}`, role, `up ${figure(service.uptime_ms, "ms")}`, ...threads].join(" · ");
}
function attention(found, nowUs) {
  return cut("attention", found, shown => make("ul", { class: "lines" }, shown.map(t => make("li", {}, word(t.word, t.kind),
    t.table ? make("span", { class: "who name" }, link(t.table)) : null,
    make("span", { class: t.table ? "text" : "text whole", title: [t.cause, t.where].filter(Boolean).join("\n") }, t.cause,
      t.where ? make("span", { class: "where" }, " ", t.where) : null),
    make("span", { class: "since soft", title: t.since_us ? `since ${moment(t.since_us)}` : null },
      t.since_us ? `for ${figure(Math.max(0, (nowUs - t.since_us) / 1000), "ms")}` : ""),
    make("span", { class: "remedy" }, t.document ? documentLink(t.document, "What to do") : "")))),
  word("Nothing is late or failing.", "fine"));
}
function progress(worker) {
  const p = worker.progress;
  if (!p?.step) return "starting";
  return p.step === "writing" && p.rows_planned ? `writing, ${figure(p.rows_done / p.rows_planned, "%")} of ${counted(p.rows_planned, "row")}` : p.step;
}
const IDLE = { not_due: "every table is fresh enough", nothing_to_tier: "the lake has every row",
  leased: "other rounds have the tables that are behind", no_tables: "there are no tables",
  paused_after_failure: "tables rest after a failed round", datalake_disabled: "no table is to be tiered",
  unreadable: "a log cannot be read", starting: "it loads the lake's library, some seconds" };
function workers(status) {
  const busy = [...status.workers].sort((a, b) => b.round_ms - a.round_ms);
  const idle = status.idle_workers.map(w => ({ ...w, isIdle: true }));
  return cut("workers", [...busy, ...idle], shown => grid([["Worker", "left"], ["Table", "left"], ["Doing", "left"], ["For"]],
    shown.map(w => make("tr", {}, make("td", { class: "name", title: w.worker_id }, w.worker_id),
      ...(w.isIdle ? [cell(w.reason === "starting" ? "starts" : "idle", "left soft"), turn(), cell(IDLE[w.reason] ?? w.reason, "left soft"), cell(figure(null), "zero")]
        : [make("td", { class: "name" }, link(w.table)), turn(), cell(progress(w), "left"), cell(figure(w.round_ms, "ms"))]))),
    { caption: "Tiering workers" }),
  ["No worker was heard of in the last minute. Start one with ", make("code", {}, "streamhouse tier"), ", or ", make("code", {}, "serve --tiering embedded"), "."]);
}
function readerRows(list, nowUs, ofTable) {
  return list.map(c => { const state = readerState(c, nowUs); return make("tr", {}, make("td", { class: "name", title: c.name }, c.name),
    ...(ofTable ? [make("td", { class: "name" }, link(c.table))] : []), make("td", { class: "left state" }, word(state.word, state.kind)), turn(),
    count(c.lag_rows, "unread"), cell(c.lag_ms === null ? "in the lake" : figure(c.lag_ms, "ms"), c.lag_rows ? null : "zero", c.lag_ms === null ? null : "lag"),
    count(c.rows_at_risk, "at risk", "bad"), make("td", { class: "soft" }, ago(c.reported_us, nowUs))); });
}
const READER_HEADS = [["State", "left"], ["Unread"], ["Lag"], ["At risk"], ["Reported"]];
function readers(status) {
  const told = status.consumers ?? { count: 0, worst: [] };
  byId("readers-heading").textContent = told.count > told.worst.length
    ? `Readers: the ${told.worst.length} most late of ${figure(told.count, "exact")}` : "Readers, most late first";
  return cut("readers", told.worst, shown => grid([["Reader", "left"], ["Table", "left"], ...READER_HEADS], readerRows(shown, status.now_us, true), { caption: "Readers" }),
    "No reader has reported its position.");
}
function shards(status) {
  return grid([["Shard", "left"], ["State", "left"], ["Tables"], ["Rows in"], ["Rows out"], ["Write p99"], ["Memory"], ["Cores"], ["Journal lag"], ["Epoch"]],
    status.shards.map(s => { const of = s.service; return make("tr", {}, make("td", { class: "name" }, s.shard),
      make("td", { class: "left" }, s.answers ? word("answers", "fine") : word("away", "bad")), turn(), cell(figure(s.table_count), null, "tables"),
      ...(of ? [cell(figure(of.written_rows_per_s, "/s"), null, "in"), cell(figure(of.read_rows_per_s, "/s"), null, "out"),
        named("write p99", figure(of.latency.write?.p99_ms, "ms")), cell(figure(of.memory_bytes, "B")), cell(figure(of.processor_share, "cores")),
        named("journal lag", figure(of.journal?.lag_ms, "ms"))] : Array.from({ length: 6 }, () => cell(figure(null), "zero"))),
      named("epoch", figure(s.epoch, "exact"))); }), { caption: "Shards" });
}
const COLUMNS = [["table", "Table", "left"], ["state", "State", "left"], ["shard", "Shard", "left"], ["row_count", "Rows"], ["written_rows_per_s", "In"],
  ["read_rows_per_s", "Out"], [null, "Written", "left trend"], ["log_bytes", "Log"], ["lag_ms", "Lake lag"], [null, "Wanted"]];
const POINT_SAMPLES = 5;
// The small charts share one time: that of the longest history.
const trendPoints = all => Math.max(2, ...all.map(t => t.history?.written_rows_per_s?.length ?? 0));
function tableHead(ofShards, points) {
  return make("thead", {}, make("tr", {}, COLUMNS.filter(([key]) => ofShards || key !== "shard").map(([key, text, kind]) => {
    if (!key) return make("th", { scope: "col", class: kind ?? null }, kind ? `${text}, last ${figure(points * POINT_SAMPLES * seen.sample_interval_ms, "ms")}` : text);
    const isText = ["table", "state", "shard"].includes(key);
    return make("th", { scope: "col", class: kind ?? null, "aria-sort": route.sort === key ? (route.isDown ? "descending" : "ascending") : null },
      button(text, `sort ${key}`, () => change({ sort: key, isDown: route.sort === key ? !route.isDown : !isText })));
  })));
}
function tableRow(t, ofShards, points) {
  const state = stateOf(t), past = t.history?.written_rows_per_s ?? [], top = Math.max(...past, 0);
  const rate = (value, kind, label) => cell(t.damaged ? figure(null) : figure(value, "/s"), value ? kind : "zero", label);
  return make("tr", {},
    make("td", { class: "name" }, link(t.table), t.is_primary_key_table ? make("span", { class: "kind", title: "primary key table" }, "key") : null),
    make("td", { class: "left state" }, word(state, STATES[state].kind)), turn(),
    ofShards ? cell(t.shard ?? "", "left") : null,
    t.damaged ? cell(figure(null), "zero") : count(t.row_count, "rows"), rate(t.written_rows_per_s, null, "in"), rate(t.read_rows_per_s, "wide", null),
    make("td", { class: "trend" }, past.length > 1 && top ? make("span", {}, spark(past, { top, points, label: `written to ${t.table}, at most ${figure(top, "/s")}` }),
      make("small", {}, `≤${THIN}${figure(top, "/s")}`)) : ""),
    cell(t.damaged ? figure(null) : figure(t.log_bytes, "B"), t.log_bytes ? "wide" : "zero"),
    cell(t.is_tiered ? figure(t.lag_ms, "ms") : figure(null), t.is_tiered && t.lag_ms ? state === "late" ? "late" : null : "zero", "lag"),
    cell(t.is_tiered ? figure(t.freshness_ms, "ms") : figure(null), t.is_tiered ? "soft" : "zero", "wanted"));
}
function tables(status) {
  const all = listed(status), found = inOrder(wanted(all, route), route), ofShards = (status.shards ?? []).length > 1;
  const missing = status.table_count - status.tables.length, points = trendPoints(all);
  byId("count").textContent = (found.length === all.length ? figure(all.length, "exact") : `${figure(found.length, "exact")} of ${figure(all.length, "exact")}`)
    + (missing > 0 ? `; ${figure(missing, "exact")} more are not shown, by name` : "");
  if (!all.length) return empty("No table yet. A write from Spark or from the client creates one.");
  if (!found.length) return empty(route.search ? `No table has “${route.search}” in its name` : "No table is like that now",
    route.search && route.only ? " and is like that now." : ".");
  const box = make("div", { class: "sheet big-list" }, make("table", { "aria-labelledby": "tables-heading" }, tableHead(ofShards, points),
    make("tbody", {}, found.slice(0, rowsShown).map(t => tableRow(t, ofShards, points)))));
  if (found.length > rowsShown) box.append(
    button(`Show ${figure(Math.min(ROWS_SHOWN, found.length - rowsShown))} more`, "more tables", () => { rowsShown += ROWS_SHOWN; show(); }, { class: "more" }),
    make("span", { class: "soft" }, `${figure(found.length - rowsShown, "exact")} more`));
  return box;
}
function showList(status) {
  const found = troubles(status);
  byId("strip").replaceChildren(...strip(status));
  byId("attention-heading").textContent = found.length ? `Needs attention: ${figure(found.length)}` : "Needs attention";
  byId("attention").replaceChildren(attention(found, status.now_us));
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
