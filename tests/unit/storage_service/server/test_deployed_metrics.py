"""What deploy/ asks Prometheus for is in /metrics, each alert is tried and has its runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from streamhouse.storage_service.ownership.journal._writer import JournalWriter
from streamhouse.storage_service.ownership.roles.role import Role, Standing
from streamhouse.storage_service.server._gauges import read_state
from tests.support.in_process_service import in_process_service
from tests.support.journal_world import taken
from tests.support.memory_store import MemoryStore

ROOT: Final = Path(__file__).resolve().parents[4]
RULES: Final = ROOT / "deploy" / "prometheus" / "rules.yml"
TRIED: Final = ROOT / "deploy" / "prometheus" / "rules_test.yml"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "streamhouse.json"
RUNBOOK: Final = ROOT / "docs" / "runbook.md"

_NAME: Final = re.compile(r"\b(?:streamhouse|process)_\w+")
_EXPRESSION: Final = re.compile(r"^ +expr: (?:>-\n)?((?:.|\n)*?)\n +(?:for|labels):", re.MULTILINE)
_ALERT: Final = re.compile(r"^ +- alert: (\w+)$", re.MULTILINE)
_CHOICE: Final = re.compile(r'\b(limit|role)=~?"([^"$]*)"')


def _alerts() -> list[str]:
    return _ALERT.findall(RULES.read_text())


def _expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    chosen = [variable["query"] for variable in dashboard["templating"]["list"]]
    queries = [query["query"] for query in chosen if isinstance(query, dict)]
    return [*_EXPRESSION.findall(RULES.read_text()), *asked, *queries]


async def _live(tmp_path: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Return the series of a service with a journal, and what some of their labels may be."""
    standing, store = Standing("0"), MemoryStore()
    standing.journal.writer = JournalWriter(store, taken(store), on_fenced=print)
    try:
        async with in_process_service(tmp_path) as service:
            inner = service.service

            async def read() -> list[Metric]:
                return [*await read_state(inner), *standing.metrics()]

            inner.metrics.watch(read)
            text = (await service.call("GET", "/metrics")).body.decode()
    finally:
        standing.journal.writer.abandon()
    names: set[str] = set()
    limits: set[str] = set()
    for family in text_string_to_metric_families(text):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + end for end in ends.get(family.type, ("",))}
        if family.name == "streamhouse_limit":
            limits = {sample.labels["limit"] for sample in family.samples}
    return names, {"limit": limits, "role": set(Role)}


async def test_what_alerts_and_dashboard_ask_for_is_there(tmp_path: Path) -> None:
    names, values = await _live(tmp_path)
    expressions = _expressions()

    asked = {name for expression in expressions for name in _NAME.findall(expression)}
    chosen = {choice for expression in expressions for choice in _CHOICE.findall(expression)}

    assert len(_EXPRESSION.findall(RULES.read_text())) == len(_alerts())
    assert len(asked) > 40
    assert asked <= names
    for label, wanted in chosen:
        assert set(wanted.split("|")) <= values[label], label


async def test_no_series_says_when_it_was_made(tmp_path: Path) -> None:
    names, _ = await _live(tmp_path)

    assert {"process_cpu_seconds_total", "streamhouse_build_info"} <= names
    assert not [name for name in names if name.endswith("_created")]


def test_each_alert_leads_to_its_section_of_the_runbook() -> None:
    alerts = _alerts()

    urls = re.findall(r"^ +runbook_url: (.*)$", RULES.read_text(), re.MULTILINE)
    sections = re.split(r"^### ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]

    assert urls == [f"docs/runbook.md#{alert.lower()}" for alert in alerts]
    assert sorted(section.split("\n")[0] for section in sections) == sorted(alerts)
    for section in sections:
        assert re.findall(r"^- \*\*(.*?):\*\*", section, re.MULTILINE) == [
            "Means",
            "Look at",
            "Do",
            "Do not",
        ]


def test_each_alert_is_tried() -> None:
    tried = re.findall(r'alertname="(\w+)"', TRIED.read_text())

    assert sorted(tried) == sorted(_alerts())
    assert "exp_samples: []" in TRIED.read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
@pytest.mark.parametrize(
    "arguments", [("check", "rules", RULES.name), ("test", "rules", TRIED.name)], ids=" ".join
)
def test_prometheus_takes_the_rules(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_understands_the_dashboard(tmp_path: Path) -> None:
    """Its expressions are checked as the rules of a file that records them."""
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(_expressions())
        if "label_values" not in expression
    ]
    file = tmp_path / "dashboard.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))

    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
