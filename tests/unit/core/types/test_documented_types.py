"""The table of `docs/column_types.md` is what the types are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from streamhouse.core.model.schema import type_from_json
from streamhouse.core.types.registry import SIMPLE, type_of

_ROWS: Final = re.findall(
    r"^\| `([a-z_]+(?:\(12,2\))?)` \| `([^`]+)` \| `([^`]+)` \|",
    (Path(__file__).parents[4] / "docs/column_types.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("name", "arrow", "iceberg"), _ROWS)
def test_a_documented_type(name: str, arrow: str, iceberg: str) -> None:
    data_type = type_from_json(name, where="c")

    assert str(data_type) == arrow
    assert type_of(data_type).iceberg_name == (None if "(" in iceberg else iceberg)


def test_every_type_is_documented() -> None:
    assert {row[0] for row in _ROWS} == {t.name for t in SIMPLE} | {"decimal(12,2)"}
