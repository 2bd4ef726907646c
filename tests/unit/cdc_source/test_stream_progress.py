"""What a stream remembers of a table tells a renamed column from a new one."""

from __future__ import annotations

import pytest

from streamhouse.cdc_source._stream_progress import FollowedTable
from streamhouse.cdc_source._target_table import SourceTable
from streamhouse.cdc_source.stream_options import StreamOptions
from streamhouse.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("now", "renamed"),
    [
        ({"id": 1, "n": 2}, None),
        ({"id": 1, "n": 2, "more": 3}, None),
        ({"id": 1}, None),
        # Dropped and made again under the same name, and under another.
        ({"id": 1, "n": 3}, None),
        ({"id": 1, "m": 3}, None),
        ({"id": 1, "m": 2}, ("n", "m")),
        # The old name belongs to a new column.
        ({"id": 1, "m": 2, "n": 3}, ("n", "m")),
        ({}, None),
    ],
)
def test_a_renamed_column(now: dict[str, int], renamed: tuple[str, str] | None) -> None:
    assert FollowedTable("db.t", 7, {"id": 1, "n": 2}).renamed_column(now) == renamed


def test_two_tables_of_the_source_do_not_become_one() -> None:
    options = StreamOptions(patterns=["*.*"], database="db", name="db")
    ours = options.paths([SourceTable("s", "t", (), ("id",), (), 1)], beside={})
    assert ours["s.t"].path == "db.s_t"

    with pytest.raises(InvalidRequestError, match=r"would become 'db\.s_t', s\.t and public\.s_t"):
        options.paths([SourceTable("public", "s_t", (), ("id",), (), 2)], beside=ours)
