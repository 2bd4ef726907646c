// Elements that every part of the page is made of.
const byId = id => document.getElementById(id);
const LINES_SHOWN = 5, ROWS_SHOWN = 100, BUCKETS_SHOWN = 32, LAG_LINES = 8;
const SVG = new Set(["svg", "path", "line", "rect"]);

// Text is only ever added as text: what a worker or an application is called is nobody's markup.
function make(tag, attributes = {}, ...children) {
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.flat(Infinity).filter(child => child !== null).map(child => child instanceof Node ? child : String(child)));
  return made;
}
const link = (name, text = name) => make("a", { href: routeOfTable(name), "data-key": `table ${name}`, title: name }, text);
const word = (text, kind) => make("span", { class: `word ${kind}` }, text);
const empty = (...text) => make("p", { class: "empty sheet" }, text);
const exactly = number => number === null || number === undefined ? null : figure(number, "exact");
function button(text, key, act, attributes = {}) {
  const made = make("button", { type: "button", "data-key": key, ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}
// A moment as people compare it: how long ago, and the time for who points at it.
const ago = (us, nowUs) => make("span", { title: moment(us) }, `${figure(Math.max(0, (nowUs - us) / 1000), "ms")} ago`);
const documentLink = ([file, at], text) => make("a", { href: routeOfDocument(file, at), "data-key": `document ${file} ${at}` }, text);

// -- pictures ---------------------------------------------------------------------------------

function spark(values, { top, colour = "var(--write)", label, points = 0 }) {
  const size = { width: 120, height: 20, top, points }, line = linePath(values, size), left = line.slice(1, line.indexOf(" "));
  const svg = make("svg", { viewBox: `0 0 ${size.width} ${size.height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (values.length > 1) svg.append(
    make("path", { d: `${line}L120 20L${left} 20Z`, fill: colour, opacity: .14 }),
    make("path", { d: line, fill: "none", stroke: colour, "stroke-width": 1.4, "vector-effect": "non-scaling-stroke" }));
  return svg;
}
function plot(series, { title, unit, keys = [], limit = null, spanMs, topOf = scaleTop }) {
  const most = Math.max(0, ...series.flatMap(one => one.values)), top = topOf(Math.max(limit ?? 0, most)), size = { width: 300, height: 100, top };
  const svg = make("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": `${title}, at most ${figure(most, unit)}` });
  const y = 99 - 98 * (limit ?? 0) / top;
  if (limit !== null) svg.append(make("line", { x1: 0, x2: 300, y1: y, y2: y, stroke: "var(--soft)", "stroke-dasharray": "5 4", "vector-effect": "non-scaling-stroke" }));
  for (const { values, colour, isFaint } of series) if (values.length > 1) svg.append(make("path", { d: linePath(values, size),
    fill: "none", stroke: colour, "stroke-width": isFaint ? 1 : 1.8, opacity: isFaint ? .45 : 1, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" }));
  return make("figure", { class: "sheet" }, make("figcaption", {}, title, keys.map(([text, kind]) => make("span", { class: kind }, text))),
    make("div", { class: "plot" }, make("span", { class: "top" }, figure(top, unit)), make("span", { class: "nought" }, figure(0)), svg,
      make("div", { class: "times" }, make("span", {}, `${figure(spanMs, "ms")} ago`), make("span", {}, "now"))));
}
function bar(share, kind) {
  return make("svg", { class: `bar ${kind}`, viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
    make("rect", { width: Math.min(100, 100 * share), height: 4 }));
}
// A figure with two lines below; a picture takes the place of the second.
function tile(label, value, note, { second = "", picture = null, kind = "", title = null } = {}) {
  const line = (text, of = "") => make("small", { class: of, title: text || null }, text || "\u00a0");
  return make("div", {}, make("dt", {}, label), make("dd", { class: "big", title }, value), make("dd", {}, line(note, kind), picture ?? (second === null ? null : line(second))));
}

// -- lists ------------------------------------------------------------------------------------

function grid(heads, rows, { caption }) {
  return make("div", { class: "scroll big-list" }, make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, heads.map(([text, kind]) =>
    make("th", { scope: "col", class: kind ?? null }, text)))), make("tbody", {}, rows)));
}
// On a phone there are no heads: what a figure is stands before or behind it, in lines that `turn` ends.
const cell = (text, kind = null, label = null, title = null) => make("td", { class: kind, "data-label": label, title }, text);
const named = (name, text, kind = null, title = null) => make("td", { class: kind, "data-name": name, title }, text);
const turn = () => make("td", { class: "break narrow" });
const count = (value, label, kind = null) => cell(figure(value), value ? kind : "zero", label, exactly(value));

// A list that is cut after some lines, with a button for the others.
function cut(key, items, one, nothing) {
  if (!items.length) return empty(nothing);
  const isWhole = whichWhole.has(key), shown = isWhole ? items.slice(0, 200) : items.slice(0, LINES_SHOWN);
  const box = make("div", { class: "sheet" }, one(shown));
  if (items.length > LINES_SHOWN) {
    box.append(button(isWhole ? "Show fewer" : `Show ${figure(Math.min(200, items.length) - LINES_SHOWN)} more`, `more ${key}`,
      () => { whichWhole[isWhole ? "delete" : "add"](key); show(); }, { class: "more", "aria-expanded": isWhole }));
    if (items.length > shown.length && isWhole) box.append(make("span", { class: "soft" }, `${figure(items.length - shown.length)} are not shown`));
  }
  return box;
}

// A click puts a text where it can be pasted. Without https a browser has no clipboard for pages: then it is selected and copied.
async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  say("Copied");
}
