"""The contenders for a journal, short. `make contenders` runs them for an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.journal_kill import contend

pytestmark = pytest.mark.slow


def test_what_contenders_acknowledged_survives_kills_and_pauses(tmp_path: Path) -> None:
    report = contend(tmp_path, seed=20, seconds=6)

    assert report.epochs > 1
    assert report.records > 0
    assert report.reads > 0
