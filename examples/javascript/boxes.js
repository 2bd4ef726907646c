// A table from JavaScript: rows in and out as Arrow, looked up as JSON, followed by events.
//
// Run it beside a service: npm install && STREAMHOUSE_ENDPOINT=http://127.0.0.1:8765 node boxes.js
// In a browser all of it works alike, on a page of the service's own origin.

import { tableFromArrays, tableFromIPC, tableToIPC } from "apache-arrow";

const ENDPOINT = process.env.STREAMHOUSE_ENDPOINT ?? "http://127.0.0.1:8765";
const TOKEN = process.env.STREAMHOUSE_TOKEN;
const ARROW = "application/vnd.apache.arrow.stream";
const JSON_TYPE = "application/json";

async function call(method, path, { body, type, accept, signal } = {}) {
  const headers = {};
  if (TOKEN) headers.Authorization = `Bearer ${TOKEN}`;
  if (type) headers["Content-Type"] = type;
  if (accept) headers.Accept = accept;
  const answer = await fetch(ENDPOINT + path, { method, headers, body, signal });
  if (!answer.ok) {
    const { code, message } = (await answer.json()).error;
    throw Object.assign(new Error(`${code}: ${message}`), { code });
  }
  return answer;
}

async function create(path, value) {
  try {
    await call("POST", path, { body: JSON.stringify(value), type: JSON_TYPE });
  } catch (error) {
    if (!/^(database|table)_exists$/.test(error.code)) throw error;
  }
}

// Whole events of an answer without end, as they come. An EventSource does the same where no token
// is needed, and connects again by itself; `id` is what to send as Last-Event-ID then.
async function* events(path) {
  const stop = new AbortController();
  try {
    const answer = await call("GET", path, { accept: "text/event-stream", signal: stop.signal });
    let text = "";
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
      const whole = (text + part).split("\n\n");
      text = whole.pop();
      for (const lines of whole) {
        const found = {};
        for (const line of lines.split("\n")) {
          const colon = line.indexOf(": ");
          found[line.slice(0, colon)] = line.slice(colon + 2);
        }
        yield { ...found, data: JSON.parse(found.data) };
      }
    }
  } finally {
    stop.abort();
  }
}

await create("/v1/databases", { name: "shop" });
await create("/v1/tables", {
  path: "shop.js_boxes",
  primary_key: ["id"],
  schema: [
    { name: "id", type: "bigint", nullable: false },
    { name: "color", type: "string" },
    { name: "size", type: "double" },
  ],
});

// Texts are dictionary-encoded by tableFromArrays; a BigInt64Array is bigint, a Float64Array double.
const rows = tableFromArrays({
  id: new BigInt64Array([1n, 2n, 3n]),
  color: ["red", "blue", "red"],
  size: new Float64Array([10, 20.5, 30]),
});
await call("POST", "/v1/tables/shop.js_boxes/upsert", { body: tableToIPC(rows, "stream"), type: ARROW });

const fetched = await call("GET", "/v1/tables/shop.js_boxes/buckets/0/fetch?offset=0");
const changes = tableFromIPC(new Uint8Array(await fetched.arrayBuffer()));
console.log("changes", changes.numRows, "of", [...changes.getChild("color")].join(", "));

const found = await call("POST", "/v1/tables/shop.js_boxes/lookup", {
  body: JSON.stringify([{ id: 2 }, { id: 9 }]),
  type: JSON_TYPE,
  accept: JSON_TYPE,
});
console.log("found", JSON.stringify((await found.json()).rows));

await call("POST", "/v1/tables/shop.js_boxes/upsert", {
  body: '{"id": 4, "color": "green", "size": 40}\n{"id": 2, "__change_type": "-D"}\n',
  type: "application/x-ndjson",
});
let count = 0;
for await (const { event, data } of events("/v1/tables/shop.js_boxes/subscribe?start=earliest")) {
  if (event !== "rows") continue;
  for (const row of data.rows) console.log("event", row.__change_type, row.id, row.color);
  count += data.rows.length;
  if (count >= 5) break;
}
