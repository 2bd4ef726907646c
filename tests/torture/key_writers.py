"""Writer threads of the torture test for primary key tables and for schemas."""

from __future__ import annotations

import threading
import time
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    TransactionNotFoundError,
)
from tests.torture.ledger import KeyLedger, SchemaLedger
from tests.torture.writers import (
    KEYS_ONLY,
    KEYS_PER_WRITER,
    PATIENCE_S,
    Gate,
    Hold,
    Writer,
    key_rows,
    patient_client,
)

__all__ = ["AddingWriter", "KeyTransactionWriter", "KeyWriter", "SchemaChanger", "VersionedWriter"]


class KeyWriter(Writer):
    """Upserts and deletes its own keys, and reads its own writes."""

    def __init__(self, gate: Gate, ledger: KeyLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self.client = patient_client(self.endpoint)
        self.version = 0

    def some_keys(self) -> list[int]:
        """Return some of its own keys."""
        first = self.number * KEYS_PER_WRITER
        count = self.random.choice((1, 5, 50, KEYS_PER_WRITER))
        return self.random.sample(range(first, first + KEYS_PER_WRITER), count)

    def write(self) -> int:
        keys = self.some_keys()
        self.version += 1
        if self.random.random() < 0.2:
            versions: dict[int, int | None] = dict.fromkeys(keys)
            self.ledger.sending(versions)
            self.client.delete(self.table, pa.table({"key": keys}, schema=KEYS_ONLY))
        else:
            versions = dict.fromkeys(keys, self.version)
            self.ledger.sending(versions)
            self.client.upsert(self.table, key_rows(keys, self.version, self.text()))
        self.ledger.stored(versions)
        self._check_own(keys[0], versions[keys[0]])
        return len(keys)

    def _check_own(self, key: int, version: int | None) -> None:
        row = self.client.lookup_one(self.table, key=key)
        found = None if row is None else row["version"]
        assert found == version, f"{self.table}: key {key} is {found} after {version} was written"


class AddingWriter(KeyWriter):
    """Adds 1 to its keys, in a table that adds up: what is applied twice shows for ever."""

    def write(self) -> int:
        keys = self.some_keys()
        sums = {key: (self.ledger.known.get(key) or 0) + 1 for key in keys}
        self.ledger.sending(sums)
        self.client.upsert(self.table, key_rows(keys, 1, self.text()))
        self.ledger.stored(sums)
        return len(keys)


class VersionedWriter(KeyWriter):
    """Upserts versions of any age, in a table that keeps the greatest."""

    def write(self) -> int:
        keys = self.some_keys()
        version = self.random.randrange(1 << 20)
        kept = {key: max(self.ledger.known.get(key) or 0, version) for key in keys}
        self.ledger.sending(kept)
        self.client.upsert(self.table, key_rows(keys, version, self.text()))
        self.ledger.stored(kept)
        return len(keys)


class KeyTransactionWriter(KeyWriter):
    """Upserts all of its keys to one version, by a transaction, until it is told."""

    _PARTS: Final = 3

    def __init__(self, gate: Gate, ledger: KeyLedger, **common: object) -> None:
        super().__init__(gate, ledger, **common)
        self.hold = Hold()

    def write(self) -> int:
        self.version += 1
        first = self.number * KEYS_PER_WRITER
        keys = list(range(first, first + KEYS_PER_WRITER))
        self.ledger.sending(dict.fromkeys(keys, self.version))
        deadline_s = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            try:
                self._try(keys)
                break
            except StreamhouseError:
                # Its transaction may be gone; the version decides whether it happened.
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)
        self.ledger.stored(dict.fromkeys(keys, self.version))
        self._check_own(keys[0], self.version)
        return len(keys)

    def _try(self, keys: list[int]) -> None:
        transaction = self.client.begin_transaction(
            self.table, operation="upsert", app_id=f"keys-{self.number}", version=self.version
        )
        if transaction.is_skipped:
            return
        size = len(keys) // self._PARTS
        parts = [
            transaction.stage(key_rows(keys[start : start + size], self.version, self.text()))
            for start in range(0, len(keys), size)
        ]
        # A part that is not named is dropped.
        transaction.stage(key_rows(keys, -self.version, ""))
        if self.random.random() < 0.1:
            transaction.abort()
            raise TransactionNotFoundError("aborted on purpose")
        self.hold.pass_by()
        transaction.commit(parts)


class SchemaChanger(Writer):
    """Adds, renames and drops columns that nobody else uses, while others write.

    Now and then the table gets another batch layout, or none.
    """

    _LAYOUT: Final = "table.datalake.batch-layout."
    LAYOUT_CHANCE = 0.06

    def __init__(self, gate: Gate, ledger: SchemaLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self._client = patient_client(self.endpoint)
        self._made = 0

    def write(self) -> int:
        # Seldom: each change is a new version for good.
        threading.Event().wait(self.random.uniform(0.1, 0.5))
        if self.random.random() < self.LAYOUT_CHANCE:
            self._lay_out()
            return 0
        old = self.random.choice(sorted(self.ledger.there)) if self.ledger.there else None
        if old is None or self.random.random() < 0.5:
            self._made += 1
            self._change({"add": f"extra_{self._made}", "type": "string"})
        elif self.random.random() < 0.5:
            self._made += 1
            self._change({"rename": old, "to": f"extra_{self._made}"})
        else:
            self._change({"drop": old, "confirm": old})
        return 0

    def _lay_out(self) -> None:
        first, second, *_ = self._client.describe_table(self.table).schema.names
        layout = self.random.choice(
            (
                {},
                {"sort": f"{second}, {first}"},
                {"sort": f"zorder({first}, {second})", "partition": f"bucket(2, {second})"},
                {"partition": f"truncate(1000, {first})"},
            )
        )
        removals = [f"{self._LAYOUT}{key}" for key in ("sort", "partition") if key not in layout]
        updates = {f"{self._LAYOUT}{key}": value for key, value in layout.items()}
        deadline_s = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            try:
                self._client.alter_properties(self.table, updates=updates, removals=removals)
                return
            except StreamhouseError:
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)

    def _change(self, change: dict[str, str]) -> None:
        gone = {change[verb] for verb in ("rename", "drop") if verb in change}
        come = {change[verb] for verb in ("add", "to") if verb in change}
        self.ledger.changing(gone | come)
        deadline_s = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            try:
                self._client.alter_schema(self.table, [change])
                break
            except InvalidRequestError:
                # An attempt that was not answered has done it.
                names = set(self._client.describe_table(self.table).schema.names)
                assert come <= names, f"{self.table}: {change} is refused, but not done"
                assert not gone & names, f"{self.table}: {change} is refused, but not done"
                break
            except StreamhouseError:
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)
        self.ledger.changed(gone=gone, come=come)


class LayoutChanger(SchemaChanger):
    """One that changes the layout as often as the columns."""

    LAYOUT_CHANCE = 0.5
