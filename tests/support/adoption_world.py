"""A lake that outlives the services that tier to it, and what must be in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import AlreadyExistsError
from tests.support.object_store import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, ObjectStore
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = [
    "KEYED",
    "LOG",
    "SCHEMA",
    "Lake",
    "Rows",
    "adopt",
    "by_id",
    "check",
    "filled",
    "go_on",
    "rows",
]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), metadata={"comment": "of the thing"}),
        pa.field("small", pa.int8()),
    ]
)
Rows = dict[int, dict[str, Any]]
LOG, KEYED = "shop.events", "shop.items"


def rows(start: int, end: int, *, mark: str = "n") -> pa.Table:
    lines = [{"id": i, "name": f"{mark}{i}", "small": i % 100} for i in range(start, end)]
    return pa.Table.from_pylist(lines, SCHEMA)


def by_id(table: pa.Table) -> Rows:
    rows = table.to_pylist()
    found = {row["id"]: {k: v for k, v in row.items() if not k.startswith("__")} for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


class Lake:
    """A catalog that outlives the services that use it; its files are in a folder or `store`."""

    def __init__(self, folder: Path, *, store: ObjectStore | None = None) -> None:
        self.folder = folder
        self.store = store
        (folder / "warehouse").mkdir(parents=True)
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder / 'catalog.db'}",
            "warehouse": f"file://{folder / 'warehouse'}",
        }
        self._keys: dict[str, str] = {}
        if store is not None:
            self.properties["warehouse"] = f"s3://{BUCKET}/{folder.parent.name}"
            self.properties |= {"s3.endpoint": store.endpoint, "s3.region": REGION}
            self._keys = {"s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET_KEY}

    @contextlib.contextmanager
    def service(
        self, name: str, *, options: Sequence[str] = (), **more: Any
    ) -> Iterator[tuple[ServiceProcess, StreamhouseClient]]:
        """A service with this catalog and a data directory of that name."""
        given = [*options]
        given += [f"--catalog-property={key}={value}" for key, value in self.properties.items()]
        if self.store is not None:
            given.append("--lake-credentials=shared")
            more = {"env": self.store.environment(), **more}
        with (
            ServiceProcess(self.folder / name, *given, **more) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            yield service, client

    def lose(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    @contextlib.contextmanager
    def table(self, name: str) -> Iterator[Table]:
        properties = {**self.properties, **self._keys}
        with contextlib.closing(load_catalog("streamhouse", **properties)) as catalog:
            yield catalog.load_table(name)

    def judged(self, name: str) -> Rows:
        """The rows as pyiceberg and DuckDB find them, which is alike."""
        with self.table(name) as table:
            found = by_id(table.scan().to_arrow())
            query = f"SELECT id, name, small FROM iceberg_scan('{table.metadata_location}')"
            with connect() as duckdb:
                if self.store is not None:
                    duckdb.execute(self.store.duckdb_secret())
                rows = duckdb.execute(query).fetchall()
        assert sorted(rows) == [(i, r["name"], r["small"]) for i, r in sorted(found.items())]
        return found


def filled(client: StreamhouseClient, **properties: str) -> tuple[Rows, Rows]:
    """Make both tables, tier some rows, leave others in the log; return the tiered ones."""
    client.create_database("shop")
    client.create_table(LOG, SCHEMA, bucket_count=3, properties={"table.log.ttl": "1h"})
    client.create_table(
        KEYED, SCHEMA, primary_key=["id"], bucket_count=2, properties=dict(properties)
    )
    client.append(LOG, rows(0, 700))
    client.upsert(KEYED, rows(0, 700))
    tier_once(client)
    client.append(LOG, rows(700, 900))
    client.upsert(KEYED, rows(100, 300, mark="changed"))
    client.delete(KEYED, rows(0, 50).select(["id"]))
    tier_once(client)
    tiered = by_id(client.read(LOG)), by_id(client.read(KEYED))
    client.append(LOG, rows(900, 950))
    client.upsert(KEYED, rows(650, 750, mark="lost"))
    return tiered


def adopt(client: StreamhouseClient) -> None:
    with contextlib.suppress(AlreadyExistsError):
        client.create_database("shop")
    for name in (LOG, KEYED):
        client.adopt_table(name, force=True)


def check(client: StreamhouseClient, log: Rows, keyed: Rows) -> None:
    """Every way to read says the same as the model."""
    assert by_id(client.read(LOG)) == log
    assert by_id(client.read(KEYED)) == keyed
    assert client.count(KEYED) == len(keyed)
    keys = pa.table({"id": range(1_000)}, schema=pa.schema([SCHEMA.field("id")]))
    found = {i: r for i, r in enumerate(client.lookup(KEYED, keys).to_pylist()) if r["__found"]}
    assert {i: r["name"] for i, r in found.items()} == {i: r["name"] for i, r in keyed.items()}


def go_on(client: StreamhouseClient, lake: Lake, log: Rows, keyed: Rows) -> None:
    """Write through the new service, tier, and ask every engine."""
    before = {b: p.high_watermark for b, p in client.positions(LOG).items()}
    given = client.append(LOG, rows(900, 980, mark="new"))
    assert all(start >= before[bucket] for bucket, (start, _) in given.items())
    client.upsert(KEYED, rows(250, 720, mark="newer"))
    client.delete(KEYED, rows(300, 310).select(["id"]))
    log |= by_id(rows(900, 980, mark="new"))
    keyed |= by_id(rows(250, 720, mark="newer"))
    for key in range(300, 310):
        del keyed[key]
    check(client, log, keyed)
    tier_once(client)
    check(client, log, keyed)
    assert lake.judged(LOG) == log
    assert lake.judged(KEYED) == keyed
