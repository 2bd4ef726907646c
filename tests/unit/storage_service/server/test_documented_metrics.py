"""docs/watching.md says which metrics there are, and which of them belongs to each limit."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from streamhouse.storage_service.config import ServiceConfig
from tests.support.in_process_service import InProcessService, in_process_service

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")


async def _families(service: InProcessService) -> dict[str, tuple[str, str]]:
    text = (await service.call("GET", "/metrics")).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = (family.type, family.documentation)
    return found


async def _metrics(tmp_path: Path) -> dict[str, tuple[str, str]]:
    async with in_process_service(tmp_path) as service:
        return await _families(service)


async def test_every_metric_is_documented_as_it_is(tmp_path: Path) -> None:
    documented = re.findall(r"^\| `((?:streamhouse|process)_\w+)` \| (\w+) \| (.*) \|$", TEXT, re.M)

    assert {name: (kind, text) for name, kind, text in documented} == await _metrics(tmp_path)


async def test_every_setting_has_its_metric_or_none_on_purpose(tmp_path: Path) -> None:
    section = TEXT[TEXT.index("## Limits and their metrics") :]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))

    assert list(rows) == [limit.name for limit in ServiceConfig.limits()]
    named = {name for text in rows.values() for name in re.findall(r"`(\w+)`", text)}
    assert named <= set(await _metrics(tmp_path))
    assert all("`" in text or text.startswith("none: ") for text in rows.values())


async def test_a_limit_that_refuses_is_counted_by_its_name(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, tables_max=1, control_body_bytes_max=300) as service:
        await service.call("POST", "/v1/databases", body=b" " * 301)
        await service.call("GET", "/v1/tables/x (tables_max)")

        text = (await service.call("GET", "/metrics")).body.decode()

    limits = 'streamhouse_limits_reached_total{limit="control_body_bytes_max"} 1.0'
    assert limits in text
    # What a request quotes is no limit that was reached.
    assert 'streamhouse_limits_reached_total{limit="tables_max"}' not in text
    assert 'streamhouse_limit{limit="tables_max"} 1.0' in text
