// The figures, order and troubles of the status page; run by test_page_figures.py.
"use strict";
const assert = require("node:assert/strict");
const fs = require("node:fs");
const { test } = require("node:test");
const vm = require("node:vm");

const page = vm.createContext({ URLSearchParams });
vm.runInContext(fs.readFileSync(`${process.env.PAGE}/figures.js`, "utf8"), page);
const states = vm.runInContext("STATES", page);
const plain = text => text.replaceAll("\u202f", " ");
const same = (value, wanted) => assert.deepEqual(JSON.parse(JSON.stringify(value)), wanted);

function table(changes = {}) {
  return { table: "db.t", row_count: 1, log_bytes: 1, written_rows_per_s: 0, read_rows_per_s: 0, is_tiered: true,
    freshness_ms: 1000, lag_ms: 0, tiering: {}, unusable: [], history: { written_rows_per_s: [] }, ...changes };
}
function service(changes = {}) {
  return { written_rows_per_s: 10, read_rows_per_s: 20, memory_bytes: 5, disk_bytes: 3, disk_bytes_max: null, processor_share: 0.5,
    latency: { write: { p50_ms: 1, p99_ms: 2 }, lookup: null }, errors: {}, journal: null,
    history: { written_rows_per_s: [1, 2, 3], read_rows_per_s: [4, 5, 6] }, ...changes };
}

test("whole numbers are grouped by thin spaces", () => {
  assert.equal(page.whole(1234567), "1\u202f234\u202f567");
  assert.equal(page.whole(999), "999");
});

test("short numbers keep three digits", () => {
  const wanted = [[0, "0"], [0.3, "0.3"], [9.96, "10"], [999, "999"], [1000, "1.00 k"], [9999, "10.0 k"], [12345, "12.3 k"],
    [999999, "1.00 M"], [123456789, "123 M"], [1.2e13, "12.0 T"], [9e16, "90 000 T"]];
  for (const [number, text] of wanted) assert.equal(plain(page.short(number)), text, number);
});

test("bytes have a unit, and what is not known is a dash", () => {
  for (const [count, text] of [[null, "–"], [undefined, "–"], [NaN, "–"], [0, "0 B"], [999, "999 B"], [999.6, "0.98 KiB"], [1536, "1.50 KiB"],
    [2 ** 31, "2.00 GiB"], [43e9, "40.0 GiB"], [1.24e9, "1.15 GiB"], [5e15, "4 547 TiB"]]) assert.equal(plain(page.figure(count, "B")), text);
});

test("ages have two units at most, and no number is 60 of a smaller one", () => {
  for (const [ms, text] of [[0, "0 s"], [0.31, "0.3 ms"], [6.8, "6.8 ms"], [999.6, "1.0 s"], [9949, "9.9 s"], [59600, "1 min"],
    [65000, "1 min 5 s"], [300000, "5 min"], [595000, "10 min"], [3599999, "1 h"], [11880000, "3 h 18 min"],
    [26 * 3600e3, "1 d 2 h"], [142 * 86400e3, "142 d"], [null, "–"]]) assert.equal(plain(page.figure(ms, "ms")), text, ms);
  for (let ms = 1; ms < 1e10; ms = Math.ceil(ms * 1.01)) assert.doesNotMatch(plain(page.age(ms)), /\b(60 (s|min)|1000 ms)/, ms);
});

test("every figure has one style, and what is not known is a dash", () => {
  for (const [value, unit, text] of [[12345, "", "12.3 k"], [12345, "/s", "12.3 k/s"], [12345, "exact", "12 345"], [0.862, "%", "86 %"], [0.0123, "%", "1.2 %"],
    [0, "%", "0 %"], [0.834, "cores", "0.83 cores"], [0, "/s", "0/s"], [null, "cores", "–"]]) assert.equal(plain(page.figure(value, unit)), text);
  assert.equal(plain(page.counted(1, "row")), "1 row");
  assert.equal(plain(page.counted(1234, "row waits", "rows wait")), "1.23 k rows wait");
});

test("a scale's top is round and not below the values", () => {
  for (const most of [0.3, 1, 3, 7, 99, 101, 4999, 5001, 123456]) {
    const top = page.scaleTop(most);
    assert.ok(top >= most && top <= most * 2.5001, `${most} ${top}`);
    assert.match(String(top), /^[125]0*$|^0\.0*[125]$/);
  }
  assert.equal(page.scaleTop(0), 1);
  assert.equal(plain(page.age(page.scaleTopMs(1260000))), "30 min");
  assert.equal(plain(page.age(page.scaleTopMs(90e3))), "2 min");
  assert.equal(plain(page.age(page.scaleTopMs(40 * 3600e3))), "2 d");
});

test("a line stays inside its picture", () => {
  assert.doesNotMatch(page.linePath([0, 0, 0], { width: 120, height: 20, top: 0 }), /NaN/);
  const path = page.linePath([0, 5, 10, 20], { width: 90, height: 20, top: 10 });
  assert.equal(path, "M0.0 19.0L30.0 10.0L60.0 1.0L90.0 1.0");
  // What is shorter than its time ends at the right: it is no line through all of it.
  const young = page.linePath([0, 10], { width: 90, height: 20, top: 10, points: 4 });
  assert.equal(young, "M60.0 19.0L90.0 1.0");
});

test("routes are read as they are written", () => {
  same(page.parseRoute(page.routeOfTable("sales.orders")), { table: "sales.orders" });
  same(page.parseRoute("#/orders"), { table: "default.orders" });
  same(page.parseRoute("#table-sales.orders"), { table: "sales.orders" });
  assert.equal(page.parseRoute("#/%E0%A4%A/x").table, "%E0%A4%A.x");
  same(page.parseRoute(page.routeOfDocument("runbook", "StreamhouseDown")), { table: null, file: "runbook", at: "streamhousedown" });
  same(page.parseRoute("#/~docs"), { table: null, file: "README", at: "" });
  const list = { table: null, search: "a b&c", only: "trouble", sort: "lag_ms", isDown: true };
  same(page.parseRoute(page.routeOfList(list)), list);
  assert.equal(page.parseRoute("#/?sort=__proto__").sort, "state");
  assert.equal(page.routeOfList(page.parseRoute("")), "#/");
});

test("a table's state is the worst that is so", () => {
  const debt = { small_files: 500, delete_files: 0, deleted_share: 0 };
  for (const [changes, state] of [[{}, "fresh"], [{ lag_ms: 1001 }, "late"], [{ lag_ms: 1000 }, "fresh"],
    [{ is_tiered: false, lag_ms: 5000 }, "no lake"], [{ tiering: { failures: 1 }, lag_ms: 9999 }, "failing"],
    [{ tiering: { maintenance_debt: debt } }, "debt"], [{ tiering: { maintenance_debt: debt }, has_much_debt: false }, "fresh"],
    [{ unusable: ["why"], tiering: { failures: 3 } }, "unusable"], [{ tiering: { diverged: "two" } }, "two histories"],
    [{ damaged: "why" }, "damaged"]]) assert.equal(page.stateOf(table(changes)), state);
});

test("what is late or failing comes first, whatever its name", () => {
  const tables = [table({ table: "a" }), table({ table: "b", lag_ms: 2000 }), table({ table: "c", lag_ms: 9000 }),
    table({ table: "d", tiering: { failures: 2 } }), table({ table: "e", unusable: ["x"] })];
  const names = order => page.inOrder(tables, order).map(t => t.table).join("");
  assert.equal(names({ sort: "state", isDown: false }), "edcba");
  assert.equal(names({ sort: "table", isDown: true }), "edcba");
  assert.equal(names({ sort: "lag_ms", isDown: true }), "cbade");
});

test("fresh tables keep their places, whatever their lag is", () => {
  const names = lags => page.inOrder(lags.map((lag_ms, i) => table({ table: "abc"[i], lag_ms })), { sort: "state", isDown: false }).map(t => t.table).join("");
  for (const lags of [[900, 10, 500], [10, 900, 500], [0, 0, 999]]) assert.equal(names(lags), "abc");
});

test("search wants every word, filters what is so now", () => {
  const tables = [table({ table: "sales.orders_1" }), table({ table: "web.orders_2", lag_ms: 5000 }), table({ table: "web.x", read_rows_per_s: 1 })];
  const found = (search, only = "") => page.wanted(tables, { search, only }).map(t => t.table);
  same(found("WEB ord"), ["web.orders_2"]);
  same(found("", "trouble"), ["web.orders_2"]);
  same(found("", "active"), ["web.x"]);
  same(found("<img"), []);
});

test("a late table says how many rows wait, if any still do", () => {
  const said = untiered_rows => plain(page.troubles({ service: service(),
    tables: [table({ lag_ms: 3000, tiering: { untiered_rows } })] }).find(t => t.word === "late").cause);
  assert.equal(said(0), "3.0 s behind, 1.0 s wanted");
  assert.equal(said(1), "3.0 s behind, 1.0 s wanted; 1 row waits");
  assert.equal(said(2000), "3.0 s behind, 1.0 s wanted; 2.00 k rows wait");
});

test("shards are added up, and the worst latency counts", () => {
  const slow = service({ latency: { write: { p50_ms: 5, p99_ms: 50 }, lookup: null }, errors: { internal: 2 },
    history: { written_rows_per_s: [7, 8], read_rows_per_s: [9, 9] } });
  const one = service({ errors: { internal: 1, overloaded: 4 } });
  const sum = page.together({ service: one, shards: [{ service: one }, { service: slow }, { service: null }] });
  assert.equal(sum.written_rows_per_s, 20);
  assert.equal(sum.latency.write.p99_ms, 50);
  same(sum.errors, { internal: 3, overloaded: 4 });
  same(sum.history.written_rows_per_s, [9, 11]);
  assert.equal(page.together({ service: one }), one);
});

test("troubles of the service and of its tables are told, the worst first", () => {
  const status = { service: service({ disk_bytes: 90, disk_bytes_max: 100, errors: { internal: 2 },
    journal: { lag_ms: 9000, lag_bytes: 10, damaged_files: [] } }),
  damaged_tables: [{ table: "db.gone", reason: "no" }], strangers: [],
  shards: [{ shard: "7", answers: false }],
  tables: [table(), table({ table: "db.late", lag_ms: 3000 }), table({ table: "db.fails", tiering: { failures: 2, last_error: "why" } })],
  consumers: { count: 1, worst: [{ table: "db.t", name: "r", rows_at_risk: 5, lag_ms: 1, lag_rows: 5 }] } };
  same(page.troubles(status).map(t => t.word), ["away", "damaged", "journal", "bug", "failing", "rows at risk", "disk", "late"]);
  for (const { document } of page.troubles(status)) assert.ok(document, "what to do is known");
  same(page.troubles({ service: service(), tables: [table()] }), []);
  for (const { rank, kind } of Object.values(states)) assert.ok(rank >= 0 && kind);
});

test("the cause comes before the place", () => {
  for (const [text, cause, where] of [
    ["/data/tables/7/bucket-0/0000.log at byte 0: segment header checksum mismatch; restore the file", "Segment header checksum mismatch; restore the file", "/data/tables/7/bucket-0/0000.log at byte 0"],
    ["bucket 2: segment 0041.log: checksum mismatch at 48", "Checksum mismatch at 48", "bucket 2: segment 0041.log"],
    ["table 'db.t': bucket 1: lost", "Lost", "bucket 1"],
    ["CommitFailedError: the catalog answers 503 to s3://lake/x", "CommitFailedError: the catalog answers 503 to s3://lake/x", ""],
    ["/only/a/path", "/only/a/path", ""], ["", "", ""]]) same(page.causeOf(text), { cause, where });
});

const NOW = 1e15, MINUTE = 60e6;
const reader = (changes = {}) => ({ table: "db.t", name: "r", lag_rows: 5, lag_ms: 1000, rows_at_risk: 0, reported_us: NOW - 1e6, ...changes });

test("slow and silent readers are told apart, and matter after ten minutes", () => {
  const slow = reader({ lag_ms: 601e3 }), silent = reader({ reported_us: NOW - 11 * MINUTE, lag_ms: 660e3 });
  for (const [consumer, word, trouble] of [[reader(), "reads", undefined], [slow, "slow", "slow reader"], [silent, "silent", "silent reader"],
    [reader({ reported_us: NOW - 2 * MINUTE }), "silent", undefined], [reader({ reported_us: NOW - 11 * MINUTE, lag_rows: 0, lag_ms: 0 }), "silent", undefined],
    [reader({ lag_ms: null }), "slow", "slow reader"], [reader({ rows_at_risk: 3 }), "reads", "rows at risk"]]) {
    assert.equal(page.readerState(consumer, NOW).word, word);
    assert.equal(page.troubles({ now_us: NOW, service: service(), tables: [], consumers: { worst: [consumer] } })[0]?.word, trouble);
  }
  const [{ cause, since_us, document }] = page.troubles({ now_us: NOW, service: service(), tables: [], consumers: { worst: [silent] } });
  assert.equal(plain(cause), "Reader r has not reported for 11 min, 5 rows unread");
  assert.equal(since_us, silent.reported_us);
  same(document, ["runbook", "StreamhouseReaderLate"]);
});

test("without a worker it is the worker that is missing, not each table", () => {
  const tables = ["a", "b"].map((name, i) => table({ table: name, lag_ms: 3000 + 1000 * i, tiering: { untiered_rows: 7 } }));
  const told = (changes = {}) => page.troubles({ now_us: NOW, service: service(), tables, workers: [], idle_workers: [], ...changes });
  same(told().map(t => t.word), ["no worker"]);
  assert.equal(plain(told()[0].cause), "No tiering worker was heard of in the last minute: 2 tables are late, 14 rows wait");
  assert.equal(told()[0].since_us, NOW - 3e6);
  same(told({ idle_workers: [{ worker_id: "embedded", reason: "starting" }] }).map(t => t.word), ["late", "late"]);
});

test("a trouble says since when", () => {
  const since = t => page.troubles({ now_us: NOW, service: service(), tables: [t] })[0].since_us;
  assert.equal(since(table({ lag_ms: 61000 })), NOW - MINUTE);
  assert.equal(since(table({ tiering: { failures: 2 }, since_us: 7 })), 7);
  assert.equal(since(table({ tiering: { failures: 2 } })), null);
});
