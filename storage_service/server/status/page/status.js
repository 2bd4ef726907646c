// Where the reader is, and what is asked for when.
const KEY = "streamhouse-token";

let route = parseRoute(location.hash), seen = null, token = sessionStorage.getItem(KEY);
let rowsShown = ROWS_SHOWN, whichWhole = new Set(), asking = null, timer = null, listTop = 0, said = "";
let lastList = { table: null, search: "", only: "", sort: "state", isDown: false };

function say(text) {
  if (text !== said) byId("said").textContent = said = text;
}
function show() {
  byId("document").hidden = !route.file;
  if (route.file) {
    byId("login").hidden = byId("list").hidden = byId("one").hidden = true;
    return showDocument();
  }
  if (!seen) return;
  // What has the focus is made anew: it is found by its key.
  const focused = document.activeElement?.dataset?.key;
  byId("list").hidden = route.table !== null;
  byId("one").hidden = route.table === null;
  byId("facts").title = byId("facts").textContent = facts(seen);
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
  // A document has nothing of the service's state, and needs no token.
  if (route.file) return stamp("", false), show();
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
  if (before.table === null && !before.file) { lastList = before; listTop = scrollY; }
  route = parseRoute(location.hash);
  document.getSelection()?.removeAllRanges();
  if (route.table === before.table && route.file === before.file) return show();
  closeDetail();
  if (route.table !== null) { byId("one-head").replaceChildren(); byId("one").hidden = byId("one-body").hidden = true; byId("list").hidden = true; }
  if (route.file) return refresh();
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
byId("rows-again").addEventListener("click", () => { closeDetail(); show(); });
// With a token the metrics cannot be opened by a link alone.
byId("metrics").addEventListener("click", async event => {
  if (token === null) return;
  event.preventDefault();
  const opened = open("about:blank");
  try {
    opened.location = URL.createObjectURL(new Blob([await ask("metrics", { accept: "text/plain", most: 64 << 20 })], { type: "text/plain" }));
  } catch (error) {
    opened.close();
    stamp(`no metrics: ${error.message}`, true);
  }
});
byId("login").addEventListener("submit", event => {
  event.preventDefault();
  token = byId("token").value;
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  refresh();
});
refresh();
