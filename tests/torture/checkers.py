"""Judges of what is stored: each compares one table with the history its writers kept.

`check` is called after every restart, while interrupted calls may still land, and again when all
is quiet. It raises AssertionError with the first contradiction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import OffsetOutOfRangeError, StreamhouseError
from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from streamhouse.core.model.lake.facts import LakeRole
from tests.torture.ledger import AppendLedger, KeyLedger, RowId, SchemaLedger
from tests.torture.writers import KEYS_ONLY, KEYS_PER_WRITER, TransactionWriter

__all__ = [
    "KeyChecker",
    "KeyTransactionChecker",
    "LogChecker",
    "SchemaChecker",
    "TransactionChecker",
]

_COPIES: Final = TransactionWriter.PARTS * TransactionWriter.ROWS


class LogImage:
    """Everything ever read of one log table: bucket -> the rows by offset. Rows never change."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.buckets: dict[int, list[RowId]] = {}
        self.counts: Counter[RowId] = Counter()

    def extend(self, client: StreamhouseClient) -> dict[int, list[RowId]]:
        """Read on up to a consistent cut; return the rows that are new, by bucket.

        All of them are taken, or none: a read that fails half way is made again.
        """
        state = client.table_state(self.table)
        news = {}
        for bucket, positions in state.positions.items():
            start, end = len(self.buckets.get(bucket, ())), positions.high_watermark
            assert end >= start, (
                f"{self.table}, bucket {bucket}: rows up to {start} were read, but after the"
                f" restart it ends at {end}"
            )
            try:
                news[bucket] = self._read_log(client, bucket, start, end)
            except OffsetOutOfRangeError:
                # Retention was faster than this reader: tiered rows are in the lake.
                tiered = self._read_lake(client, bucket, start, end)
                news[bucket] = tiered + self._read_log(client, bucket, start + len(tiered), end)
        for bucket, rows in news.items():
            self.buckets.setdefault(bucket, []).extend(rows)
            self.counts.update(rows)
        return news

    def check_unchanged(self, client: StreamhouseClient) -> None:
        """Read everything again: what was read once is still there, in the same places."""
        again = LogImage(self.table)
        again.extend(client)
        for bucket, rows in self.buckets.items():
            assert again.buckets[bucket][: len(rows)] == rows, (
                f"{self.table}, bucket {bucket}: rows that were read have changed or gone"
            )

    def _read_log(
        self, client: StreamhouseClient, bucket: int, start: int, end: int
    ) -> list[RowId]:
        rows: list[RowId] = []
        for batch in client.read_range(
            self.table, bucket, start, end, columns=["writer", "number"]
        ):
            at = start + len(rows)
            assert batch.base_offset == at, f"{self.table}: a gap at {at}"
            rows += _row_ids(batch.data)
        return rows

    def _read_lake(
        self, client: StreamhouseClient, bucket: int, start: int, end: int
    ) -> list[RowId]:
        lake = lake_table(client, self.table).scan(
            row_filter=f"__bucket == {bucket} and __offset >= {start} and __offset < {end}",
            selected_fields=("writer", "number", "__offset"),
        )
        found = lake.to_arrow().sort_by("__offset")
        offsets = found.column("__offset").to_pylist()
        assert offsets == list(range(start, start + len(offsets))), (
            f"{self.table}, bucket {bucket}: the lake has a gap or a row twice after {start}"
        )
        return _row_ids(found)


class LogChecker:
    """A log table: every acknowledged row once, at its place; no row that was not sent."""

    def __init__(self, table: str, ledger: AppendLedger) -> None:
        self.table = table
        self.ledger = ledger
        self.image = LogImage(table)
        self._last: dict[tuple[int, int], int] = {}

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge what is new; return how many rows."""
        acknowledged = self.ledger.take_acknowledged()
        news = self.image.extend(client)
        rows = [row for new in news.values() for row in new]
        counts = self.image.counts
        twice = [row for row in rows if counts[row] > 1]
        assert not twice, f"{self.table}: rows are there twice: {sorted(twice)[:5]}"
        invented = self.ledger.unsent(rows)
        assert not invented, f"{self.table}: rows nobody sent: {invented[:5]}"
        lost = acknowledged.keys() - counts.keys()
        assert not lost, f"{self.table}: acknowledged rows are lost: {sorted(lost)[:5]}"
        for row, (bucket, offset) in acknowledged.items():
            if bucket >= 0:
                found = self.image.buckets[bucket][offset]
                assert found == row, (
                    f"{self.table}, bucket {bucket}, offset {offset}: {found}, but {row} was"
                    " acknowledged there"
                )
        self._check_order(news)
        return len(rows)

    def _check_order(self, news: Mapping[int, list[RowId]]) -> None:
        for bucket, rows in news.items():
            for writer, number in rows:
                last = self._last.get((bucket, writer), -1)
                assert number > last, (
                    f"{self.table}, bucket {bucket}: row {number} of writer {writer} comes after"
                    f" {last}"
                )
                self._last[bucket, writer] = number

    def check_lake(self, client: StreamhouseClient) -> None:
        """Compare the lake, all of it tiered, with the image; and the union read too."""
        for name in lake_names(client, self.table):
            lake = lake_table(client, name).scan(selected_fields=("writer", "number")).to_arrow()
            assert Counter(_row_ids(lake)) == self.image.counts, f"{name}: the lake differs"
        union = client.read(self.table, columns=["writer", "number"])
        assert Counter(_row_ids(union)) == self.image.counts, f"{self.table}: a union read differs"

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Judge everything again."""
        self.image.check_unchanged(client)


class TransactionChecker:
    """A log table written by transactions only: each is whole or absent, at every cut."""

    def __init__(self, table: str, ledger: AppendLedger) -> None:
        self.table = table
        self.ledger = ledger
        self.image = LogImage(table)

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge what is new; return how many transactions."""
        acknowledged = self.ledger.take_acknowledged()
        judged = self.check_cut(client)
        lost = acknowledged.keys() - self.image.counts.keys()
        assert not lost, f"{self.table}: committed transactions are lost: {sorted(lost)[:5]}"
        return judged

    def check_cut(self, client: StreamhouseClient) -> int:
        """Read on to a cut; every transaction in it is whole, and there once."""
        new = {row for rows in self.image.extend(client).values() for row in rows}
        for row in new:
            count = self.image.counts[row]
            assert count == _COPIES, f"{self.table}: transaction {row} has {count} of {_COPIES}"
        invented = self.ledger.unsent(new)
        assert not invented, f"{self.table}: transactions nobody made: {invented[:5]}"
        return len(new)

    def check_lake(self, client: StreamhouseClient) -> None:
        """Compare the lake with the image."""
        lake = lake_table(client, self.table).scan(selected_fields=("writer", "number")).to_arrow()
        assert Counter(_row_ids(lake)) == self.image.counts, f"{self.table}: the lake differs"

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Judge everything again."""
        self.image.check_unchanged(client)


class KeyChecker:
    """A primary key table: each key has its last version, in lookups and in the changelog."""

    def __init__(self, table: str, ledger: KeyLedger) -> None:
        self.table = table
        self.ledger = ledger
        # bucket -> key -> (version, offset of that row version)
        self.folded: dict[int, dict[int, tuple[int, int]]] = {}
        self._read_to: dict[int, int] = {}
        self._has_all_changes = True

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Return how many keys were judged."""
        allowed = self.ledger.allowed()
        found = self._lookup(client, sorted(allowed))
        for key, versions in self.ledger.allowed().items():
            allowed.setdefault(key, {None}).update(versions)
        for key, version in found.items():
            assert version in allowed[key], (
                f"{self.table}: key {key} has version {version}, allowed are {allowed[key]}"
            )
        self._fold(client)
        if is_quiet:
            self._check_quiet(client, found)
        return len(found)

    @property
    def read_to(self) -> dict[int, int]:
        """How far the changelog was read; empty once some of it had left the log."""
        return dict(self._read_to) if self._has_all_changes else {}

    def _check_quiet(self, client: StreamhouseClient, found: dict[int, int | None]) -> None:
        living = {key: version for key, version in found.items() if version is not None}
        count = client.count(self.table)
        assert count == len(living), f"{self.table}: count is {count}, {len(living)} keys are there"
        if self._has_all_changes:
            folded = {k: v for rows in self.folded.values() for k, (v, _) in rows.items()}
            assert folded == living, f"{self.table}: the changelog's fold is not what lookups find"

    def check_lake(self, client: StreamhouseClient) -> None:
        """Compare the lake, all of it tiered, and the union read with the history."""
        expected = {key: v for key, v in self.ledger.known.items() if v is not None}
        tables = {
            f"lake table {name}": lake_table(client, name)
            .scan(selected_fields=("key", "version"))
            .to_arrow()
            for name in lake_names(client, self.table)
        }
        union = client.read(self.table, columns=["key", "version"])
        for where, rows in (*tables.items(), ("union read", union)):
            columns = (rows.column(name).to_pylist() for name in ("key", "version"))
            assert sorted(zip(*columns, strict=True)) == sorted(expected.items()), (
                f"{self.table}: the {where} of {rows.num_rows} rows differs from the history's"
                f" {len(expected)}"
            )

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Nothing is left to judge: every check looks at every key."""

    def _lookup(self, client: StreamhouseClient, keys: list[int]) -> dict[int, int | None]:
        if not keys:
            return {}
        # Whichever process answers: what was acknowledged by now is found.
        client.positions(self.table)
        rows = client.lookup(self.table, pa.table({"key": keys}, schema=KEYS_ONLY))
        versions = rows.column("version").to_pylist()
        return dict(zip(keys, versions, strict=True))

    def _fold(self, client: StreamhouseClient) -> None:
        """Read the changelog on; every change fits the rows that those before it made."""
        for bucket, positions in client.table_state(self.table).positions.items():
            start = self._read_to.get(bucket, 0)
            if start < positions.log_start_offset:
                self._has_all_changes = False
            if not self._has_all_changes:
                continue
            try:
                for batch in client.read_range(self.table, bucket, start, positions.high_watermark):
                    self.fold_batch(bucket, batch.data, batch.base_offset)
            except OffsetOutOfRangeError:
                self._has_all_changes = False
            self._read_to[bucket] = positions.high_watermark

    def fold_batch(self, bucket: int, changes: pa.RecordBatch, base_offset: int) -> None:
        """Apply changes of the log; each fits the rows that those before it made."""
        rows = self.folded.setdefault(bucket, {})
        names = ("key", "version", "__change_type", "__retracts")
        columns = (changes.column(name).to_pylist() for name in names)
        for offset, (key, version, kind, retracts) in enumerate(
            zip(*columns, strict=True), base_offset
        ):
            before = rows.get(key)
            where = f"{self.table}: offset {offset}, key {key}"
            if kind == INSERT:
                assert before is None, f"{where}: inserted, but it was there"
            else:
                assert before is not None, f"{where}: changed, but it was not there"
                old_version, old_offset = before
                if kind == UPDATE_BEFORE:
                    assert version == old_version, f"{where}: a wrong before image"
                else:
                    assert retracts == old_offset, f"{where}: retracts {retracts}, not {old_offset}"
            if kind in (INSERT, UPDATE_AFTER):
                rows[key] = (version, offset)
            elif kind == DELETE:
                del rows[key]


class KeyTransactionChecker(KeyChecker):
    """Written by transactions only: each changes all keys of its writer, at every cut."""

    def __init__(self, table: str, ledger: KeyLedger) -> None:
        super().__init__(table, ledger)
        self._written: Counter[tuple[int, int]] = Counter()
        self._new: set[tuple[int, int]] = set()

    def check_cut(self, client: StreamhouseClient) -> int:
        """Read on to a cut; every transaction in it is whole, and there once."""
        self._fold(client)
        for writer, version in self._new:
            count = self._written[writer, version]
            assert count == KEYS_PER_WRITER or not self._has_all_changes, (
                f"{self.table}: version {version} of writer {writer} has {count} of"
                f" {KEYS_PER_WRITER} rows"
            )
        judged = len(self._new)
        self._new = set()
        return judged

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        self.check_cut(client)
        return super().check(client, is_quiet=is_quiet)

    def fold_batch(self, bucket: int, changes: pa.RecordBatch, base_offset: int) -> None:
        super().fold_batch(bucket, changes, base_offset)
        names = ("key", "version", "__change_type")
        columns = (changes.column(name).to_pylist() for name in names)
        for key, version, kind in zip(*columns, strict=True):
            if kind in (INSERT, UPDATE_AFTER):
                self._written[key // KEYS_PER_WRITER, version] += 1
                self._new.add((key // KEYS_PER_WRITER, version))


class SchemaChecker:
    """A table whose schema changes: acknowledged columns are there, dropped ones are not."""

    def __init__(self, table: str, ledger: SchemaLedger) -> None:
        self.table = table
        self.ledger = ledger

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge the schema; return how many columns."""
        there, gone = self.ledger.known()
        names = set(client.describe_table(self.table).schema.names)
        assert there <= names, f"{self.table}: added columns are lost: {sorted(there - names)}"
        assert not gone & names, f"{self.table}: dropped columns are back: {sorted(gone & names)}"
        return len(names)

    def check_lake(self, client: StreamhouseClient) -> None:
        """The rows are judged by others; the lake's schema follows with its next round."""

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Nothing is left to judge."""


def lake_names(client: StreamhouseClient, table: str) -> list[str]:
    """Return the lake tables that have the rows of a table."""
    roles = [LakeRole.ROWS]
    if client.describe_table(table).properties().has_batch_layout:
        roles.append(LakeRole.BATCH)
    return [role.lake_name(table) for role in roles]


def lake_table(client: StreamhouseClient, table: str) -> Any:
    """Open the lake table with stock pyiceberg."""
    from pyiceberg.catalog import load_catalog

    catalog = client.lake_catalog()
    properties = dict(catalog.properties)
    if properties["uri"].startswith("sqlite:"):
        # Others write the catalog meanwhile; a machine under load keeps a reader out for longer
        # than the five seconds that SQLite's driver waits by itself.
        properties["uri"] += "?timeout=120"
    return load_catalog(catalog.name, **properties).load_table(f"default.{table}")


def _row_ids(rows: pa.RecordBatch | pa.Table) -> list[RowId]:
    pair = (rows.column(name).to_pylist() for name in ("writer", "number"))
    return list(zip(*pair, strict=True))


def is_unreachable(error: BaseException) -> bool:
    """Whether a reader's error only says that the service is down."""
    return isinstance(error, StreamhouseError) and (error.retriable or error.http_status >= 500)
