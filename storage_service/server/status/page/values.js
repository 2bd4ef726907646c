// Columns, values and statements of one table as text: nothing here knows the document.

const VALUE_CHARACTERS = 100, WHOLE_CHARACTERS = 4000;

// A number as it is written: 9007199254740993 is no number of JavaScript's.
class Exact {
  constructor(source) { this.source = source; }
}
const isNumeric = type => /^(tinyint|smallint|int|bigint|decimal|double|float)/.test(type);
function exactJson(text) {
  return JSON.parse(text, (_, value, context) => typeof value === "number" && context?.source ? new Exact(context.source) : value);
}

// The number of either, for arithmetic; as written, for people. An older browser has plain numbers only.
const numberOf = value => Number(value?.source ?? value);
const written = value => String(value?.source ?? value);

// A type as in CREATE TABLE.
function ddl(type) {
  if (typeof type === "string") return type;
  if (type.type === "array") return `array<${ddl(type.element)}>`;
  if (type.type === "map") return `map<${ddl(type.key)}, ${ddl(type.value)}>`;
  if (type.type === "struct") return `struct<${type.fields.map(field => `${field.name}: ${ddl(field.type)}`).join(", ")}>`;
  return String(type.type);
}

// Line breaks, and what turns the direction of text, are seen and have no effect.
function visible(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, character =>
    ({ "\n": "\\n", "\r": "\\r", "\t": "\\t" })[character] ?? `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}
function cutText(text, most) {
  const letters = text.slice(0, most + 1);
  return letters.length > most ? `${letters.slice(0, most).replace(/[\ud800-\udbff]$/, "")}…` : text;
}

// What a cell shows: the text, all of it for who points at it, and what kind of value it is.
function shownValue(value, type) {
  if (value === null || value === undefined) return { text: "NULL", kind: "null", whole: "NULL" };
  if (type === "string" && value === "") return { text: '""', kind: "null", whole: "the empty text" };
  if (type === "binary") {
    const count = value.length / 2;
    return { text: figure(count, "B") + (count ? ` · 0x${value.slice(0, 16)}${count > 8 ? "…" : ""}` : ""), kind: "text",
      whole: cutText(`0x${value}`, WHOLE_CHARACTERS) };
  }
  const whole = cutText(nestedText(value, type, WHOLE_CHARACTERS), WHOLE_CHARACTERS);
  return { text: cutText(whole, VALUE_CHARACTERS), kind: isNumeric(type) ? "number" : typeof value === "object" && !(value instanceof Exact) ? "nested" : "text", whole };
}
function nestedText(value, type, most, isInside = false) {
  if (value === null || value === undefined) return "NULL";
  if (value instanceof Exact) return value.source;
  if (type?.type === "map" && Array.isArray(value))
    return `{${joined(value, most, ([key, item], rest) => `${nestedText(key, type.key, rest, true)}: ${nestedText(item, type.value, rest, true)}`)}}`;
  if (Array.isArray(value)) return `[${joined(value, most, (item, rest) => nestedText(item, type?.element, rest, true))}]`;
  if (typeof value === "object") {
    const types = Object.fromEntries((type?.fields ?? []).map(field => [field.name, field.type]));
    return `{${joined(Object.entries(value), most, ([name, item], rest) => `${visible(name)}: ${nestedText(item, types[name], rest, true)}`)}}`;
  }
  if (typeof value !== "string") return String(value);
  if (type === "binary") return `0x${value.slice(0, most)}`;
  if (/^timestamp/.test(type)) return value.replace("T", " ").replace("+00:00", " UTC");
  return isInside && type === "string" ? JSON.stringify(visible(value.slice(0, most))) : visible(value.slice(0, most + 1));
}
function joined(items, most, textOf) {
  const texts = [];
  for (const item of items) {
    if (most <= 0) { texts.push("…"); break; }
    texts.push(textOf(item, most));
    most -= texts.at(-1).length + 2;
  }
  return texts.join(", ");
}

// Where the newest rows of a table begin: a few of each bucket, of some buckets.
const NEWEST_ROWS = 20, NEWEST_BUCKETS = 16;
function newestRanges(positions) {
  const buckets = Object.entries(positions).map(([bucket, at]) => ({ bucket: Number(bucket), start: at.log_start_offset, end: at.high_watermark }))
    .filter(({ start, end }) => end > start).sort((a, b) => b.end - a.end || a.bucket - b.bucket).slice(0, NEWEST_BUCKETS);
  return buckets.map(({ bucket, start, end }) => ({ bucket, end, offset: Math.max(start, end - NEWEST_ROWS) }));
}
// The rows of fetched pages, the newest first. Rows of one moment come in turn from each bucket, the last of its log first.
function newestRows(pages) {
  const rows = pages.flatMap(page => {
    const first = numberOf(page.first_offset), times = (page.written_us ?? []).map(pair => pair.map(numberOf));
    return page.rows.map((values, i) => ({ bucket: numberOf(page.bucket), offset: first + i, age: page.rows.length - i, values,
      written_us: times.filter(([offset]) => offset <= first + i).at(-1)?.[1] ?? null }));
  });
  return rows.sort((a, b) => b.written_us - a.written_us || a.age - b.age || a.bucket - b.bucket).slice(0, NEWEST_ROWS);
}

const quoted = (text, mark) => mark + text.replaceAll("\\", "\\\\").replaceAll(mark, `\\${mark}`) + mark;
const sqlName = name => `"${name.replaceAll('"', '""')}"`;
const sqlText = text => `'${text.replaceAll("'", "''")}'`;
const shellText = text => `'${text.replaceAll("'", "'\\''")}'`;

// The lines to read a table with, as they can be run: [label, lines].
function readingLines({ endpoint, table, hasToken, position }) {
  const [database, name] = table.split(/\.(.*)/s), text = quoted(table, '"');
  const fetchPath = `/v1/tables/${encodeURIComponent(table)}/buckets/0/fetch?offset=${position?.offset ?? 0}`
    + (position?.offset ? `&table_id=${position.table_id}` : "");
  return [
    ["Spark", `import streamhouse\nfrom pyspark.sql import SparkSession\n\nspark = SparkSession.builder.getOrCreate()\nstreamhouse.register(spark)\n`
      + `rows = (spark.read.format("streamhouse")\n    .option("endpoint", ${quoted(endpoint, '"')})\n    .load(${text}))\nrows.show()`],
    ["Python", `from streamhouse import StreamhouseClient\n\nwith StreamhouseClient(${quoted(endpoint, '"')}) as client:\n    print(client.read(${text}))`],
    ["DuckDB", `INSTALL iceberg; LOAD iceberg;\nATTACH 'live' AS live (TYPE ICEBERG, ENDPOINT ${sqlText(`${endpoint}/iceberg`)},`
      + `${hasToken ? " TOKEN 'TOKEN'" : " AUTHORIZATION_TYPE 'none'"});\nSELECT * FROM live.${sqlName(database)}.${sqlName(name)} LIMIT 20;`],
    ["curl", `curl ${hasToken ? '-H "Authorization: Bearer $STREAMHOUSE_TOKEN" ' : ""}-H 'Accept: application/x-ndjson' \\\n  ${shellText(endpoint + fetchPath)}`],
  ];
}
