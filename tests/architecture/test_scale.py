"""docs/scale.md is what `python -m benchmarks.scale` writes, from figures that RESULTS.md has."""

from __future__ import annotations

import pytest

from benchmarks.scale.costs import DEFAULTS
from benchmarks.scale.figures import MEASURED
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


def test_the_table_of_operations_is_as_computed() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()

    assert with_puts_table(text) == text


@pytest.mark.slow
def test_the_page_is_as_computed() -> None:
    assert scale_page() == (ROOT / "docs" / "scale.md").read_text()
