"""Primary key tables whose rows age: the service deletes what nobody has written for so long.

Such a delete is a `-D` that nobody asked for. It is right if the version it takes away was older
than the time to live, by the service's own timestamps; whatever has gone does not come back, and at
every cut lookups, both layouts and the fold of the changelog have the same rows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import LogBatch, StorageClient
from streamhouse.core.errors import OffsetOutOfRangeError, SnapshotNotFoundError
from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER
from streamhouse.core.model.table_state import TableState
from tests.support.tier_once import tier_once
from tests.support.union_world import read_layouts
from tests.torture.checkers import KeyChecker, lake_names, lake_table
from tests.torture.key_writers import KeyWriter
from tests.torture.ledger import KeyLedger
from tests.torture.writers import KEYS_ONLY, key_rows

__all__ = ["AgingKeyChecker", "AgingKeyLedger", "AgingKeyWriter"]

_ATTEMPTS: Final = 10
_GONE_WAIT_S: Final = 60.0
# Every third key is deleted now and then by its writer, too; the others only by the service.
_DELETED: Final = 3

Versions = dict[int, int]


@dataclass
class AgingKeyLedger(KeyLedger):
    """The history of a table with a time to live.

    `sent_us`: key -> when its last acknowledged write was sent first; its version is not older.
    """

    ttl_us: int = 0
    sent_us: dict[int, int] = field(default_factory=dict)
    _sending_us: dict[int, int] = field(default_factory=dict)

    def sending(self, versions: Mapping[int, int | None]) -> None:
        super().sending(versions)
        now_us = _now_us()
        with self._lock:
            self._sending_us.update(dict.fromkeys(versions, now_us))

    def stored(self, versions: Mapping[int, int | None]) -> None:
        with self._lock:
            self.sent_us.update((key, self._sending_us[key]) for key in versions)
        super().stored(versions)

    def allowed(self) -> dict[int, set[int | None]]:
        """Return the versions each key may have: none, too, once the last one may be too old."""
        allowed = super().allowed()
        for key in self.old_keys():
            allowed.setdefault(key, {None}).add(None)
        return allowed

    def old_keys(self) -> set[int]:
        """Return the keys whose last acknowledged write may be older than the time to live."""
        old_us = _now_us() - self.ttl_us
        with self._lock:
            return {key for key, sent_us in self.sent_us.items() if sent_us <= old_us}

    def resting(self) -> dict[int, tuple[int | None, int]]:
        """Return key -> its last write, and when it was sent, of keys with no write under way."""
        with self._lock:
            return {
                key: (version, self.sent_us[key])
                for key, version in self.known.items()
                if key not in self.open
            }


class AgingKeyWriter(KeyWriter):
    """Upserts, writes what is there once more, which makes it young, and deletes some keys."""

    ledger: AgingKeyLedger

    def write(self) -> int:
        # Keys must have the time to grow old.
        threading.Event().wait(self.random.uniform(0.0, 0.2))
        keys, draw = self.some_keys()[:50], self.random.random()
        self.version += 1
        versions: dict[int, int | None] = dict.fromkeys(keys, self.version)
        if draw < 0.2:
            keys = [key for key in keys if key % _DELETED == 0] or [keys[0] // _DELETED * _DELETED]
            versions = dict.fromkeys(keys)
        elif draw < 0.5:
            known = self.ledger.known.get(keys[0]) or self.version
            keys = [key for key in keys if self.ledger.known.get(key) == known] or keys[:1]
            versions = dict.fromkeys(keys, known)
        sent_us = _now_us()
        self.ledger.sending(versions)
        version = versions[keys[0]]
        if version is None:
            self.client.delete(self.table, pa.table({"key": keys}, schema=KEYS_ONLY))
        else:
            self.client.upsert(self.table, key_rows(keys, version, "x" * (version % 50)))
        self.ledger.stored(versions)
        row = self.client.lookup_one(self.table, key=keys[0])
        found = None if row is None else row["version"]
        is_old = found is None and _now_us() - sent_us >= self.ledger.ttl_us
        assert found == version or is_old, (
            f"{self.table}: key {keys[0]} is {found} after {version} was written"
        )
        return len(keys)


class AgingKeyChecker(KeyChecker):
    """As of any primary key table, but that old rows may have gone, for good."""

    ledger: AgingKeyLedger

    def __init__(self, table: str, ledger: AgingKeyLedger) -> None:
        super().__init__(table, ledger)
        self.rows_aged = 0
        # Of the versions in the changelog, (bucket, offset) -> when they were written.
        self._written_us: dict[tuple[int, int], int] = {}
        # key -> when the write was sent whose version was seen to have gone.
        self._gone_us: dict[int, int] = {}

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Return how many keys were judged."""
        allowed = self.ledger.allowed()
        resting = self.ledger.resting()
        first = self._folded_to(client, client.table_state(self.table))
        found = self._lookup(client, sorted(allowed))
        count = client.count(self.table)
        last = self._folded_to(client, client.table_state(self.table))
        for key, versions in self.ledger.allowed().items():
            allowed.setdefault(key, {None}).update(versions)
        for key, version in found.items():
            assert version in allowed[key], (
                f"{self.table}: key {key} has version {version}, allowed are {allowed[key]}"
            )
        self._check_gone(resting, found)
        if is_quiet:
            self._check_quiet_cut(client, found, count, (first, last))
        self.check_cut(client)
        return len(found)

    def _check_quiet_cut(
        self,
        client: StreamhouseClient,
        found: Mapping[int, int | None],
        count: int,
        folds: tuple[Versions | None, Versions | None],
    ) -> None:
        """Nobody writes, so that rows only go: those found are between those before and after."""
        living = _living(found)
        later = _living(self._lookup(client, sorted(found)))
        assert later.items() <= living.items(), _differs(f"{self.table}, later", later, living)
        assert len(later) <= count <= len(living), f"{self.table}: count is {count}"
        first, last = folds
        if first is not None and last is not None:
            assert living.items() <= first.items(), _differs(self.table, living, first)
            assert last.items() <= living.items(), _differs(self.table, living, last)

    def check_cut(self, client: StreamhouseClient) -> int:
        """At a cut both layouts have what the fold of the changelog has; return how many rows."""
        for _ in range(_ATTEMPTS):
            state = client.table_state(self.table)
            folded = self._folded_to(client, state)
            try:
                layouts = read_layouts(StorageClient.of(client), state, columns="key,version")
            except (OffsetOutOfRangeError, SnapshotNotFoundError):
                # A round moved the rows between the cut and the read, and what had them is gone.
                continue
            found = [_versions(self.table, rows) for rows in layouts]
            for name, versions in zip(("rows' own", "batch"), found, strict=False):
                wanted = found[0] if folded is None else folded
                assert versions == wanted, _differs(
                    f"{self.table}, {name} layout", versions, wanted
                )
            return len(found[0])
        return 0

    def _check_gone(
        self, resting: Mapping[int, tuple[int | None, int]], found: Mapping[int, int | None]
    ) -> None:
        """What has gone stays so until its key is written again."""
        again = self.ledger.resting()
        for key, write in resting.items():
            version, sent_us = write
            if version is None or again.get(key) != write or key not in found:
                continue
            if found[key] is None:
                self._gone_us[key] = sent_us
            assert found[key] is None or self._gone_us.get(key) != sent_us, (
                f"{self.table}: version {version} of key {key} had gone, and is back"
            )

    def _folded_to(self, client: StreamhouseClient, state: TableState) -> Versions | None:
        """Fold the changelog on to a cut; None if some of it has left the log."""
        for bucket, at in state.positions.items():
            start = self._read_to.get(bucket, 0)
            if start < at.log_start_offset or not self._has_all_changes:
                self._has_all_changes = False
                return None
            try:
                for batch in client.read_range(self.table, bucket, start, at.high_watermark):
                    self._check_deletes(batch)
                    self.fold_batch(bucket, batch.data, batch.base_offset)
                    self._read_to[bucket] = batch.end_offset
            except OffsetOutOfRangeError:
                self._has_all_changes = False
                return None
        return {key: v for rows in self.folded.values() for key, (v, _) in rows.items()}

    def _check_deletes(self, batch: LogBatch) -> None:
        """A row that its writer does not delete was old when it was deleted."""
        names = ("key", "__change_type", "__retracts")
        columns = (batch.data.column(name).to_pylist() for name in names)
        for offset, (key, kind, retracts) in enumerate(
            zip(*columns, strict=True), batch.base_offset
        ):
            if kind in (INSERT, UPDATE_AFTER):
                self._written_us[batch.bucket, offset] = batch.timestamp_us
            elif kind == DELETE:
                age_us = batch.timestamp_us - self._written_us[batch.bucket, retracts]
                is_old = age_us >= self.ledger.ttl_us
                assert is_old or key % _DELETED == 0, (
                    f"{self.table}, bucket {batch.bucket}, offset {offset}: key {key} was deleted"
                    f" at the age of {age_us} us"
                )
                self.rows_aged += is_old

    def check_lake(self, client: StreamhouseClient) -> None:
        """Every lake table, all of it tiered, has all young rows, and no version but the last."""
        known = {key: v for key, v in self.ledger.known.items() if v is not None}
        for name in lake_names(client, self.table):
            rows = lake_table(client, name).scan(selected_fields=("key", "version")).to_arrow()
            found = _versions(name, rows)
            assert found.items() <= known.items(), _differs(name, found, known)
            old = self.ledger.old_keys()
            young = {key: version for key, version in known.items() if key not in old}
            assert young.items() <= found.items(), _differs(name, found, young)

    def check_at_end(self, client: StreamhouseClient) -> None:
        """All rows leave in the end, and those that come after them are there."""
        self.check_lake(client)
        # As long as rows leave it is the machine that is slow.
        least, deadline_s = math.inf, 0.0
        pause = threading.Event()
        while left := client.count(self.table):
            if left < least:
                least, deadline_s = left, time.monotonic() + _GONE_WAIT_S
            assert time.monotonic() < deadline_s, f"{self.table}: {left} rows do not leave"
            pause.wait(0.05)
        tier_once(client, self.table)
        self.check(client, is_quiet=True)
        for name in lake_names(client, self.table):
            left = lake_table(client, name).scan().to_arrow().num_rows
            assert not left, f"{name}: {left} rows have not left it"
        versions: dict[int, int | None] = dict.fromkeys(self.ledger.known, -1)
        self.ledger.sending(versions)
        client.upsert(self.table, key_rows(list(versions), -1, "late"))
        self.ledger.stored(versions)
        self.check(client, is_quiet=True)
        tier_once(client, self.table)


def _versions(where: str, rows: pa.Table) -> Versions:
    keys = rows.column("key").to_pylist()
    found = dict(zip(keys, rows.column("version").to_pylist(), strict=True))
    assert len(found) == len(keys), f"{where}: {len(keys) - len(found)} keys are there twice"
    return found


def _living(found: Mapping[int, int | None]) -> Versions:
    return {key: version for key, version in found.items() if version is not None}


def _differs(where: str, found: Versions, wanted: Versions) -> str:
    missing, odd = wanted.items() - found.items(), found.items() - wanted.items()
    return (
        f"{where}: {len(missing)} rows are missing, as {min(missing, default=None)}, and"
        f" {len(odd)} are others, as {min(odd, default=None)}"
    )


def _now_us() -> int:
    return time.time_ns() // 1000
