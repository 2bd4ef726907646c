"""A table that is dropped and created again under its name: what it has is of its last life.

Each life is a generation: a log table or one by key, with other buckets, and rows that say of which
generation they are. A drop or a create without an answer is repeated until it is told to be done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
    StreamhouseError,
    TableExistsError,
    TableNotFoundError,
)
from tests.support.tier_once import tier_once
from tests.support.union_world import read_layouts
from tests.torture.checkers import lake_table
from tests.torture.writers import LOG_SCHEMA, PATIENCE_S, Gate, Writer, patient_client

__all__ = ["GenerationChecker", "GenerationLedger", "Recreator"]

_ATTEMPTS: Final = 10

Rows = list[tuple[int, int]]
"""(generation, number) of each row, sorted."""


@dataclass
class GenerationLedger:
    """The last generation whose rows were all acknowledged, and how many it has. Thread-safe."""

    generation: int = 0
    row_count: int = 0
    _tables: dict[int, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, generation: int, row_count: int) -> None:
        """Note that a generation is whole."""
        with self._lock:
            self.generation, self.row_count = generation, row_count

    def filling(self, table_id: int, generation: int, row_count: int) -> None:
        """Note which rows a table will have, before they are sent."""
        with self._lock:
            self._tables[table_id] = generation, row_count

    def of_table(self, table_id: int) -> tuple[int, int]:
        """Return the generation of a table, and how many rows it has when it is whole."""
        with self._lock:
            return self._tables.get(table_id, (0, 0))

    def known(self) -> tuple[int, int]:
        """Return the generation and how many rows it has."""
        with self._lock:
            return self.generation, self.row_count


class Recreator(Writer):
    """Drops the table, creates it, fills it; each call is a generation."""

    def __init__(self, gate: Gate, ledger: GenerationLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self._client = patient_client(self.endpoint)
        self._generation = 0

    def write(self) -> int:
        # Some generations live long enough to be tiered.
        threading.Event().wait(self.random.choice((0.0, 0.3, 2.5)))
        self._generation += 1
        is_keyed, count = self.random.random() < 0.5, self.random.choice((1, 40, 400))
        # Its answer is the table's that is there now, whoever owns the shard.
        old_id = self._client.describe_table(self.table).table_id
        self._until_done(lambda: self._client.drop_table(self.table, if_exists=True))
        self._until_done(lambda: self._create(count, is_keyed=is_keyed, old_id=old_id))
        rows = {
            "writer": [self._generation] * count,
            "number": list(range(count)),
            "text": [self.text()] * count,
        }
        data = pa.table(rows, schema=LOG_SCHEMA)
        (self._client.upsert if is_keyed else self._client.append)(self.table, data)
        self.ledger.stored(self._generation, count)
        return count

    def _create(self, count: int, *, is_keyed: bool, old_id: int) -> None:
        try:
            made = self._client.create_table(
                self.table,
                LOG_SCHEMA,
                primary_key=["number"] if is_keyed else [],
                bucket_count=self.random.choice((1, 3)),
                properties={"table.datalake.freshness": "1s"},
            )
        except TableExistsError:
            # An attempt that was not answered has made it.
            made = self._client.describe_table(self.table)
        assert made.table_id != old_id, f"{self.table}: a table that was dropped is there again"
        assert made.is_primary_key_table == is_keyed, f"{self.table}: nobody made it so"
        self.ledger.filling(made.table_id, self._generation, count)

    def _until_done(self, call: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            try:
                call()
                return
            except StreamhouseError:
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)


class GenerationChecker:
    """The table has rows of one generation, the last one or what came after it."""

    def __init__(self, table: str, ledger: GenerationLedger) -> None:
        self.table = table
        self.ledger = ledger

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Return how many rows were judged."""
        generation, row_count = self.ledger.known()
        layouts = self._read(client)
        assert layouts or not is_quiet, f"{self.table} cannot be read"
        for found in layouts:
            generations = {of for of, _ in found}
            assert all(of >= generation for of in generations), (
                f"{self.table}: rows of {generations} after generation {generation} was there"
            )
            assert len(generations) <= 1, f"{self.table}: rows of generations {generations}"
            assert [n for _, n in found] == list(range(len(found))), (
                f"{self.table}: {len(found)} rows, and not each once"
            )
            if is_quiet:
                self._check_last(self.table, found)
        return row_count

    def _check_last(self, where: str, found: Rows) -> None:
        generation, row_count = self.ledger.known()
        wanted = [(generation, number) for number in range(row_count)]
        assert found == wanted, (
            f"{where}: {len(found)} rows, from {found[:1]}; wanted {row_count} of {generation}"
        )

    def _read(self, client: StreamhouseClient) -> list[Rows]:
        """Return what each layout has; nothing if each time the table was replaced meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                state = client.table_state(self.table)
                return [
                    _rows(r)
                    for r in read_layouts(StorageClient.of(client), state, columns="writer,number")
                ]
            except (OffsetOutOfRangeError, SnapshotNotFoundError, TableNotFoundError):
                continue
        return []

    def check_lake(self, client: StreamhouseClient) -> None:
        """The lake table of the name is this generation's, with all of its rows."""
        rows = lake_table(client, self.table).scan(selected_fields=("writer", "number")).to_arrow()
        self._check_last(f"the lake table {self.table}", _rows(rows))

    def check_at_end(self, client: StreamhouseClient) -> None:
        """All of it is read and tiered."""
        self.check(client, is_quiet=True)
        tier_once(client, self.table)


def _rows(table: pa.Table) -> Rows:
    columns = (table.column(name).to_pylist() for name in ("writer", "number"))
    return sorted(zip(*columns, strict=True))
