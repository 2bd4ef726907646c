"""Log tables whose rows another engine changes in the lake, and what every reader has of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pyarrow as pa
from duckdb import DuckDBPyConnection
from pyiceberg.catalog import load_catalog

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.maintain import command
from tests.support.foreign_changes import ForeignModel, first_name
from tests.support.live_tables import attach_live
from tests.support.tier_once import tier_once
from tests.support.waiting import wait_until

__all__ = ["ForeignTable", "attached_duckdb"]


@contextlib.contextmanager
def attached_duckdb(endpoint: str) -> Iterator[DuckDBPyConnection]:
    """Open DuckDB with both warehouses, as `lake` and `live`; it may update sorted tables."""
    with connect() as opened:
        opened.execute(
            f"ATTACH 'streamhouse' AS lake (TYPE ICEBERG, ENDPOINT '{endpoint}/iceberg',"
            " AUTHORIZATION_TYPE 'none')"
        )
        attach_live(opened, endpoint)
        opened.execute("SET unsafe_iceberg_ignore_sort_order = true")
        opened.execute("SET ignore_target_file_size_for_partitioned_tables = true")
        yield opened


class ForeignTable:
    """A log table, its model, and the engine that changes its rows."""

    def __init__(self, client: StreamhouseClient, duckdb: DuckDBPyConnection, name: str) -> None:
        self.path = f"default.{name}"
        self.model = ForeignModel()
        self._client, self._duckdb, self._name = client, duckdb, name
        self._addresses: dict[int, tuple[int, int]] = {}

    def append(self, count: int) -> None:
        rows = self.model.new_rows(count)
        is_log_table = not self._client.describe_table(self.path).is_primary_key_table
        (self._client.append if is_log_table else self._client.upsert)(self.path, rows)
        self._check_addresses()

    def upsert_again(self, ids: Iterable[int]) -> None:
        """Write rows of a key table anew: each has another address from now on."""
        rows = self.model.changed_rows(ids)
        self._client.upsert(self.path, rows)
        for key in rows["id"].to_pylist():
            del self._addresses[key]

    def tier(self) -> None:
        tier_once(self._client, self.path)
        self.model.tiered()

    def change(self, seed: int, count: int) -> None:
        for statement in self.model.statements(seed, count):
            self._duckdb.execute(statement.format(t=f'lake."default".{self._name}'))
            self.check(statement)

    def maintain(self) -> None:
        command.main([self.path, "--endpoint", self._client.endpoint], standalone_mode=False)

    def check(self, after: str = "") -> None:
        """Every reader has the rows of the model, and each row its first address."""
        self._check_addresses()
        rows = self._client.read(self.path, columns=["id", "name"])
        assert _pairs(rows) == self.model.rows, after
        assert self._client.count(self.path) == len(self.model.rows), after
        for warehouse, expected in (("lake", self.model.lake_rows), ("live", self.model.rows)):
            query = f'SELECT id, name FROM {warehouse}."default".{self._name} ORDER BY id'
            assert self._duckdb.execute(query).fetchall() == expected, (warehouse, after)
        uri = f"{self._client.endpoint}/iceberg"
        lake_table = load_catalog("c", type="rest", uri=uri).load_table(self.path)
        scanned = lake_table.scan(selected_fields=("id", "name")).to_arrow()
        assert _pairs(scanned) == self.model.lake_rows, after

    def _check_addresses(self) -> None:
        rows = self._client.read(self.path, columns=["id", "__bucket", "__offset"])
        for key, *address in zip(
            *(rows[name].to_pylist() for name in rows.schema.names), strict=True
        ):
            assert self._addresses.setdefault(key, tuple(address)) == tuple(address)

    def check_stream(self) -> None:
        """A stream of all rows has those of the lake, as far as the log has forgotten them."""
        while len({self._addresses[key][0] for key in self.model.log}) < len(self._log_starts()):
            self.append(1)
        wait_until(lambda: min(self._log_starts()) > 0, "the log has forgotten rows")
        starts: list[int] = []
        while starts != (starts := self._log_starts()):
            rows = self._followed()
        expected = {
            key: first_name(key) if offset >= starts[bucket] else self.model.lake.get(key)
            for key, (bucket, offset) in self._addresses.items()
        }
        assert sorted(rows) == sorted(row for row in expected.items() if row[1] is not None)

    def _log_starts(self) -> list[int]:
        return [at.log_start_offset for _, at in sorted(self._client.positions(self.path).items())]

    def _followed(self) -> list[tuple[int, str]]:
        """The rows of a stream up to those in the log alone, which are the last of each bucket."""
        rows: list[tuple[int, str]] = []
        with self._client.subscribe(self.path, start="full", columns=["id", "name"]) as batches:
            while not self.model.log.keys() <= {key for key, _ in rows}:
                for batch in batches.poll(60):
                    rows += _pairs(batch.data)
        return rows


def _pairs(rows: pa.Table | pa.RecordBatch) -> list[tuple[int, str]]:
    return sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True))
