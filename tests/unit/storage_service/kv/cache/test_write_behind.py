"""What waits for RocksDB: all of it in order, counted, in few pieces, and little copied at once."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from streamhouse.storage_service.kv.cache._write_behind import Piece, WriteBacklog
from streamhouse.storage_service.kv.rocksdb_store import Marker

KIB = 1 << 10


def _key(number: int) -> bytes:
    return b"\x01" + number.to_bytes(8, "big")


def _piece(changes: dict[int, bytes | None], *, end: int = 1) -> Piece:
    keys = pa.array([_key(n) for n in changes], pa.binary())
    return Piece(keys, pa.array(list(changes.values()), pa.binary()), Marker(end, 0))


def _part_of(piece: Piece, start: int, count: int) -> Piece:
    keys, values = piece.keys.slice(start, count), piece.values.slice(start, count)
    return Piece(keys, values, piece.marker)


def test_a_row_does_not_hold_the_round_it_came_in() -> None:
    backlog = WriteBacklog()
    before = pa.total_allocated_bytes()
    for n in range(40):
        all_rows = _piece(dict.fromkeys(range(1_000), b"x" * 1000))
        backlog.add(_part_of(all_rows, n, 1))
        del all_rows

    assert backlog.memory_bytes > 40 * 1_000
    assert pa.total_allocated_bytes() - before < 2 * backlog.memory_bytes


@pytest.mark.parametrize("count", [2, 16])
def test_the_parts_of_a_round_hold_little_more_than_is_counted(count: int) -> None:
    all_rows = _piece(dict.fromkeys(range(16_000), b"x" * 100))
    before = pa.total_allocated_bytes() - all_rows.keys.nbytes - all_rows.values.nbytes
    backlog = WriteBacklog()
    backlog.add(_part_of(all_rows, 100, 16_000 // count))
    del all_rows

    assert pa.total_allocated_bytes() - before < 2.2 * backlog.memory_bytes


@pytest.mark.parametrize("row_bytes", [1, 100, 5_000, 100_000, 400_000])
def test_little_is_copied_at_once_and_few_pieces_wait(
    row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    concat_arrays = pa.concat_arrays

    def counted(arrays: list[pa.Array]) -> pa.Array:
        copied[-1] += sum(array.nbytes for array in arrays)
        return concat_arrays(arrays)

    monkeypatch.setattr(pa, "concat_arrays", counted)
    backlog = WriteBacklog()
    for n in range(3_000 if row_bytes < KIB else 300):
        copied.append(0)
        backlog.add(_piece({n: b"x" * row_bytes}))

    assert max(copied) < 300 * KIB
    assert len(backlog._pieces) < 32 + 2 * (backlog.memory_bytes // (256 * KIB) + 1)


def test_everything_is_handed_over_in_order_whatever_the_sizes() -> None:
    random = Random(3)
    model: dict[bytes, bytes | None] = {}
    older, newer = WriteBacklog(), WriteBacklog()
    count = 0
    for end in range(1, 600):
        rows = random.choice((1, 1, 1, 5, 300, 5_000 if end % 50 == 0 else 2))
        size = random.choice((3, 30, 30_000 if rows < 9 else 10))
        ids = random.sample(range(5_000), rows)
        changes = {n: None if random.random() < 0.3 else b"%d " % end * (size // 3) for n in ids}
        backlog = older if end < 300 else newer
        if random.random() < 0.5:
            around = _piece({-1 & 0xFFFF: b"before"} | changes | {0xFFFF1: b"after"}, end=end)
            backlog.add(_part_of(around, 1, rows))
        else:
            backlog.add(_piece(changes, end=end))
        model |= {_key(n): value for n, value in changes.items()}
        count += rows

    waiting = newer.behind(older)
    waiting.add(_piece({1: b"last"}, end=600))
    model[_key(1)] = b"last"

    assert waiting.rows == count + 1
    assert waiting.changes_under(b"\x01") == model
    assert waiting.changes_under(_key(1)) == {_key(1): b"last"}
    run = waiting.as_run()
    assert run.marker == Marker(600, 0)
    assert len(run.keys) == len(model)
    assert dict(zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)) == model


def test_keys_that_differ_only_at_their_ends_are_handed_over_in_order() -> None:
    random = Random(4)
    backlog = WriteBacklog()
    latest: dict[bytes, bytes] = {}
    for end in (1, 2):
        numbers = random.sample(range(1_000), 600)
        keys = [
            b"\x01%s\x00\x00" % random.choice((b"eu-west", b"us-east")) + _key(n) for n in numbers
        ]
        values = [b"%d" % end] * len(keys)
        backlog.add(Piece(pa.array(keys), pa.array(values), Marker(end, 0)))
        latest |= dict.fromkeys(keys, b"%d" % end)

    run = backlog.as_run()

    assert list(zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)) == sorted(
        latest.items()
    )
