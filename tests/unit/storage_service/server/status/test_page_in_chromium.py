"""The status page in a browser: three widths, light and dark, hostile names, keyboard, token.

Pictures are written to `artifacts/status_page/`, to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.chromium import CHROMIUM, Page, chromium
from tests.unit.storage_service.server.status.status_world import (
    PageServer,
    newest_rows,
    page_server,
    status_of,
    table_info,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]

PICTURES = Path(__file__).resolve().parents[5] / "artifacts" / "status_page"
LISTED = "document.querySelectorAll('#tables tbody tr').length"
ATTACK = "<img src=x onerror='window.hacked=1'>\"'><script>window.hacked=1</script>"

# Of every text that is seen: the ratio of its colour to what is behind it.
LOW_CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(n => n / 255)
    .map(n => n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = element => { for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour; } return "rgb(255, 255, 255)"; };
  const low = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) { const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.checkVisibility()
      || element.closest("script, style, .skip, .hidden")) continue;
    const a = light(getComputedStyle(element).color), b = light(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${walk.currentNode.data.trim()}: ${ratio.toFixed(2)}`); }
  return [...new Set(low)]; })()"""


OVERFLOWING = """[...document.querySelectorAll('.sheet, .scroll:not(.rows), header, main')]
  .filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)
  .map(e => `${e.className || e.tagName}: ${e.innerText.slice(0, 60)}`)"""
# How many heights the cards of the strip have, and the charts.
HEIGHTS = """['.strip > div', '.plot svg'].map(cards => new Set(
  [...document.querySelectorAll(cards)].filter(e => e.checkVisibility())
  .map(e => Math.round(e.getBoundingClientRect().height))).size || 1)"""


@dataclass(frozen=True)
class World:
    """One browser for all tests, and a server for each."""

    page: Page
    server: PageServer

    def open(self, fragment: str = "", *, ready: str = f"{LISTED} > 0") -> None:
        self.page.messages.clear()
        self.page.open("about:blank")
        self.page.wait_for("location.href === 'about:blank'")
        self.page.open(self.server.url + fragment)
        self.page.wait_for("document.readyState === 'complete' && document.title !== ''")
        self.page.wait_for(ready)

    def texts(self, selector: str) -> list[str]:
        script = f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)"
        found: list[str] = self.page.run(script)
        return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def world(browser: Page) -> Iterator[World]:
    browser.look(width=1600)
    with page_server() as server:
        server.status = status_of(1_000)
        yield World(browser, server)


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_a_thousand_tables_fit_and_can_be_read(world: World, width: int, is_dark: bool) -> None:
    world.page.look(width=width, height=844 if width < 600 else 1000, is_dark=is_dark)
    colours = "dark" if is_dark else "light"
    for what, fragment, ready in (
        ("list", "", f"{LISTED} > 0"),
        ("table", "#/billing/alerts_189", "document.querySelector('#one h1') !== null"),
    ):
        world.open(fragment, ready=ready)
        world.page.picture(PICTURES / f"{what}_{width}_{colours}.png", is_whole=True)

        assert world.page.messages == []
        assert world.page.run("document.documentElement.scrollWidth") == width
        assert world.page.run(LOW_CONTRAST) == []
        # Rows and statements may be wider than a page; lists and cards are not.
        assert world.page.run(OVERFLOWING) == []
        if width >= 1024:
            assert world.page.run(HEIGHTS) == [1, 1]


def test_on_a_phone_every_figure_says_what_it_is(world: World) -> None:
    world.page.look(width=390, height=844)
    world.open("#/billing/alerts_189", ready="document.querySelector('#one h1') !== null")
    shown = """[...document.querySelectorAll('[aria-label="Buckets"] tbody tr:first-child td')]
      .filter(td => !td.classList.contains('break')).map(td => ['::before', '::after']
        .map(part => getComputedStyle(td, part).content.replace(/\\W+/g, ' ').trim())
        .filter(text => text !== 'none').join())"""

    assert world.page.run(shown) == ["bucket", "log", "to", "lake", "lag"]

    world.open()
    below = """[...document.querySelectorAll('#readers tbody tr')].map(
      ({children: [, table, , unread]}) =>
      unread.getBoundingClientRect().top >= table.getBoundingClientRect().bottom - 2)"""
    assert world.page.run(below) == [True] * 5


@pytest.mark.parametrize("count", [0, 1, 100])
def test_few_tables_and_none_are_shown(world: World, count: int) -> None:
    world.server.status = status_of(count, consumer_count=0, is_troubled=False)
    world.server.status["workers"] = world.server.status["idle_workers"] = []
    world.server.status["service"]["disk_bytes_max"] = None

    world.open(ready="document.querySelectorAll('#tables > *').length > 0")
    world.page.picture(PICTURES / f"list_of_{count}.png")

    assert world.page.messages == []
    assert world.page.run(LISTED) == count
    assert world.texts("#attention .word") == ["Nothing is late or failing."]
    assert "No worker was heard of" in world.texts("#workers")[0]
    assert "No reader has reported" in world.texts("#readers")[0]
    if not count:
        assert "No table yet" in world.texts("#tables")[0]


def test_what_is_late_or_failing_is_first_and_long_lists_are_cut(world: World) -> None:
    world.open()

    states = world.texts("#tables td.state")
    assert len(states) == 100
    assert states[:10] == ["damaged", "failing", *["late"] * 6, "debt", "debt"]
    # With the readers that are behind by more than ten minutes.
    assert world.texts("#attention-heading") == ["Needs attention: 19"]
    assert len(world.texts("#readers tbody tr")) == len(world.texts("#workers tbody tr")) == 5
    assert world.texts("#readers-heading") == ["Readers: the 50 most late of 1\u202f000"]

    world.page.run("document.querySelector('[data-key=\"more tables\"]').click()")
    assert world.page.run(LISTED) == 200
    world.page.run("document.querySelector('[data-key=\"more readers\"]').click()")
    assert len(world.texts("#readers tbody tr")) == 50
    assert world.page.run("document.querySelectorAll('*').length") < 10_000


def test_search_and_order_are_in_the_address(world: World) -> None:
    world.open()
    world.page.run(
        "{ const s = document.getElementById('search'); s.value = 'sales ORDERS';"
        " s.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    found = world.page.run(LISTED)
    assert 0 < found < 100
    world.page.run("document.querySelector('[data-key=\"sort row_count\"]').click()")

    assert world.page.run("location.hash") == "#/?q=sales+ORDERS&sort=row_count&dir=down"
    sorted_heads = (
        "[...document.querySelectorAll('[aria-sort]')].map(e => [e.textContent, e.ariaSort])"
    )
    assert world.page.run(sorted_heads) == [["Rows", "descending"]]
    names = world.texts("#tables td.name a")

    world.open("#/?q=sales+ORDERS&sort=row_count&dir=down")
    assert world.texts("#tables td.name a") == names
    assert world.page.run("document.getElementById('search').value") == "sales ORDERS"


def test_a_table_has_an_address_and_back_returns_to_the_list(world: World) -> None:
    world.open("#/?q=alerts_189")
    world.page.run("document.querySelector('#tables td.name a').click()")
    world.page.wait_for("document.querySelector('#one h1')?.textContent === 'billing.alerts_189'")

    assert world.page.run("location.hash") == "#/billing/alerts_189"
    assert world.page.run("document.title") == "billing.alerts_189 \u2013 Streamhouse"
    assert world.page.run("document.getElementById('list').hidden")
    assert len(world.texts("#one figure")) == 2
    assert "/v1/status?table=billing.alerts_189" in world.server.asked

    world.page.run("history.back()")
    world.page.wait_for(f"!document.getElementById('list').hidden && {LISTED} === 1")
    world.open("#/billing/nothing", ready="document.querySelector('#one h1') !== null")
    assert "There is no table of this name" in world.texts("#one .empty")[0]
    world.open("#/ops/audit_trail", ready="document.querySelector('#one h1') !== null")
    assert "Not served: Checksum mismatch" in world.texts("#one .error")[0]


TABLE = "#/billing/alerts_189"
ROWS_SHOWN = "document.querySelectorAll('#one-rows tbody tr').length"
SNAPSHOTS_SHOWN = "document.querySelectorAll('#one-snapshots tbody tr').length"


def test_a_tables_page_has_its_definition_newest_rows_and_place(world: World) -> None:
    world.open(TABLE, ready=f"{ROWS_SHOWN} > 0 && {SNAPSHOTS_SHOWN} > 0")
    world.page.wait_for("document.querySelector('#one-rejected a') !== null")

    columns = world.texts("#one-columns tr:nth-child(1) td, #one-columns tr:nth-child(3) td")
    assert columns[0:5] == ["id", "", "bigint", "not null", "given by the shop"]
    assert columns[5:] == ["itembucket key", "", "string", "nullable", ""]
    assert "array<string>" in world.texts("#one-columns code")
    definition = world.texts("#one-definition dd")
    assert definition[:3] == ["2 by item", "day(placed)", "17, schema version 2"]
    assert "table.log.ttl = 7d" in world.texts("#one-definition li")
    assert world.texts("#one-place dd")[0] == "s3://lake/warehouse/billing/alerts_189"
    assert len(world.texts("#one-snapshots tbody tr")) == 5
    results = ["in the lake"] * 2 + ["failed"] + ["in the lake"] * 2
    assert world.texts("#one-rounds .word") == results
    assert world.texts("#one-constraints td.name") == ["positive"]
    assert world.texts("#one-rejected") == [
        "1.23\u202fk rows did not fit, and are kept in billing.alerts_189$rejected."
    ]
    assert world.page.run(ROWS_SHOWN) == 20
    # The last row of the log first, with exact numbers; values are told from each other.
    values = world.texts("#one-rows tbody tr:nth-child(1) td")
    assert values[1:4] == ["1", "111", "9007199254741016"]
    assert {"NULL", '""', "two\\nlines", '["new", "sale"]', "[]"} <= set(
        world.texts("#one-rows td.value")
    )
    assert "64\u202fB · 0x89504e470d0a1a0a…" in world.texts("#one-rows td.value")


def test_rows_are_read_once_and_again_by_a_click(world: World) -> None:
    world.open(TABLE, ready=f"{ROWS_SHOWN} > 0")

    def fetches() -> int:
        return sum("/fetch" in target for target in world.server.asked)

    assert fetches() == 2
    for _ in range(3):
        world.page.run("refresh()")
    assert fetches() == 2
    assert all("end_offset=112" in t for t in world.server.asked if "/fetch" in t)
    world.page.run("document.getElementById('rows-again').click()")
    world.page.wait_for(f"{ROWS_SHOWN} > 0")
    assert fetches() == 4


def test_who_may_not_read_a_table_sees_a_sentence(world: World) -> None:
    world.server.may_read_rows = False
    sentence = "This token may not see the rows: it needs a grant to read billing.alerts_189."
    world.open(TABLE, ready=f"document.getElementById('one-rows').textContent === {sentence!r}")

    assert world.page.run(ROWS_SHOWN) == 0
    assert "may not see the columns" in world.texts("#one-columns")[0]
    assert "may not see the place" in world.texts("#one-place")[0]
    # The state of the service is still shown.
    assert len(world.texts("#one figure")) == 2


def test_of_a_wide_table_some_columns_are_read(world: World) -> None:
    columns = [
        {"id": n, "name": f"c,{n}", "type": "int", "nullable": True} for n in range(1, 2_001)
    ]
    world.server.info = lambda table: table_info(table) | {"schema": columns}
    world.open(TABLE, ready=f"{ROWS_SHOWN} > 0")

    (fetched, _) = [target for target in world.server.asked if "/fetch" in target]
    assert len(json.loads(parse_qs(urlsplit(fetched).query)["columns"][0])) == 50
    assert len(world.texts("#one-rows th")) == 3 + 50
    assert world.texts("#one-rows .note") == ["The first 50 of 2\u202f000 columns."]
    assert len(world.texts("#one-columns tbody tr")) == 2_000


def test_a_table_of_another_shard_leads_to_the_shard(world: World) -> None:
    world.server.owner = "http://10.0.0.7:8765"
    world.open(TABLE, ready="document.querySelector('#one-rows a') !== null")

    target = "document.querySelector('#one-rows a').href"
    assert world.page.run(target) == "http://10.0.0.7:8765/#/billing/alerts_189"
    assert world.texts("#one-rows") == [
        "Another shard serves this table: http://10.0.0.7:8765 has the rows."
    ]


def test_rows_that_are_too_large_are_not_read_to_their_end(world: World) -> None:
    def large(bucket: int) -> dict[str, Any]:
        page = newest_rows(bucket)
        page["rows"][0]["item"] = "x" * (1 << 20 if bucket else 1)
        return page

    world.server.rows = large
    world.open(TABLE, ready=f"{ROWS_SHOWN} > 0")

    assert world.page.run(ROWS_SHOWN) == 12
    assert world.texts("#one-rows .note") == [
        "Rows of bucket 1 are larger than 256\u202fKiB together, and are not shown."
    ]


def test_the_lines_to_read_a_table_are_copied_by_a_click(world: World) -> None:
    world.open(TABLE, ready=f"{ROWS_SHOWN} > 0")
    world.page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    for label in ("Spark", "Python", "DuckDB", "curl"):
        world.page.run(f"document.querySelector('[data-key=\"tab {label}\"]').click()")
        world.page.run("document.querySelector('[data-key=copy]').click()")
        lines = world.page.run("window.copied")
        assert lines == world.texts("#one-reading pre")[0]
        assert world.server.url.rstrip("/") in lines
        assert "alerts_189" in lines


def test_a_damaged_table_says_what_holds_and_what_to_do(world: World) -> None:
    world.open("#/ops/audit_trail", ready="document.querySelector('#one h1') !== null")
    world.page.picture(PICTURES / "damaged.png")

    assert world.texts("#one .error")[0].startswith("Not served: Checksum mismatch at 48 811 008")
    assert world.texts("#one h2")[:2] == ["What holds", "What to do, the best remedy first"]
    assert "for 1 h 5 min" in world.texts("#one .title")[0].replace("\u202f", " ")
    # Nothing is asked of a table that is not served.
    assert not any("audit_trail/" in target for target in world.server.asked)
    world.page.run("[...document.querySelectorAll('#one-head a')].at(-1).click()")
    world.page.wait_for("document.querySelector('#document .marked') !== null")
    assert world.texts("#document .marked") == ["StreamhouseTableDamaged"]


def test_documents_are_shown_without_a_token(world: World) -> None:
    world.server.token = "secret"
    world.open("#/~docs/README", ready="document.querySelector('#document h1') !== null")
    world.page.picture(PICTURES / "document.png")

    assert world.page.run("document.getElementById('login').hidden")
    watching = "[...document.querySelectorAll('#document a')].find(a => /Watching/.test(a.text))"
    world.page.run(f"{watching}.click()")
    heading = "document.querySelector('#document h1')?.textContent"
    world.page.wait_for(f"{heading} === 'Watching a service'")
    world.open("#/~docs/nothing", ready="document.querySelector('#document .error') !== null")
    assert world.texts("#document") == ["There is no document of this name."]
    assert all(target == "/" or target.startswith("/docs/") for target in world.server.asked)


def test_each_trouble_has_a_cause_a_time_and_a_remedy(world: World) -> None:
    world.open()
    world.page.run("document.querySelector('[data-key=\"more attention\"]').click()")

    assert world.texts("#attention .text")[0].startswith("Checksum mismatch at 48 811 008 bucket 2")
    assert world.texts("#attention .remedy") == ["What to do"] * 19
    words, since = world.texts("#attention .word"), world.texts("#attention .since")
    without_time = {word for word, text in zip(words, since, strict=True) if not text}
    assert without_time == {"disk", "rows at risk"}
    assert {"slow reader", "silent reader", "rows at risk"} <= set(words)


def test_an_embedded_worker_that_starts_is_no_missing_worker(world: World) -> None:
    assert world.server.status is not None
    starting = {"worker_id": "embedded", "reason": "starting"}
    world.server.status |= {"workers": [], "idle_workers": [starting]}
    world.open()

    assert "it loads the lake's library" in world.texts("#workers")[0]
    assert "no worker" not in world.texts("#attention .word")


def _attacked_info(table: str) -> dict[str, Any]:
    nested = {"type": "struct", "fields": [{"name": ATTACK, "type": "string"}]}
    columns = [
        {"id": 9, "name": ATTACK, "type": "string", "nullable": True, "comment": ATTACK},
        {"id": 10, "name": "nested", "type": nested, "nullable": True},
    ]
    changes = {"schema": columns, "properties": {ATTACK: ATTACK}, "partitioned_by": [ATTACK]}
    return table_info(table) | changes


def _attacked_rows(bucket: int) -> dict[str, Any]:
    rows = [{ATTACK: ATTACK, "nested": {ATTACK: ATTACK}} for _ in range(12)]
    return newest_rows(bucket) | {"rows": rows}


def _attacked() -> dict[str, Any]:
    status = status_of(30, consumer_count=5)
    status["tables"][0] |= {"table": f"db.{ATTACK}", "unusable": [ATTACK]}
    status["tables"][1]["tiering"] = {"failures": 1, "last_error": ATTACK, "diverged": ""}
    status["tables"][2]["tiering"] = {"diverged": ATTACK}
    status["damaged_tables"][0] |= {"reason": ATTACK, "table": ATTACK}
    status["strangers"] = [ATTACK]
    status["service"] |= {"version": ATTACK, "errors": {ATTACK: 3}}
    for worker in status["workers"]:
        worker |= {"worker_id": ATTACK, "progress": {"step": ATTACK}}
    status["idle_workers"] = [{"worker_id": ATTACK, "reason": ATTACK}]
    for consumer in status["consumers"]["worst"]:
        consumer["name"] = ATTACK
    status["shards"] = [
        {"shard": f"{number}{ATTACK}", "answers": not number, "table_count": 3, "epoch": 1}
        | {"service": None if number else status["service"]}
        for number in range(2)
    ]
    return status


def test_names_values_and_errors_of_others_are_text(world: World) -> None:
    world.server.status = _attacked()
    world.server.info, world.server.rows = _attacked_info, _attacked_rows
    for fragment, ready in (
        ("", f"{LISTED} > 0"),
        ("#/db/%3Cimg%20src=x%20onerror='window.hacked=1'%3E", "document.querySelector('#one h1')"),
        ("#/" + world.server.status["tables"][1]["table"], "document.querySelector('#one h1')"),
    ):
        world.open(fragment, ready=f"Boolean({ready})")
        assert world.page.run("window.hacked === undefined")
        assert world.page.run("document.querySelectorAll('img').length") == 0
        assert world.page.run("document.querySelectorAll('script').length") == 1
        assert world.page.messages == []
    assert ATTACK in world.texts("#one .error")[0]
    world.page.wait_for(f"{ROWS_SHOWN} > 0")
    assert world.page.run("window.hacked === undefined")
    assert world.page.run("document.querySelectorAll('img, #one script').length") == 0
    assert ATTACK[:60] in world.texts("#one-rows td.value")[0]
    assert ATTACK in world.texts("#one-rows th")
    assert world.texts("#one-definition li") == [f"{ATTACK} = {ATTACK}"]
    world.open()
    world.page.picture(PICTURES / "attacked.png", is_whole=True)
    assert ATTACK in world.texts("#workers td.name")
    assert ATTACK in world.texts("#readers td.name")
    assert world.page.run("document.documentElement.scrollWidth") == 1600


def test_a_token_is_asked_for_and_kept_for_the_tab(world: World) -> None:
    world.server.token = "secret"
    send = (
        "{ document.getElementById('token').value = '%s';"
        " document.querySelector('#login button').click(); }"
    )
    world.open(ready="!document.getElementById('login').hidden")
    world.page.picture(PICTURES / "token.png")
    assert world.page.run("document.getElementById('list').hidden")

    world.page.run(send % "wrong")
    world.page.wait_for("document.getElementById('refused').textContent !== ''")
    assert world.texts("#refused") == ["This token is wrong."]
    world.page.run(send % "secret")
    world.page.wait_for(f"{LISTED} > 0")

    assert world.page.run("document.getElementById('login').hidden")
    assert world.page.run("sessionStorage.getItem('streamhouse-token')") == "secret"
    assert all("secret" not in target for target in world.server.asked)
    world.page.run("sessionStorage.clear()")


def test_a_service_that_does_not_answer_is_said_and_what_was_known_stays(world: World) -> None:
    world.open()
    world.server.refuses = True
    world.page.run("refresh()")
    world.page.wait_for("document.getElementById('moment').className === 'stale'")
    world.page.picture(PICTURES / "no_answer.png")

    assert world.texts("#moment") == ["no answer from the service: the service is stopping"]
    assert world.texts("#said") == ["No answer from the service"]
    assert world.page.run(LISTED) == 100
    world.server.refuses = False
    world.page.run("refresh()")
    world.page.wait_for("document.getElementById('moment').className === ''")


def test_the_keyboard_reaches_what_a_mouse_does(world: World) -> None:
    world.open()
    focused = "document.activeElement.textContent"

    world.page.press("Tab")
    assert world.page.run(focused) == "Skip to the tables"
    world.page.press("Enter")
    assert world.page.run("document.activeElement.id") == "search"
    world.page.run("document.querySelector('[data-key=\"sort log_bytes\"]').focus()")
    world.page.press("Enter")
    assert world.page.run(focused) == "Log"
    world.page.run("show()")
    assert world.page.run(focused) == "Log"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert world.page.run(outline) == "solid"
    world.page.run("document.querySelector('#tables td.name a').focus()")
    world.page.press("Enter")
    world.page.wait_for("document.querySelector('#one h1') !== null")
    world.page.wait_for("document.activeElement.id === 'content'")
    assert world.page.run("getComputedStyle(document.activeElement).transitionDuration") == "0s"


def test_the_page_asks_this_service_alone(world: World) -> None:
    world.open()

    assert set(world.server.asked) <= {"/", "/v1/status?detail=brief"}
    loaded = world.page.run("performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert all(name.startswith(world.server.url) or name == "data:," for name in loaded)
