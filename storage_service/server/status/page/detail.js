// A table's page, what is asked for once per opening: columns, newest rows, lines to read it with, snapshots.
// Each question goes through the grants of the token: who may not read the table sees a sentence instead.

const ANSWER_BYTES_MAX = 4 << 20, ROWS_BYTES_MAX = 256 << 10, SNAPSHOTS_SHOWN = 10, ROW_COLUMNS_MAX = 50;
let detail = null, readingTab = "Spark";

// The body of an answer as text, or an error with a sentence for people; a body beyond `most` bytes is not read to its end.
async function ask(path, { signal, accept = "application/json", most = ANSWER_BYTES_MAX }) {
  const headers = { Accept: accept, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", signal, headers });
  const reader = answer.body.getReader(), chunks = [];
  for (let size = 0, part = await reader.read(); !part.done; part = await reader.read()) {
    chunks.push(part.value);
    if ((size += part.value.length) > most) {
      reader.cancel();
      throw Object.assign(new Error(`The answer has more than ${figure(most, "B")}, too much for this page.`), { isLarge: true });
    }
  }
  const text = await new Blob(chunks).text();
  if (answer.ok) return text;
  let error = {};
  try { error = JSON.parse(text).error ?? {}; } catch { /* An answer of a proxy: the status says it. */ }
  throw Object.assign(new Error(error.message ?? `HTTP ${answer.status}`), { status: answer.status, owner: error.owner });
}
function refusal(error, what) {
  if (error.status === 401 || error.status === 403) return `This token may not see ${what}: it needs a grant to read ${detail.name}.`;
  if (error.status === 421 && /^https?:\/\/[^/]+$/.test(error.owner ?? ""))
    return ["Another shard serves this table: ", make("a", { href: `${error.owner}/${routeOfTable(detail.name)}` }, error.owner), ` has ${what}.`];
  return error.message;
}

// -- columns, properties, place -----------------------------------------------------------------

function columns(info) {
  const keys = new Map(info.primary_key.map((name, i) => [name, info.primary_key.length > 1 ? `primary key ${i + 1}` : "primary key"]));
  for (const name of info.bucket_key) if (!keys.has(name)) keys.set(name, "bucket key");
  const hasComments = info.schema.some(column => column.comment);
  return make("div", { class: "sheet" }, grid([["Column", "left"], ["Type", "left"], ["Null", "left"], ...(hasComments ? [["Comment", "left"]] : [])],
    info.schema.map(column => make("tr", {}, make("td", { class: "name", title: column.name }, column.name, keys.has(column.name) ? make("span", { class: "kind" }, keys.get(column.name)) : null),
      turn(), make("td", { class: "left text" }, make("code", {}, ddl(column.type))), cell(column.nullable ? "nullable" : "not null", "left soft"),
      ...(hasComments ? [make("td", { class: "left text" }, column.comment ?? "")] : []))), { caption: "Columns" }));
}
function definition(info) {
  const list = [], add = (name, ...value) => list.push(make("dt", {}, name), make("dd", {}, value)), code = text => make("code", {}, text);
  const names = of => of.flatMap((name, i) => [i ? ", " : "", code(name)]);
  if (info.primary_key.length) add("Primary key", names(info.primary_key));
  add("Buckets", figure(info.bucket_count), info.bucket_key.length ? [" by ", names(info.bucket_key)] : info.primary_key.length ? " by the key" : ", rows spread evenly");
  add("Lake partitions", info.partitioned_by.length ? names(info.partitioned_by) : "none");
  add("Table id", figure(info.table_id, "exact"), `, schema version ${figure(info.schema_id, "exact")}`);
  add("Created", moment(info.created_at_us));
  const properties = Object.entries(info.properties).sort(([a], [b]) => a < b ? -1 : 1);
  add("Properties", properties.length ? make("ul", { class: "plain" }, properties.map(([name, value]) => make("li", {}, code(`${name} = ${value}`)))) : "none set; all have their defaults");
  return make("dl", { class: "facts sheet" }, list);
}
function snapshots(metadata) {
  const list = [...(metadata.snapshots ?? [])].sort((a, b) => numberOf(b["timestamp-ms"]) - numberOf(a["timestamp-ms"])).slice(0, SNAPSHOTS_SHOWN);
  if (!list.length) return empty("The lake table has no snapshot yet.");
  const of = (snapshot, name) => { const text = snapshot.summary?.[name]; return text === undefined ? null : Number(text); };
  return make("div", { class: "sheet" }, grid([["Committed", "left"], ["Snapshot", "left"], ["Operation", "left"], ["Rows added"], ["Files added"], ["Rows"]],
    list.map(s => make("tr", {}, make("td", { class: "left" }, moment(numberOf(s["timestamp-ms"]) * 1000)), turn(),
      make("td", { class: "left" }, make("code", {}, written(s["snapshot-id"]))), cell(s.summary?.operation ?? "", "left soft"),
      cell(figure(of(s, "added-records") ?? 0), null, "rows added", exactly(of(s, "added-records"))), cell(figure(of(s, "added-data-files") ?? 0), null, "files added"),
      cell(figure(of(s, "total-records")), null, "rows", exactly(of(s, "total-records"))))), { caption: "Snapshots" }));
}

// -- newest rows --------------------------------------------------------------------------------

function rowsTable(info, rows) {
  const shown = info.schema.slice(0, ROW_COLUMNS_MAX), hasChanges = info.primary_key.length > 0;
  return make("div", { class: "sheet" }, make("div", { class: "scroll rows", tabindex: 0, role: "region", "aria-labelledby": "rows-heading" }, make("table", { "aria-label": "Newest rows" },
    make("thead", {}, make("tr", {}, [["Written", "left"], ["Bucket"], ["Offset"], ...(hasChanges ? [["Change", "left"]] : [])].map(([text, kind]) => make("th", { scope: "col", class: kind ?? null }, text)),
      shown.map(column => make("th", { scope: "col", class: isNumeric(column.type) ? null : "left", title: ddl(column.type) }, column.name)))),
    make("tbody", {}, rows.map(row => make("tr", {}, cell(row.written_us === null ? figure(null) : moment(row.written_us), "left soft"), cell(figure(row.bucket, "exact"), "soft"), cell(figure(row.offset, "exact"), "soft"),
      hasChanges ? cell(row.values.__change_type ?? "", "left soft") : null,
      shown.map(column => { const { text, kind, whole } = shownValue(row.values[column.name], column.type); return make("td", { class: `value is-${kind}${isNumeric(column.type) ? " is-number" : ""}`, title: whole }, text); })))))));
}
async function newest(info, signal) {
  const path = `v1/tables/${encodeURIComponent(detail.name)}`, state = JSON.parse(await ask(`${path}/state`, { signal }));
  const ranges = newestRanges(state.positions), notes = [];
  detail.position = { offset: state.positions[0]?.log_start_offset ?? 0, table_id: info.table_id };
  if (!ranges.length) return empty("The log has no rows now. Older rows are in the lake: the lines to read this table show them.");
  let asked = "";
  if (info.schema.length > ROW_COLUMNS_MAX) {
    const names = info.schema.slice(0, ROW_COLUMNS_MAX).map(column => column.name).concat(info.primary_key.length ? "__change_type" : []);
    asked = `&columns=${encodeURIComponent(JSON.stringify(names))}`;
    notes.push(`The first ${ROW_COLUMNS_MAX} of ${figure(info.schema.length, "exact")} columns.`);
  }
  const pages = await Promise.all(ranges.map(async range => {
    const of = offset => ask(`${path}/buckets/${range.bucket}/fetch?offset=${offset}&end_offset=${range.end}&table_id=${info.table_id}&max_bytes=${ROWS_BYTES_MAX}${asked}`, { signal, most: ROWS_BYTES_MAX });
    try {
      const page = exactJson(await of(range.offset));
      // Large rows: what fits ends before the newest one.
      return numberOf(page.next_offset) < range.end ? exactJson(await of(range.end - 1)) : page;
    } catch (error) {
      if (!error.isLarge) throw error;
      notes.push(`Rows of bucket ${range.bucket} are larger than ${figure(ROWS_BYTES_MAX, "B")} together, and are not shown.`);
      return null;
    }
  }));
  const rows = newestRows(pages.filter(Boolean)), count = Object.keys(state.positions).length;
  if (count > ranges.length && ranges.length === NEWEST_BUCKETS) notes.push(`Of the ${NEWEST_BUCKETS} buckets with the most rows.`);
  if (info.primary_key.length) notes.push("Of a table with a primary key these are the newest changes: +I a new row, -U and +U a row before and after, -D a deleted row.");
  return [rows.length ? rowsTable(info, rows) : null, ...notes.map(text => make("p", { class: "note soft" }, text))];
}

// -- opening ------------------------------------------------------------------------------------

function reading() {
  const endpoint = location.origin + location.pathname.replace(/\/[^/]*$/, "");
  const lines = readingLines({ endpoint, table: detail.name, hasToken: token !== null, position: detail.position });
  const [label, text] = lines.find(([one]) => one === readingTab) ?? lines[0], code = make("code", {}, text);
  const done = button("Copy", "copy", async () => { await copy(text, code); done.textContent = "Copied"; setTimeout(() => { done.textContent = "Copy"; }, 1500); }, { class: "copy", "aria-label": `Copy the lines for ${label}` });
  byId("one-reading").replaceChildren(make("div", { class: "sheet" },
    make("div", { class: "tabs" }, lines.map(([one]) => button(one, `tab ${one}`, () => { readingTab = one; reading(); }, { "aria-pressed": one === label })), done),
    make("pre", {}, code), token === null ? null : make("p", { class: "note soft" }, "With a token: set STREAMHOUSE_TOKEN, and for DuckDB put the token in place of TOKEN.")));
}
// Each part shows what was answered, or why not; a part of a table that was left meanwhile shows nothing.
async function part(id, what, find) {
  const own = detail;
  try {
    const made = [await find()].flat();
    if (own === detail) byId(id).replaceChildren(...made.filter(Boolean));
  } catch (error) {
    if (own === detail && error.name !== "AbortError") byId(id).replaceChildren(empty(refusal(error, what)));
  }
}
function openDetail(name, table) {
  if (detail?.name === name) return;
  closeDetail();
  const asking = new AbortController(), { signal } = asking, path = `v1/tables/${encodeURIComponent(name)}`;
  const info = ask(path, { signal }).then(JSON.parse);
  detail = { name, asking, position: null };
  for (const id of ["columns", "definition", "rows", "snapshots", "place"]) byId(`one-${id}`).replaceChildren(empty("Reading"));
  byId("one-rejected").replaceChildren();
  part("one-columns", "the columns", async () => columns(await info));
  part("one-definition", "the definition", async () => definition(await info));
  part("one-rows", "the rows", async () => newest(await info, signal)).then(() => { if (detail?.name === name) reading(); });
  reading();
  const [database, own] = name.split(/\.(.*)/s);
  const lake = !table.is_tiered ? Promise.reject(new Error("This table has no lake: table.datalake.enabled is false."))
    : table.lake_snapshot_id === null ? Promise.reject(new Error("No round has made the lake table yet.")) : ask(`iceberg/v1/namespaces/${encodeURIComponent(database)}/tables/${encodeURIComponent(own)}`, { signal }).then(exactJson);
  part("one-snapshots", "the snapshots", async () => snapshots((await lake).metadata));
  part("one-place", "the place in the lake", async () => { const answer = await lake; return make("dl", { class: "facts sheet" },
    make("dt", {}, "Location"), make("dd", {}, make("code", {}, answer.metadata.location)), make("dt", {}, "Metadata"), make("dd", {}, make("code", {}, answer["metadata-location"] ?? "–")),
    make("dt", {}, "Format"), make("dd", {}, `Iceberg version ${written(answer.metadata["format-version"])}`)); });
  part("one-rejected", "the rejected rows", async () => {
    const { tables } = JSON.parse(await ask(`v1/tables?database=${encodeURIComponent(database)}`, { signal }));
    if (!tables.includes(`${name}__rejected`)) return null;
    const { count } = JSON.parse(await ask(`${path}__rejected/count`, { signal }));
    return make("p", { class: "sheet empty" }, `${counted(count, "row")} did not fit, and ${count === 1 ? "is" : "are"} kept in `, link(`${name}__rejected`, `${name}$rejected`), ".");
  });
}
function closeDetail() {
  detail?.asking.abort();
  detail = null;
}
