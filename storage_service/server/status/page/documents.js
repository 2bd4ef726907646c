// The documents of this version, as the service has them: Markdown, drawn as text and a few elements.

const slug = text => text.toLowerCase().replace(/[^\p{L}\p{N} _-]/gu, "").replaceAll(" ", "-");
let shownFile = null;

function inline(text, file) {
  const parts = [], pattern = /`([^`]+)`|\*\*(.+?)\*\*|\*([^*\s](?:[^*]*[^*\s])?)\*|!\[([^\]]*)\]\([^)]*\)|\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)[^)]*\)/g;
  let from = 0;
  for (const match of text.matchAll(pattern)) {
    parts.push(text.slice(from, match.index));
    const [all, code, strong, stressed, picture, label, target] = match;
    if (code !== undefined) parts.push(make("code", {}, code));
    else if (strong !== undefined) parts.push(make("strong", {}, inline(strong, file)));
    else if (stressed !== undefined) parts.push(make("em", {}, inline(stressed, file)));
    else if (picture !== undefined) parts.push(make("em", {}, picture));
    else parts.push(documentTarget(target, inline(label, file), file));
    from = match.index + all.length;
  }
  parts.push(text.slice(from));
  return parts;
}
// Links lead to documents here; what the service does not have stays text.
function documentTarget(target, label, file) {
  const inside = target.match(/^([a-z_A-Z]+)?(?:\.md)?(?:#(.*))?$/);
  if (inside && (inside[1] || inside[2])) return make("a", { href: routeOfDocument(inside[1] ?? file, inside[2] ?? "") }, label);
  if (/^https?:\/\//.test(target)) return make("a", { href: target, rel: "noopener noreferrer" }, label);
  return make("span", { title: target }, label);
}
const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(text => text.trim().replaceAll("\\|", "|"));
const ITEM = /^(\s*)(?:[-*]|(\d+)\.) +(.*)$/;

function markdown(text, file) {
  const lines = text.split("\n"), out = [];
  let at = 0;
  const paragraph = () => {
    const taken = [];
    while (at < lines.length && lines[at].trim() && !/^(#{1,6} |```|\||> |---+$)/.test(lines[at]) && !(taken.length && ITEM.test(lines[at]))) taken.push(lines[at++].trim());
    return taken.join(" ");
  };
  const list = () => {
    const [, indent, number] = lines[at].match(ITEM), made = make(number ? "ol" : "ul", {});
    while (at < lines.length && ITEM.test(lines[at])) {
      const match = lines[at].match(ITEM);
      if (match[1].length < indent.length) break;
      if (match[1].length > indent.length) { (made.lastChild ?? made).append(list()); continue; }
      lines[at] = match[3];
      made.append(make("li", {}, inline(paragraph(), file)));
      while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
    }
    return made;
  };
  while (at < lines.length) {
    const line = lines[at], heading = line.match(/^(#{1,6}) (.*)$/), fence = line.match(/^\s*(```+)/);
    if (!line.trim() || /^---+$/.test(line)) at++;
    else if (heading) { out.push(make(`h${Math.min(4, heading[1].length)}`, { id: `at-${slug(heading[2])}` }, inline(heading[2], file))); at++; }
    else if (fence) {
      const taken = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) taken.push(lines[at]);
      at++;
      out.push(make("pre", { class: "sheet" }, make("code", {}, taken.join("\n"))));
    } else if (line.startsWith("|")) {
      const rows = [];
      for (; at < lines.length && lines[at].startsWith("|"); at++) rows.push(cells(lines[at]));
      const [head, , ...body] = rows, row = (of, tag) => make("tr", {}, of.map(one => make(tag, { class: "left text" }, inline(one, file))));
      out.push(make("div", { class: "scroll sheet" }, make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, body.map(one => row(one, "td"))))));
    } else if (line.startsWith("> ")) { lines[at] = line.slice(2); out.push(make("blockquote", {}, inline(paragraph(), file))); }
    else if (ITEM.test(line)) out.push(list());
    else { const text = paragraph(); if (text) out.push(make("p", {}, inline(text, file))); else at++; }
  }
  return out;
}
async function showDocument() {
  const { file, at } = route, box = byId("document");
  document.title = `${file} – Streamhouse`;
  if (shownFile !== file) {
    box.replaceChildren(empty("Reading"));
    try {
      if (!/^[A-Za-z_]+$/.test(file)) throw new Error("There is no document of this name.");
      const text = await ask(`docs/${file}.md`, { accept: "text/markdown" });
      if (route.file !== file) return;
      const crumbs = make("p", { class: "crumbs" }, make("a", { href: routeOfList(lastList) }, "← State of the service"), " · ", make("a", { href: routeOfDocument("README") }, "All documents"));
      box.replaceChildren(crumbs, ...markdown(text, file));
      shownFile = file;
    } catch (error) {
      box.replaceChildren(make("p", { class: "error bad" }, error.status in { 401: 1, 403: 1, 404: 1 } ? "There is no document of this name." : error.message));
      return;
    }
  }
  for (const element of box.querySelectorAll(".marked")) element.classList.remove("marked");
  const heading = at ? document.getElementById(`at-${at}`) : null;
  heading?.classList.add("marked");
  if (heading) heading.scrollIntoView({ block: "start" }); else scrollTo(0, 0);
}
