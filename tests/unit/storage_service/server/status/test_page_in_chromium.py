"""The status page in a browser: three widths, light and dark, hostile names, keyboard, token.

Pictures are written to `artifacts/status_page/`, to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import CHROMIUM, Page, chromium
from tests.unit.storage_service.server.status.status_world import PageServer, page_server, status_of

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
@pytest.mark.parametrize("width", [390, 1024, 1600])
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
    assert world.texts("#attention-heading") == ["Needs attention: 13"]
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
    assert world.server.asked[-1] == "/v1/status?table=billing.alerts_189"

    world.page.run("history.back()")
    world.page.wait_for(f"!document.getElementById('list').hidden && {LISTED} === 1")
    world.open("#/billing/nothing", ready="document.querySelector('#one h1') !== null")
    assert "There is no table of this name" in world.texts("#one .empty")[0]
    world.open("#/ops/audit_trail", ready="document.querySelector('#one h1') !== null")
    assert "Not served: bucket 2" in world.texts("#one .error")[0]


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


def test_names_and_errors_of_others_are_text(world: World) -> None:
    world.server.status = _attacked()
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
