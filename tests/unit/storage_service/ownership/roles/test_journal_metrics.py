"""What /metrics says of an owner's journal, and what docs/journal.md says that it says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from streamhouse.storage_service.ownership.journal._writer import JournalWriter
from streamhouse.storage_service.ownership.journal.operations import Append
from streamhouse.storage_service.ownership.roles.role import Standing
from tests.support.journal_world import taken
from tests.support.memory_store import MemoryStore

_TEXT = (Path(__file__).resolve().parents[5] / "docs" / "journal.md").read_text()


class _Owned(Collector):
    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def collect(self) -> Iterable[Metric]:
        return self._standing.metrics()


def _read(standing: Standing) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(_Owned(standing))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }


def _owner() -> tuple[Standing, JournalWriter]:
    standing, store = Standing("0"), MemoryStore()
    writer = JournalWriter(store, taken(store), on_fenced=print, put_took=standing.journal.put_took)
    standing.journal.writer = writer
    standing.journal.lease_left_ms = lambda: 2_500.0
    standing.journal.checkpoint_age_s = lambda: 12.0
    return standing, writer


def test_what_was_stored_is_counted_and_nothing_is_behind() -> None:
    standing, writer = _owner()
    path = "tables/1/bucket-0/00000000000000000000.log"

    writer.wait_stored(writer.record(Append(path, 0, bytes(1_000))))
    writer.wait_stored(writer.record(Append(path, 1_000, bytes(1_000))))

    found = _read(standing)
    writer.abandon()
    assert found["streamhouse_journal_objects_total"] == 2
    assert found["streamhouse_journal_put_seconds_count"] == 2
    assert found["streamhouse_journal_bytes_total"] > 2_000
    assert found["streamhouse_journal_epoch"] == 1
    assert found["streamhouse_journal_lag_seconds"] == 0
    assert found["streamhouse_lease_left_seconds"] == 2.5
    assert found["streamhouse_checkpoint_age_seconds"] == 12


def test_who_owns_nothing_reports_no_journal() -> None:
    assert not [name for name in _read(Standing("0")) if "journal" in name or "lease" in name]


def test_every_metric_of_a_process_with_a_journal_is_documented() -> None:
    standing, writer = _owner()
    section = _TEXT.partition("## Metrics")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(streamhouse_\w+)` \| ", section, re.MULTILINE))

    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in standing.metrics()
    }

    writer.abandon()
    assert documented == names
