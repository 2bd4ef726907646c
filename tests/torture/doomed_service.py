"""`streamhouse serve`, killing itself -9 at a named step. Run as a program:

    python -m tests.torture.doomed_service STEP COUNT SERVE-ARGUMENT...

It dies when STEP is reached for the COUNT-th time. Steps are points between two effects of the
service: just before or just after one of its functions. A step whose function is gone is an error,
so that the list cannot quietly go stale.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

__all__ = ["SERVICE_STEPS", "Step"]


class Step(NamedTuple):
    """A point in the service: before or after `function` of `module`.

    With `only` just the calls count of whose arguments it is true.
    """

    module: str
    function: str
    when: Literal["before", "after"]
    only: Callable[..., bool] | None = None


def _expires_rows(directory: Any, table: Any, state: Any) -> bool:
    """Whether a lake state says of rows that they have expired that were not before."""
    from streamhouse.storage_service.directory.table_files import load_lake_state

    return bool(load_lake_state(directory, table).expired_offsets != state.expired_offsets)


def _deletes_old(*_: Any, written_below: int | None = None) -> bool:
    """Whether keys are to be deleted for their age, not because somebody asks."""
    return bool(written_below)


def _removes_files(_: Any, commits: Any) -> bool:
    """Whether a commit to the catalog takes files out of a table and adds none."""
    snapshots = (commit.staged.current_snapshot() for commit in commits)
    return any(
        snapshot is not None
        and snapshot.summary is not None
        and snapshot.summary.operation.value == "delete"
        for snapshot in snapshots
    )


_SERVICE: Final = "streamhouse.storage_service"
_FILES: Final = f"{_SERVICE}.engine.transactions.transaction_files"
_TABLE_FILES: Final = f"{_SERVICE}.directory.table_files"
_CATALOG: Final = "streamhouse.lake.catalogs._sql_commits"

SERVICE_STEPS: Final = {
    "append-queued": Step(f"{_SERVICE}.log.log_tablet", "LogTablet.append", "after"),
    "append-written": Step(f"{_SERVICE}.log.log_tablet", "LogTablet.write", "after"),
    "append-synced": Step(f"{_SERVICE}.log.log_tablet", "LogTablet.sync", "after"),
    "append-unpublished": Step(f"{_SERVICE}.log.group_commit", "CommitGroup.complete", "before"),
    "append-published": Step(f"{_SERVICE}.log.group_commit", "CommitGroup.complete", "after"),
    "segment-rolling": Step(f"{_SERVICE}.log.segment_roll", "SegmentRoll.run", "before"),
    "segment-rolled": Step(f"{_SERVICE}.log.segment_roll", "SegmentRoll.run", "after"),
    "mark-advancing": Step(f"{_SERVICE}.log.durable_mark", "DurableMark.advance", "before"),
    "mark-advanced": Step(f"{_SERVICE}.log.durable_mark", "DurableMark.advance", "after"),
    "upsert-planned": Step(f"{_SERVICE}.kv.kv_tablet", "KvTablet.accept", "after"),
    "upsert-applying": Step(f"{_SERVICE}.kv.kv_tablet", "KvTablet.apply", "before"),
    "upsert-applied": Step(f"{_SERVICE}.kv.kv_tablet", "KvTablet.apply", "after"),
    "upsert-published": Step(f"{_SERVICE}.engine.keys.key_bucket", "KeyBucket.publish", "after"),
    "rows-writing": Step(f"{_SERVICE}.kv.rocksdb_store", "RocksdbStore.write", "before"),
    "rows-written": Step(f"{_SERVICE}.kv.rocksdb_store", "RocksdbStore.write", "after"),
    "rows-flushing": Step(f"{_SERVICE}.kv.rocksdb_store", "RocksdbStore.flush", "before"),
    "rows-flushed": Step(f"{_SERVICE}.kv.rocksdb_store", "RocksdbStore.flush", "after"),
    "segments-expiring": Step(
        f"{_SERVICE}.log.segment_chain", "SegmentChain.remove_expired", "before"
    ),
    "segment-removed": Step(f"{_SERVICE}.log.filesystem", "LocalFilesystem.remove", "after"),
    "file-renamed": Step(f"{_SERVICE}.log.filesystem", "LocalFilesystem.rename", "after"),
    "part-staged": Step(_FILES, "TransactionFiles.stage", "after"),
    "commit-deciding": Step(_FILES, "TransactionFiles.decide", "before"),
    "commit-decided": Step(_FILES, "TransactionFiles.decide", "after"),
    "commit-publishing": Step(
        f"{_SERVICE}.engine.transactions._transaction_commit", "TransactionCommit.publish", "before"
    ),
    "commit-published": Step(
        f"{_SERVICE}.engine.transactions._transaction_commit", "TransactionCommit.publish", "after"
    ),
    "parts-dropping": Step(_FILES, "TransactionFiles.drop_parts", "before"),
    "outcomes-folded": Step(_FILES, "TransactionFiles.fold", "after"),
    "lake-state-saving": Step(_TABLE_FILES, "save_lake_state", "before"),
    "lake-state-saved": Step(_TABLE_FILES, "save_lake_state", "after"),
    "expiry-saving": Step(_TABLE_FILES, "save_lake_state", "before", _expires_rows),
    "expiry-saved": Step(_TABLE_FILES, "save_lake_state", "after", _expires_rows),
    "rows-expiring": Step(
        f"{_SERVICE}.engine.upkeep._row_expiry", "delete_of", "after", _deletes_old
    ),
    "ages-saving": Step(f"{_SERVICE}.engine.upkeep.row_ages", "RowAges.advance", "before"),
    "ages-saved": Step(f"{_SERVICE}.engine.upkeep.row_ages", "RowAges.advance", "after"),
    "lake-committing": Step(_CATALOG, "commit_staged", "before"),
    "lake-committed": Step(_CATALOG, "commit_staged", "after"),
    "removal-committing": Step(_CATALOG, "commit_staged", "before", _removes_files),
    "removal-committed": Step(_CATALOG, "commit_staged", "after", _removes_files),
}
"""Step name -> where it is."""


def doom(step: Step, count: int) -> None:
    """Make this process kill itself when `step` is reached for the `count`-th time."""
    module = importlib.import_module(step.module)
    *owners, name = step.function.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)
    doomed = _dying(function, step, count)
    setattr(owner, name, doomed)
    if owner is module:
        # Who imported the function by name has the old one.
        for other in list(sys.modules.values()):
            if getattr(other, name, None) is function:
                setattr(other, name, doomed)


def _dying(function: Callable[..., Any], step: Step, count: int) -> Callable[..., Any]:
    # next() of a counter is atomic: commit, reader and writer threads meet here.
    reached = itertools.count(1)

    def die_if_due() -> None:
        if next(reached) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Asked before: the call may change what the answer goes by.
        counts = step.only is None or step.only(*args, **kwargs)
        if counts and step.when == "before":
            die_if_due()
        result = function(*args, **kwargs)
        if counts and step.when == "after":
            die_if_due()
        return result

    return wrapped


def main(step: str, count: str, *arguments: str) -> None:
    from streamhouse.cli import main as streamhouse
    from streamhouse.cli.tuned_malloc import restart_with_tuned_malloc

    # `serve` does it first thing; here the service is imported before.
    restart_with_tuned_malloc()
    # The routes are imported first, so that names bound at import are replaced there too.
    importlib.import_module("streamhouse.storage_service.server.service")
    doom(SERVICE_STEPS[step], int(count))
    sys.argv = ["streamhouse", "serve", *arguments]
    streamhouse()


if __name__ == "__main__":
    main(*sys.argv[1:])
