"""A process with a primary key bucket, killed at every step between the log and RocksDB's files.

Whatever step it was: what the log has is applied, once; what it has not is not; and the next life
goes on from there without writing anything to the log that is in it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.simulation.kv_crash_child import POINTS, open_bucket, read_log
from tests.support.kv_model import identity
from tests.support.kv_world import Batch, LoggedBucket, fold_log
from tests.support.python_process import run_python

_LIVES = 3


def _live_and_die(directory: Path, seed: int, point: str) -> None:
    done = run_python(["-m", "tests.simulation.kv_crash_child", str(directory), str(seed), point])
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_the_state_is_what_the_log_says_whatever_was_killed(tmp_path: Path, point: str) -> None:
    seed = POINTS.index(point)
    for _ in range(_LIVES):
        before = len(read_log(tmp_path))
        _live_and_die(tmp_path, seed, point)
        assert len(read_log(tmp_path)) >= before

        bucket = open_bucket(tmp_path, seed)
        try:
            _check(bucket)
        finally:
            bucket.tablet.close()


def _check(bucket: LoggedBucket) -> None:
    tablet, names = bucket.tablet, bucket.rules.primary_key
    state = fold_log(bucket.entries, names)
    end = bucket.log[-1][0] + bucket.log[-1][1].num_rows if bucket.log else 0
    assert tablet.applied_offset == tablet.planned_offset == end
    assert tablet.flushed_offset <= end
    assert tablet.row_count == len(state)
    rows = {key: row for key, (_, row) in state.items()}
    gone = {tuple(e.row[n] for n in names): None for e in bucket.entries} if bucket.log else {}
    assert identity(bucket.lookup_all([*rows, *(k for k in gone if k not in rows)])) == identity(
        rows
    )

    # Replaying all of it again changes nothing, and writing what is there adds nothing to the log.
    bucket.replay()
    assert tablet.applied_offset == end
    again = bucket.plan(Batch([("upsert", row) for row in rows.values()]))
    assert again.changelog.num_rows == 0
    tablet.abort(again)
    # Versions survived too: deleting every row retracts just the offsets that the log gave them.
    deleted = bucket.plan(Batch([("delete", row) for row in rows.values()]))
    assert sorted(deleted.changelog.column("__retracts").to_pylist()) == sorted(
        version for version, _ in state.values()
    )
    tablet.abort(deleted)
