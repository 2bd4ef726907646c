"""A service killed -9 at every step of a commit: afterwards each transaction is there or not.

Whatever step it was: what was acknowledged is there, once; what was decided is there as a whole,
and all of it has one timestamp; what was not is not there at all, and can still be committed; a
version is committed once.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.model.changelog import DELETE, UPDATE_BEFORE
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from tests.simulation.transaction_crash_child import (
    BUCKETS,
    CONFIG,
    DECIDED,
    LOG_TABLES,
    OPERATIONS,
    PARTS,
    STEPS,
    key_rows,
    make_table,
    part_rows,
    position,
)
from tests.support.in_process_service import open_manager
from tests.support.kv_world import looked_up
from tests.support.python_process import run_python

_LIVES = 1
_TIME = "time of the frame"


def _live_and_die(directory: Path, table: str, step: str, *, first: int, passes: int) -> None:
    module = "tests.simulation.transaction_crash_child"
    done = run_python(["-m", module, str(directory), table, step, str(first), str(passes)])
    assert done.returncode == -signal.SIGKILL, done.stderr


def _told(directory: Path) -> list[list[str]]:
    text = (directory / "told").read_text()
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _log(table: OpenTable, bucket: int) -> pa.Table:
    tablet = table.tablets[bucket]
    batches = []
    times: list[int] = []
    offset = tablet.log_start_offset
    while offset < tablet.high_watermark:
        for frame in tablet.read(offset, bytes_max=1 << 20):
            batches.append(
                pa.ipc.read_record_batch(pa.py_buffer(frame.payload), table.info.log_schema)
            )
            times += [frame.timestamp_us] * frame.row_count
            offset = frame.base_offset + frame.row_count
    rows = pa.Table.from_batches(batches, schema=table.info.log_schema)
    return rows.append_column(_TIME, pa.array(times, pa.int64()))


def _check_times(table: OpenTable) -> None:
    """No cut by time has a part of a transaction."""
    times: dict[str, set[int]] = {}
    for bucket in range(BUCKETS):
        rows = _log(table, bucket)
        kinds = rows["__change_type"] if isinstance(table, KeyTable) else [None] * rows.num_rows
        for name, kind, time in zip(
            rows["name"].to_pylist(), kinds, rows[_TIME].to_pylist(), strict=True
        ):
            is_written = kind is None or kind.as_py() not in (UPDATE_BEFORE, DELETE)
            if is_written and name != "alone":
                times.setdefault(name.partition("p")[0], set()).add(time)
    assert all(len(seen) == 1 for seen in times.values()), times


def _check_log(table: OpenTable, committed: set[int]) -> None:
    """Each committed transaction is there once, in order, and nothing of the others."""
    is_refilled = str(table.path).endswith("refilled")
    for bucket in range(BUCKETS):
        rows = _log(table, bucket)
        found = [i for i in rows.column("id").to_pylist() if i >= 0]
        expected = [
            i
            for number in sorted(committed)[-1 if is_refilled else None :]
            for part in range(PARTS)
            for i in part_rows(number, part, bucket).column("id").to_pylist()
        ]
        assert found == expected


def _check_keys(table: OpenTable, committed: set[int]) -> None:
    """The rows are those that the committed transactions leave, and the changelog folds to them."""
    expected: dict[int, str] = {}
    is_replaced = str(table.path).endswith("replaced")
    for number in sorted(committed)[-1 if is_replaced else None :]:
        for part in range(PARTS):
            for bucket in range(BUCKETS):
                rows = key_rows(number, part, bucket).to_pydict()
                expected.update(zip(rows["id"], rows["name"], strict=True))
    folded: dict[int, str] = {}
    writers: Counter[str] = Counter()
    for bucket in range(BUCKETS):
        changes = _log(table, bucket).to_pydict()
        for key, name, kind in zip(
            changes["id"], changes["name"], changes["__change_type"], strict=True
        ):
            if kind in (UPDATE_BEFORE, DELETE):
                assert folded.pop(key) == name
            else:
                assert key not in folded
                folded[key] = name
                writers[name] += 1
    assert sum(bucket.row_count for bucket in table.key_buckets) == len(folded)
    if is_replaced and committed:
        # Of rows that others wrote, at most that from after the last one is left.
        assert {key for key in folded if key < 0} <= {-1 - max(committed)}
    folded = {key: name for key, name in folded.items() if key >= 0}
    assert folded == expected
    for bucket in range(BUCKETS):
        ids = [key for key in expected if key % BUCKETS == bucket]
        keys = pa.record_batch([pa.array([*ids, 10**9], pa.int64())], names=["id"])
        answer = looked_up(table.key_buckets[bucket].rows, keys)
        assert answer.rows.column("name").to_pylist() == [expected[key] for key in ids]
        assert answer.end_offset == table.tablets[bucket].high_watermark
    # Once: a piece that was applied twice would write its rows twice.
    rows_each = {f"t{n}p{p}": 20 * BUCKETS for n in committed for p in range(PARTS)}
    assert {name: count for name, count in writers.items() if name != "alone"} == rows_each


async def _check(directory: Path, name: str, step: str) -> int:
    """Check what is there, finish what can be finished; return the next transaction's number."""
    told = _told(directory)
    staged = {int(line[1]): line[2:] for line in told if line[0] == "staged"}
    acknowledged = {int(line[1]) for line in told if line[0] == "committed"}
    async with open_manager(directory / "data", **CONFIG) as manager:
        table = await make_table(manager, name)
        transactions = manager.transactions.of(table)
        check = _check_log if name in LOG_TABLES else _check_keys
        last = max(staged, default=-1)
        committed = set(acknowledged)
        if step in DECIDED and last >= 0:
            committed.add(last)
        is_cut_short = last >= 0 and last not in committed
        if is_cut_short and step == "decision written":
            # Renamed, not yet synced: of a killed process it is there.
            committed.add(last)
            is_cut_short = False
        check(table, committed)
        if committed:
            _, status = await transactions.begin(
                OPERATIONS[name],
                columns=None,
                app_id="app",
                version=max(committed),
                timeout_ms=None,
            )
            assert status is TransactionStatus.SKIPPED
            repeated = staged[max(committed)]
            again = await transactions.commit(repeated[0], repeated[1:], wait_s=60)
            assert again is not None
            assert again.status is TransactionStatus.COMMITTED
            assert again.row_count == PARTS * BUCKETS * 20
        if is_cut_short:
            result = await transactions.commit(
                staged[last][0], staged[last][1:], wait_s=60, read=position(table)
            )
            assert result is not None
            assert result.status is TransactionStatus.COMMITTED
            committed.add(last)
        check(table, committed)
        _check_times(table)
        with (directory / "told").open("a") as file:
            file.writelines(f"committed {number}\n" for number in committed - acknowledged)
        return last + 1


@pytest.mark.one_of(4)
@pytest.mark.slow
@pytest.mark.parametrize("table", ["events", "rows", "refilled", "replaced"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_transaction_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, step: str, table: str
) -> None:
    first = 0
    for life in range(_LIVES):
        passes = 1 + (STEPS.index(step) + 7 * life) % 5
        _live_and_die(tmp_path, table, step, first=first, passes=passes)
        first = await _check(tmp_path, table, step)
        # What a life left half done is cleaned up by the next.
        names = [path.name for path in (tmp_path / "data").rglob("transactions/*")]
        assert not [name for name in names if name.endswith(".tmp")]
