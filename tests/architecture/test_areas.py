"""Tests are found: by area, and their helpers on one page; nothing is named that has gone."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from tests.architecture.source_files import ROOT
from tests.support.areas import AREAS, is_of

_PATHS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("tests", "integration")
    for path in (ROOT / folder).rglob("test_*.py")
    if "architecture" not in path.parts
]


@pytest.mark.parametrize("area", sorted(AREAS))
def test_every_pattern_of_an_area_meets_a_file(area: str) -> None:
    idle = [p for p in AREAS[area] if not any(fnmatchcase(path, p) for path in _PATHS)]
    assert not idle, f"tests/support/areas.py: nothing of '{area}' is called so"


def test_every_unit_test_has_an_area() -> None:
    homeless = [
        path
        for path in _PATHS
        if path.startswith("tests/unit/") and not any(is_of(area, path) for area in AREAS)
    ]
    assert not homeless, "say in tests/support/areas.py which area they are of"


def test_every_helper_is_on_their_page() -> None:
    page = (ROOT / "tests" / "support" / "README.md").read_text(encoding="utf-8")
    helpers = {path.name for path in (ROOT / "tests" / "support").glob("*.py")}

    assert set(re.findall(r"`(\w+\.py)`", page)) == helpers - {"__init__.py"}
