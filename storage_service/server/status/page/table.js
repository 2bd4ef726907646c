// A table's page as of now: what the status says, made anew with each answer.

function lakeFacts(status, table) {
  const t = table.tiering, debt = t.maintenance_debt, list = [], now = status.now_us;
  const add = (name, ...value) => list.push(make("dt", {}, name), make("dd", {}, ...value));
  if (!table.is_tiered) return empty("This table has no lake: table.datalake.enabled is false.");
  add("Rows that wait", figure(t.untiered_rows, "exact"));
  add("Round now", t.worker_id && t.lease_left_ms ? `${figure(t.tiering_epoch, "exact")} by ${t.worker_id}, for ${figure(t.round_ms, "ms")}, ${progress(t)}` : "none");
  if (t.pause_left_ms) add("Next round", `in ${figure(t.pause_left_ms, "ms")}, after the pause for a failure`);
  add("Last commit", t.tiered_at_us ? ago(t.tiered_at_us, now) : "none");
  if (table.lake_snapshot_id) add("Snapshot", make("code", {}, table.lake_snapshot_id));
  if (debt) {
    add("Files", `${figure(debt.data_files)} data, of them ${figure(debt.small_files)} small; ${figure(debt.delete_files)} delete`);
    add("Deleted rows", figure(debt.deleted_share, "%"));
    add("Maintained", debt.maintained_at_us ? ago(debt.maintained_at_us, now) : "not lately");
  }
  add("Live table", table.live ? ["cut ", ago(table.live.made_us, now), `; ${counted(table.live.rows_since, "row")} since`] : "not loaded lately");
  return make("dl", { class: "facts sheet" }, list);
}
function rounds(status, table) {
  const list = table.tiering.rounds ?? [];
  if (!list.length) return empty("No round has ended since the service started.");
  return make("div", { class: "sheet" }, grid([["Ended", "left"], ["Took"], ["Result", "left"]], list.map(r => { const { cause, where } = causeOf(r.error); return make("tr", {},
    make("td", { class: "left" }, ago(r.ended_us, status.now_us)), cell(figure(r.round_ms, "ms"), null, "took"), turn(),
    make("td", { class: "left text" }, r.error ? word("failed", "bad") : word("in the lake", "fine"), r.error ? make("span", { class: "why", title: r.error }, cause, " ", make("span", { class: "where" }, where)) : null)); }),
    { caption: "Last rounds" }));
}
function buckets(table) {
  const worst = [...table.buckets].sort((a, b) => b.lag_ms - a.lag_ms || a.bucket - b.bucket).slice(0, BUCKETS_SHOWN), first = worst[0];
  if (worst.length === table.buckets.length) worst.sort((a, b) => a.bucket - b.bucket);
  const second = [...table.buckets].sort((a, b) => b.lag_ms - a.lag_ms)[1], isWorst = b => b === first && second && b.lag_ms > second.lag_ms;
  return [make("h2", {}, worst.length < table.buckets.length ? `Buckets: the ${worst.length} most late of ${figure(table.buckets.length)}` : "Buckets"),
    make("div", { class: "sheet" }, grid([["Bucket", "left"], ["Log from"], ["Log to"], ["In the lake to"], ["Lag"]],
      worst.map(b => make("tr", { class: isWorst(b) ? "marked" : null }, named("bucket", [b.bucket, isWorst(b) ? make("span", { class: "kind" }, "longest lag") : ""], "left"), turn(),
        named("log", figure(b.log_start_offset, "exact")), named("to", figure(b.high_watermark, "exact")), named("lake", figure(b.tiered_offset, "exact")),
        cell(table.is_tiered ? figure(b.lag_ms, "ms") : figure(null), b.lag_ms > table.freshness_ms ? "late" : b.lag_ms ? "" : "zero", "lag"))), { caption: "Buckets" }))];
}
function charts(status, table) {
  const past = table.history, spanMs = past.written_rows_per_s.length * status.sample_interval_ms;
  if (past.written_rows_per_s.length < 2) return empty("Charts begin with the third sample, in a few seconds.");
  const worst = table.buckets.map(b => b.bucket).sort((a, b) => table.buckets[b].lag_ms - table.buckets[a].lag_ms || a - b).slice(0, LAG_LINES);
  const isApart = worst.length > 1;
  // The worst is drawn last, over the others.
  const lags = worst.map((b, i) => ({ values: past.lag_ms.map(sample => sample[b] ?? 0), colour: i ? "var(--soft)" : "var(--write)", isFaint: i > 0 })).reverse();
  return make("div", { class: "charts" },
    plot([{ values: past.read_rows_per_s, colour: "var(--read)" }, { values: past.written_rows_per_s, colour: "var(--write)" }],
      { title: "Rows a second", unit: "/s", spanMs, keys: [["written", "key of-write"], ["read", "key of-read"]] }),
    table.is_tiered ? plot(lags, { title: "Lake lag", unit: "ms", topOf: scaleTopMs, limit: table.freshness_ms, spanMs,
      keys: [[isApart ? `bucket ${worst[0]}, the worst` : "", isApart ? "key of-write" : ""],
        [isApart ? table.buckets.length > worst.length ? `the next ${worst.length - 1}` : `${worst.length - 1} other${worst.length > 2 ? "s" : ""}` : "", isApart ? "key of-others" : ""],
        [`${figure(table.freshness_ms, "ms")} wanted`, "key of-limit"]].filter(([text]) => text) }) : null);
}
function constraints(table) {
  if (!table.constraints?.length) return null;
  return make("section", {}, make("h2", {}, "Constraints, rows since the service started"), make("div", { class: "sheet" },
    grid([["Constraint", "left"], ["Condition", "left"], ["Refused"], ["Rejected"]], table.constraints.map(c => make("tr", {},
      make("td", { class: "name" }, c.name), make("td", { class: "left text" }, make("code", {}, c.predicate)), turn(),
      count(c.refused_rows, "refused"), count(c.rejected_rows, "rejected"))), { caption: "Constraints" })));
}

// What operations.md says of a damaged table, with the table's name in it.
function damagedPage(damaged) {
  const { cause, where } = causeOf(damaged.reason), name = damaged.table, code = text => make("code", {}, text);
  const item = (...text) => make("li", {}, text);
  return [make("p", { class: "error bad" }, make("strong", {}, "Not served: "), cause, where ? make("span", { class: "where" }, " ", where) : null),
    make("div", { class: "columns" },
      make("section", {}, make("h2", {}, "What holds"), make("ul", { class: "prose sheet" },
        item("No file of this table is changed, moved or deleted by the service. Every call to the table is refused."),
        item("All other tables are served, tiered and backed up as before."),
        item("Rows that rounds have moved are in the lake, and other engines can read them. No engine commits to the lake table through the service's catalog."),
        item("The service looks at the table again when it starts."))),
      make("section", {}, make("h2", {}, "What to do, the best remedy first"), make("ol", { class: "prose sheet" },
        item("Stop the service, and list all damage: ", code("streamhouse check --data-dir DIR")),
        item("Put back the named file from a backup of this table, if writes do not change such a file. Rows by key are rebuilt: ", code(`streamhouse serve --rebuild ${name}`)),
        item("Or restore the whole folder of the table from the backup."),
        item("Or give up the log and continue from the lake: ", code(`client.drop_table(${quoted(name, '"')}, damaged=True)`), ", then ", code(`streamhouse adopt ${name}`), ". Rows that were never tiered are lost."),
        make("li", { class: "plain" }, documentLink(["operations", "a-damaged-table"], "Operations: a damaged table"), " · ",
          documentLink(["runbook", "StreamhouseTableDamaged"], "Runbook"))))),
  ];
}

function showOne(status) {
  const name = route.table, table = status.tables.find(t => t.table === name), damaged = (status.damaged_tables ?? []).find(t => t.table === name);
  const crumbs = make("p", { class: "crumbs" }, make("a", { href: routeOfList(lastList), "data-key": "back" }, "← All tables"));
  document.title = `${name} – Streamhouse`;
  byId("one-body").hidden = !table;
  if (!table) {
    byId("one-head").replaceChildren(crumbs, make("div", { class: "title" }, make("h1", {}, name), ...(damaged ? [word("damaged", "bad"), damaged.since_us ? make("span", { class: "soft", title: moment(damaged.since_us) }, `for ${figure((status.now_us - damaged.since_us) / 1000, "ms")}`) : null] : [])),
      ...(damaged ? damagedPage(damaged) : [empty("There is no table of this name here. It may have been dropped, or its shard does not answer.")]));
    return;
  }
  const state = stateOf(table), t = table.tiering, since = STATES[state].rank < STATES.fresh.rank ? sinceOf(table, status.now_us) : null;
  const document_ = RUNBOOK[state] ? ["runbook", RUNBOOK[state]] : ["maintenance", ""];
  const errors = [...table.unusable, t.diverged, t.last_error && `${t.failures === 1 ? "The last round" : `${figure(t.failures)} rounds in a row`} failed: ${t.last_error}`]
    .filter(Boolean).map(text => ["bad", text]);
  if (table.has_much_debt && t.maintenance_debt) errors.push(["warn", debtText(t.maintenance_debt)]);
  const figures = [["Rows", figure(table.row_count), table.row_count > 999 ? figure(table.row_count, "exact") : "in the table"], ["In", figure(table.written_rows_per_s, "/s"), "rows written"],
    ["Out", figure(table.read_rows_per_s, "/s"), "rows read"], ["Log", figure(table.log_bytes, "B"), counted(table.buckets.length, "bucket")],
    ["Lake lag", table.is_tiered ? figure(table.lag_ms, "ms") : figure(null), table.is_tiered ? `${figure(table.freshness_ms, "ms")} wanted` : "no lake"]];
  byId("one-head").replaceChildren(crumbs, make("div", { class: "title" }, make("h1", {}, name), word(state, STATES[state].kind),
    since ? make("span", { class: "soft", title: moment(since) }, `for ${figure(Math.max(0, (status.now_us - since) / 1000), "ms")}`) : null,
    make("span", { class: "soft" }, (table.is_primary_key_table ? "primary key table" : "log table") + (table.shard ? `, shard ${table.shard}` : "")),
    STATES[state].rank < STATES.fresh.rank ? documentLink(document_, "What to do") : null),
  ...errors.map(([kind, text]) => { const { cause, where } = causeOf(text); return make("p", { class: `error ${kind}` }, cause, where ? make("span", { class: "where" }, " ", where) : null); }),
  make("dl", { class: "strip sheet" }, figures.map(([label, value, note]) => tile(label, value, note, { second: null }))),
  charts(status, table));
  byId("one-history").hidden = byId("one-place").hidden = !table.is_tiered;
  byId("one-lake").replaceChildren(lakeFacts(status, table));
  byId("one-rounds").replaceChildren(rounds(status, table));
  byId("one-buckets").replaceChildren(...buckets(table));
  byId("one-constraints").replaceChildren(constraints(table) ?? "");
  byId("one-readers").replaceChildren(table.consumers?.length
    ? make("div", { class: "sheet" }, grid([["Reader", "left"], ...READER_HEADS], readerRows(table.consumers, status.now_us, false), { caption: "Readers" }))
    : empty("No reader has reported its position."));
  openDetail(name, table);
  say(`${name}: ${state}`);
}
