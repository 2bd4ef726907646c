"""The pages on scale and capacity are what `python -m benchmarks.scale` writes.

Their figures are those that RESULTS.md has.
"""

from __future__ import annotations

import pytest

from benchmarks.scale.capacity import append_ms, capacity_page, need_of, upsert_ms
from benchmarks.scale.costs import DEFAULTS
from benchmarks.scale.figures import APPEND_CALL_MS, MEASURED, UPSERT_10_CALL_MS
from benchmarks.scale.page import scale_page, with_puts_table
from benchmarks.scale.takeovers import PRODUCT
from streamhouse.storage_service.config import ServiceConfig
from tests.architecture.source_files import ROOT

# A shared machine moves figures; what moves by more is to be looked at.
_FACTOR = 2.0


@pytest.mark.parametrize("name", MEASURED)
def test_its_figures_are_those_of_the_results(name: str) -> None:
    figure = MEASURED[name]

    assert 1 / _FACTOR <= figure.found() / figure.value <= _FACTOR


def test_it_assumes_the_defaults_of_the_service() -> None:
    limits = {limit.name: limit.default for limit in ServiceConfig.limits()}

    assert DEFAULTS.linger_ms == limits["journal_linger_ms"]
    assert DEFAULTS.lease_ms == PRODUCT.lease_ms == limits["lease_ms"]


def test_the_table_of_puts_is_as_computed() -> None:
    text = (ROOT / "docs" / "journal.md").read_text()

    assert with_puts_table(text) == text


def test_the_page_of_capacity_is_as_computed() -> None:
    assert capacity_page() == (ROOT / "docs" / "capacity.md").read_text()


def test_more_rows_need_more_and_larger_calls_less() -> None:
    few, many = need_of(10_000, 100), need_of(1_000_000, 100)
    assert many.append_cores == pytest.approx(100 * few.append_cores)
    assert (few.shards, many.shards) == (1, 2)
    assert need_of(1_000_000, 10_000).upsert_cores < many.upsert_cores / 4
    # A line between two measured sizes goes through both.
    assert upsert_ms(10) == UPSERT_10_CALL_MS.value
    assert append_ms(2_001) == pytest.approx(APPEND_CALL_MS.value, rel=0.01)


@pytest.mark.long
def test_the_page_is_as_computed() -> None:
    assert scale_page() == (ROOT / "docs" / "scale.md").read_text()
