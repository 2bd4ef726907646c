"""The one place where a test puts something around a function of the product.

An argument, a failing disk or catalog, or a fake service comes first. What is left stands here: a
moment that must be held between two effects, an error that no input brings about, a bound whose
real value would take a test minutes. Each step is named once, with its reason; one that is gone
fails every test (`tests/architecture/test_replaced_functions.py`), so none goes stale.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

__all__ = ["BOUNDS", "STEPS", "Place", "around", "lower"]


class Place(NamedTuple):
    """A name in a module of the product, dots for members, and why tests replace it."""

    module: str
    name: str
    why: str

    def owner(self) -> tuple[Any, str]:
        """Return what the name is looked up in, and its last part; an error if it is gone."""
        *owners, name = self.name.split(".")
        module = importlib.import_module(f"streamhouse.{self.module}")
        owner: Any = functools.reduce(getattr, owners, module)
        getattr(owner, name)
        return owner, name


_ENGINE: Final = "storage_service.engine"
_LAKE: Final = "lake"
_BUG: Final = "a bug of ours, which no input brings about"
_BETWEEN: Final = "something happens between a look and the write that follows it"
_COUNTED: Final = "how often it is asked is seen nowhere"
_HELD: Final = "a moment between two effects is held"
_SLOW: Final = "the real value takes a test too long to reach"

STEPS: Final = {
    "small-table-read": Place("reading.duckdb._queried_tables", "read_splits", _COUNTED),
    "rows-written": Place("storage_service.log.log_tablet", "LogTablet.write", _BUG),
    "records-decoding": Place("storage_service.kafka_door.producing._produce", "decoded", _HELD),
    "schema-judging": Place(
        "storage_service.kafka_door.registry._schema_desk", "_checked_change", _HELD
    ),
    "schemas-making": Place(
        "storage_service.kafka_door.registry._schema_desk", "_with_reading_schemas", _HELD
    ),
    "records-read": Place("storage_service.kafka_door.producing._decoding", "rows_of", _BUG),
    "positions-read": Place(
        "storage_service.kafka_door.groups._offsets",
        "positions",
        "a lease runs out between the answers to two requests of a member",
    ),
    "table-found": Place("storage_service.server.service", "Service._find", _BUG),
    "catalog-answering": Place(
        "storage_service.rest_catalog.rest_api", "RestCatalogApi.answer", _HELD
    ),
    "catalog-asked": Place("storage_service.rest_catalog.rest_api", "RestCatalogApi._answer", _BUG),
    "catalog-opening": Place(f"{_LAKE}.catalogs.open_catalog", "open_catalog", _HELD),
    "rows-decoding": Place(f"{_LAKE}.snapshots._manifests", "_row_decoder", _HELD),
    "piece-storing": Place(
        f"{_ENGINE}.transactions._transaction_commit", "TransactionCommit._stored", _HELD
    ),
    "commit-storing": Place(
        f"{_ENGINE}.transactions._transaction_commit",
        "TransactionCommit.store",
        "the service ends between the decision and the rows",
    ),
    "decision-writing": Place(
        f"{_ENGINE}.transactions.transaction_files",
        "TransactionFiles.decide",
        "the service ends before a decision, or before its outcome",
    ),
    "part-syncing": Place(
        f"{_ENGINE}.transactions.transaction_files", "TransactionFiles._sync_open", _HELD
    ),
    "log-beginning": Place(
        f"{_ENGINE}._opener", "begin_log", "the disk is full at this step alone"
    ),
    "table-opening": Place(f"{_ENGINE}._opener", "TableOpener.open", _HELD),
    "history-checking": Place(f"{_ENGINE}._opener", "TableOpener._check_history", _BUG),
    "reader-starting": Place(
        "storage_service.server.readers._readers", "start_module", "a test plays the process"
    ),
    "reader-ending": Place(
        "storage_service.server.readers._readers", "end_module", "a test plays the process"
    ),
    "table-adding": Place(
        "storage_service.directory.table_registry", "TableRegistry.add_table", _BUG
    ),
    "table-keeping": Place(
        "storage_service.directory.table_registry", "TableRegistry.replace_table", _HELD
    ),
    "segment-syncing": Place(
        "storage_service.log.segments.segment",
        "ActiveSegment.sync",
        "of two logs that are synced at once one fails",
    ),
    "files-renaming": Place(
        "storage_service.log.filesystem",
        "LocalFilesystem.rename_in_order",
        "the process ends between two renames of one roll",
    ),
    "time-looked-up": Place(
        "storage_service.log.log_tablet",
        "LogTablet.offset_for_timestamp",
        "the log has forgotten times that only days of retention make it forget",
    ),
    "log-read": Place("storage_service.log.log_tablet", "LogTablet.read", _BETWEEN),
    "live-room-asked": Place("storage_service.live.live_cuts", "LiveCuts._check_room", _HELD),
    "log-start-asked": Place(
        "storage_service.log.log_tablet", "LogTablet.log_start_offset", _BETWEEN
    ),
    "consumers-asked": Place(f"{_ENGINE}.consumers", "Consumers.current", _COUNTED),
    "unknown-table-named": Place(
        "storage_service.directory.table_registry", "TableRegistry.not_found", _COUNTED
    ),
    "expired-deleting": Place(f"{_ENGINE}.upkeep._row_expiry", "_delete", _BETWEEN),
    "ages-advancing": Place(f"{_ENGINE}.upkeep.row_ages", "RowAges.advance", _HELD),
    "old-keys-read": Place(f"{_ENGINE}.upkeep._row_expiry", "older_keys", _BETWEEN),
    "changes-accepting": Place("storage_service.kv.kv_tablet", "KvTablet.accept", _BUG),
    "changes-applying": Place("storage_service.kv.kv_tablet", "KvTablet.apply", _HELD),
    "changes-replaying": Place(
        "storage_service.kv.kv_tablet", "KvTablet.replay", "what a start replays is seen nowhere"
    ),
    "copy-replaying": Place("storage_service.kv.row_copy", "RowCopy.replay", _HELD),
    "keys-planning": Place(
        f"{_ENGINE}.keys._key_planner", "plan_writes", "who plans is seen nowhere"
    ),
    "planned-putting": Place(
        "storage_service.kv.cache._planned_rows", "PlannedRows.put", "memory runs out at this step"
    ),
    "rocksdb-writing": Place(
        "storage_service.kv.rocksdb_store",
        "RocksdbStore.write",
        "RocksDB stalls only under a load of minutes",
    ),
    "request-sending": Place(
        "client.http._transport",
        "HttpTransport._send",
        "a request arrives after the repetition of it was answered",
    ),
    "transaction-committing": Place(
        "client.writing.transactions", "Transaction.commit", "a program dies around it"
    ),
    "lake-planning": Place(
        "reading.plan._lake_cut", "cut_lake", "that the lake is not asked is seen nowhere"
    ),
    "plan-asking": Place(
        "connector.query._narrowing", "needs_of", "a session of Spark Connect takes a server"
    ),
    "client-opening": Place(
        "connector.write._write_jobs", "client_for", "a pickled job opens its client by itself"
    ),
    "lake-rows-made": Place(
        "reading.tail.lake_task", "lake_rows", "how many batches make one table is seen nowhere"
    ),
    "budget-taking": Place("reading.tail._log_chunks", "_Budget.take", _HELD),
    "round-running": Place("tiering.worker._service", "TieringService._run_round", _HELD),
    "round-planning": Place("tiering.round._round", "plan_round", _BUG),
}
"""Step -> the function, where its callers look it up."""

BOUNDS: Final = {
    "plan-files": Place(f"{_LAKE}._scan_files", "FILES_MAX", _SLOW),
    "plan-delete-files": Place(f"{_LAKE}._scan_files", "DELETE_FILES_MAX", _SLOW),
    "plan-references": Place(f"{_LAKE}._scan_files", "REFERENCES_MAX", _SLOW),
    "plan-manifests": Place(f"{_LAKE}._scan_files", "GROUP_MANIFESTS", _SLOW),
    "plan-judged": Place(f"{_LAKE}._scan_files", "JUDGED_MAX", _SLOW),
    "manifests-merged": Place(f"{_LAKE}.commits._new_manifests", "MERGE_MANIFESTS_MIN", _SLOW),
    "deletes-of-one-file": Place(f"{_LAKE}.files.position_deletes", "FILE_SCOPED_MAX", _SLOW),
    "landing-backoff": Place(
        f"{_LAKE}._landing", "BACKOFF", "a commit that fails five times would wait for seconds"
    ),
    "lookup-piece-bytes": Place("connector.lookup._joined_batches", "_PIECE_BYTES", _SLOW),
    "import-step": Place("reading.imports._import_progress", "STEP_ROWS", _SLOW),
    "rows-overlapping": Place(f"{_ENGINE}.keys._key_writer", "_OVERLAPPING_ROWS", _SLOW),
    "groups-submitted": Place(f"{_ENGINE}.keys._key_writer", "_SUBMITTED_GROUPS_MAX", _SLOW),
    "rows-short": Place(f"{_ENGINE}.keys._key_planner", "_SHORT_ROWS", _SLOW),
    "synced-alone-s": Place(
        "storage_service.log.group_commit",
        "_SYNCED_ALONE_S",
        "no disk of a test is so slow that its logs are synced at the same time",
    ),
    "met-bytes": Place("storage_service.kv.kv_tablet", "MET_BYTES_MAX", _SLOW),
    "met-bytes-of-buckets": Place("storage_service.kv.plan.upsert_plan", "MET_BYTES_MAX", _SLOW),
    "run-bytes": Place("storage_service.kv.cache._write_behind", "_RUN_BYTES_MIN", _SLOW),
    "stored-chunk": Place("storage_service.kv.rocksdb_store", "_CHUNK_ROWS", _SLOW),
    "log-row-bytes": Place("core.rows.row_splitter", "LOG_ROW_BYTES_MAX", _SLOW),
    "loop-slice-s": Place(
        "storage_service.server.status.event_loop", "_SLICE_S", "a turn of the loop has no size"
    ),
    "history-reads": Place("storage_service.server.history.lake_reads", "_READS_MAX", _SLOW),
    "small-table": Place(
        "reading.duckdb._queried_tables", "SMALL_BYTES", "32 MiB of rows take a while to write"
    ),
    "kept-tables": Place(
        "reading.duckdb._query_database", "KEPT_BYTES", "128 MiB of rows take a while to write"
    ),
    "read-page": Place("reading.tail._log_chunks", "PAGE_BYTES", _SLOW),
}
"""Bound -> the constant."""


def around(patch: pytest.MonkeyPatch, step: str, act: Callable[..., Any]) -> None:
    """Call `act(real, *arguments)` instead of the step's function, until `patch` is undone."""
    owner, name = STEPS[step].owner()
    real = getattr(owner, name)
    if isinstance(real, property):
        patch.setattr(owner, name, property(functools.partial(act, real.fget)))
        return

    @functools.wraps(real)
    def acting(*args: Any, **kwargs: Any) -> Any:
        return act(real, *args, **kwargs)

    patch.setattr(owner, name, acting)


def lower(patch: pytest.MonkeyPatch, bound: str, value: object) -> None:
    """Give a bound of the product this value, until `patch` is undone."""
    owner, name = BOUNDS[bound].owner()
    patch.setattr(owner, name, value)
