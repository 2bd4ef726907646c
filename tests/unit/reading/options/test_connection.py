"""Names users load."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import InvalidNameError
from streamhouse.reading.options.connection import TableName


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [("db.t", "db.t", ""), ("t", "default.t", ""), ("db.t$lake", "db.t", "lake")],
)
def test_a_name_and_its_part(text: str, path: str, part: str) -> None:
    name = TableName.parse(text)

    assert (str(name.path), name.part) == (path, part)


def test_only_metadata_parts_describe_the_table() -> None:
    parts = ("log", "lake", "files", "buckets", "snapshots")

    assert [p for p in parts if TableName.parse(f"t${p}").is_metadata] == list(parts[2:])


def test_an_unknown_part_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InvalidNameError, match=r"has no part '\$file'; did you mean 'files'"):
        TableName.parse("db.t$file")
