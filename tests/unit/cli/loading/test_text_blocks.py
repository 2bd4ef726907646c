"""A text file in blocks: every record whole, under its header, with its line."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.cli.loading.text_blocks import BlockLimits, TextBlock, text_blocks
from streamhouse.core.errors import InvalidRequestError

_FIELD = st.text(alphabet='ab,"\n é', max_size=6)
_ROWS = st.lists(st.tuples(_FIELD, _FIELD), max_size=30)


def _blocks(body: bytes, size: int, *, has_header: bool, lines_max: int = 1_000) -> list[TextBlock]:
    limits = BlockLimits(read_bytes=size, lines_max=lines_max, record_bytes_max=4_000)
    source = io.BytesIO(body)
    return [*text_blocks(source, has_header=has_header, what="f", limits=limits)]


@given(_ROWS, st.integers(1, 40), st.integers(1, 9), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_records_are_whole_and_below_their_header(
    rows: list[tuple[str, str]], size: int, lines_max: int, line_end: str, ends: bool
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL).writerows([("x", "y"), *rows])
    body = (text.getvalue() if ends else text.getvalue().removesuffix(line_end)).encode()
    file_lines = body.split(b"\n")

    records: list[list[str]] = []
    for block in _blocks(body, size, has_header=True, lines_max=lines_max):
        reader = csv.reader(io.StringIO(block.body.decode(), newline=""))
        assert next(reader) == ["x", "y"]
        first_line = block.body.split(b"\n")[1:2]
        if records:
            assert file_lines[block.lines_before + 1 : block.lines_before + 2] == first_line
        records += reader

    assert records == [[*row] for row in rows]


@given(st.lists(st.binary(max_size=9)), st.integers(1, 30), st.integers(1, 9))
def test_lines_of_ndjson_keep_their_numbers(lines: list[bytes], size: int, lines_max: int) -> None:
    body = b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines)

    blocks = _blocks(body, size, has_header=False, lines_max=lines_max)

    assert b"".join(block.body for block in blocks) == body
    before = 0
    for block in blocks:
        assert block.lines_before == before
        count = block.body.count(b"\n")
        assert 0 < count <= lines_max
        before += count


def test_an_empty_file_is_a_body_without_a_header() -> None:
    assert _blocks(b"", 8, has_header=True) == [TextBlock(b"", 0)]
    assert _blocks(b"", 8, has_header=False) == []


def test_a_quote_that_is_never_closed_costs_no_memory_without_end() -> None:
    with pytest.raises(InvalidRequestError, match=r"^f: line 3 has more .* its quote is never clo"):
        _blocks(b'x\n1\n"2' + b"\n3" * 5_000, 16, has_header=True)
