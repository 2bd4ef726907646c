// Columns, values and statements on a table's page; run by test_page_figures.py.
"use strict";
const assert = require("node:assert/strict");
const { execFileSync } = require("node:child_process");
const fs = require("node:fs");
const { test } = require("node:test");
const vm = require("node:vm");

const page = vm.createContext({ URLSearchParams });
for (const file of ["figures.js", "values.js"]) vm.runInContext(fs.readFileSync(`${process.env.PAGE}/${file}`, "utf8"), page);
const same = (value, wanted) => assert.deepEqual(JSON.parse(JSON.stringify(value)), wanted);
const plain = text => text.replaceAll("\u202f", " ");
const shown = (json, type) => { const { text, kind } = page.shownValue(page.exactJson(json), type); return [plain(text), kind]; };
const ARRAY = { type: "array", element: "string" }, MAP = { type: "map", key: "string", value: "int" };
const STRUCT = { type: "struct", fields: [{ name: "lat", type: "double" }, { name: "raw", type: "binary" }, { name: "tags", type: ARRAY }] };

test("a type is written as in CREATE TABLE", () => {
  assert.equal(page.ddl("decimal(12,2)"), "decimal(12,2)");
  assert.equal(page.ddl(STRUCT), "struct<lat: double, raw: binary, tags: array<string>>");
  assert.equal(page.ddl({ type: "map", key: "int", value: MAP }), "map<int, map<string, int>>");
});

test("values are told from each other", () => {
  for (const [json, type, text, kind] of [["null", "string", "NULL", "null"], ['"NULL"', "string", "NULL", "text"], ['""', "string", '""', "null"],
    ['"a\\nb\\u202ec"', "string", "a\\nb\\u202ec", "text"], ["true", "boolean", "true", "text"], ["1.5", "double", "1.5", "number"],
    ['"NaN"', "double", "NaN", "number"], ['"12.30"', "decimal(5,2)", "12.30", "number"], ['"00ff"', "binary", "2 B · 0x00ff", "text"], ['""', "binary", "0 B", "text"],
    [`"${"ab".repeat(2048)}"`, "binary", "2.00 KiB · 0xabababababababab…", "text"],
    ['"2026-11-29T10:56:12.2+00:00"', "timestamp", "2026-11-29 10:56:12.2 UTC", "text"], ['["a", null, "x, y"]', ARRAY, '["a", NULL, "x, y"]', "nested"],
    ['[["x", 1], ["y", null]]', MAP, '{"x": 1, "y": NULL}', "nested"], ['{"lat": 1.5, "raw": "00", "tags": []}', STRUCT, "{lat: 1.5, raw: 0x00, tags: []}", "nested"]])
    assert.deepEqual(shown(json, type), [text, kind]);
});

const takesNumbersAsWritten = (() => { let has = false; JSON.parse("1", (_, value, context) => { has = Boolean(context?.source); return value; }); return has; })();
test("a number beyond JavaScript's is shown as it is stored", { skip: !takesNumbersAsWritten }, () => {
  assert.deepEqual(shown("9007199254740993", "bigint"), ["9007199254740993", "number"]);
  assert.deepEqual(shown('[9007199254740993]', { type: "array", element: "bigint" }), ["[9007199254740993]", "nested"]);
});

test("long values are cut, and never in the middle of a letter", () => {
  const { text, whole } = page.shownValue("😀".repeat(50_000), "string");
  assert.ok(text.length <= 101 && text.endsWith("😀…"), text);
  assert.ok(whole.length <= 4001);
  const { text: nested, whole: most } = page.shownValue(Array.from({ length: 1e6 }, () => "word"), ARRAY);
  assert.ok(nested.endsWith("…") && most.length < 5000);
});

test("the newest rows come by time, and of one moment in turn from each bucket", () => {
  const positions = { 0: { log_start_offset: 90, high_watermark: 100 }, 1: { log_start_offset: 0, high_watermark: 100 }, 2: { log_start_offset: 5, high_watermark: 5 } };
  same(page.newestRanges(positions).map(r => [r.bucket, r.offset, r.end].join()), ["0,90,100", "1,80,100"]);
  assert.equal(page.newestRanges(Object.fromEntries(Array.from({ length: 100 }, (_, i) => [i, positions[0]]))).length, 16);
  const rows = page.newestRows([{ bucket: 0, first_offset: 8, written_us: [[8, 50], [9, 70]], rows: [{ id: 1 }, { id: 2 }] },
    { bucket: 1, first_offset: 3, written_us: [[3, 70]], rows: [{ id: 3 }, { id: 4 }] }]);
  same(rows.map(r => `${r.bucket}:${r.offset}@${r.written_us}`), ["0:9@70", "1:4@70", "1:3@70", "0:8@50"]);
  assert.equal(page.newestRows([{ bucket: 0, first_offset: 0, written_us: [[0, 1]], rows: Array(50).fill({}) }]).length, 20);
});

test("the lines to read a table name this service and this table, and break out of nothing", () => {
  const lines = changes => Object.fromEntries(page.readingLines({ endpoint: "http://h:1/x", table: "db.t", hasToken: false, position: null, ...changes }));
  assert.match(lines({}).Spark, /\.option\("endpoint", "http:\/\/h:1\/x"\)\n    \.load\("db\.t"\)/);
  assert.match(lines({}).Python, /StreamhouseClient\("http:\/\/h:1\/x"\) as client:\n    print\(client\.read\("db\.t"\)\)/);
  assert.match(lines({}).DuckDB, /ENDPOINT 'http:\/\/h:1\/x\/iceberg', AUTHORIZATION_TYPE 'none'\);\nSELECT \* FROM live\."db"\."t" LIMIT 20;/);
  assert.match(lines({ hasToken: true }).DuckDB, /TOKEN 'TOKEN'/);
  assert.match(lines({ hasToken: true }).curl, /^curl -H "Authorization: Bearer \$STREAMHOUSE_TOKEN" /);
  assert.match(lines({ position: { offset: 7, table_id: 3 } }).curl, /fetch\?offset=7&table_id=3'$/);

  const hostile = `d.'; rm -rf "$(touch hacked)" \\ \`id\` "); DROP --`, { curl, DuckDB, Python } = lines({ table: hostile });
  assert.equal(execFileSync("/bin/sh", ["-c", curl.replace(/^curl/, "printf '%s\\n'")], { encoding: "utf8" }).trim().split("\n").at(-1),
    `http://h:1/x/v1/tables/${encodeURIComponent(hostile)}/buckets/0/fetch?offset=0`);
  assert.ok(DuckDB.includes(`live."d"."'; rm -rf ""$(touch hacked)"" \\ \`id\` ""); DROP --"`));
  assert.ok(Python.includes(String.raw`client.read("d.'; rm -rf \"$(touch hacked)\" \\ `));
});
