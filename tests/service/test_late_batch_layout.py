"""Tables that get a batch layout when their log has lost rows: a real service, real workers."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ForbiddenError

from streamhouse.api.client import StreamhouseClient
from streamhouse.tiering.round._round import BATCH_STEPS
from tests.support.command_line import streamhouse
from tests.support.python_process import run_python
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("place", pa.struct([("city", pa.string()), ("tags", pa.list_(pa.int8()))])),
    ]
)
OPTIONS = ("--retention-interval-ms", "50", "--tiering-lease-ms", "1s")
PROPERTIES = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
SORT = "table.datalake.batch-layout.sort"
STEP = 2_000


def _rows(number: int, start: int, end: int) -> pa.Table:
    rows = [
        {
            "id": i,
            "region": f"r{(i + number) % 5}",
            "place": None if i % 7 == 0 else {"city": f"c{number}" * 5, "tags": [i % 9, None]},
        }
        for i in range(start, end)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


class Tables:
    """A log table and one with a primary key, and the rows they must have."""

    def __init__(self, client: StreamhouseClient) -> None:
        self.client = client
        self.logged: dict[int, Any] = {}
        self.keyed: dict[int, Any] = {}
        self.number = 0
        client.create_table("logged", SCHEMA, bucket_count=2, properties=PROPERTIES)
        client.create_table(
            "keyed", SCHEMA, primary_key=["id"], bucket_count=2, properties=PROPERTIES
        )

    def write(self) -> None:
        """Append, change and delete rows."""
        self.number += 1
        start = len(self.logged)
        rows = _rows(self.number, start, start + STEP)
        self.client.append("logged", rows)
        self.logged |= {row["id"]: row for row in rows.to_pylist()}
        changed = _rows(self.number, self.number * 100, self.number * 100 + STEP)
        self.client.upsert("keyed", changed)
        self.keyed |= {row["id"]: row for row in changed.to_pylist()}
        gone = range(self.number * 100, self.number * 100 + 50)
        self.client.delete("keyed", _rows(0, gone.start, gone.stop).select(["id"]))
        for key in gone:
            del self.keyed[key]

    def lose_log(self) -> None:
        """Go on until retention has taken the beginning of every log."""
        for _ in range(200):
            self.write()
            tier_once(self.client)
            positions = [self.client.positions(name) for name in ("logged", "keyed")]
            if all(at.log_start_offset > 0 for found in positions for at in found.values()):
                return
        raise AssertionError("retention never came")

    def check(self) -> None:
        """Compare what each reader finds, by a filter that may choose the layout and without."""
        for name, rows in (("logged", self.logged), ("keyed", self.keyed)):
            expected = [rows[key] for key in sorted(rows)]
            assert self.client.read(name).sort_by("id").to_pylist() == expected
            found = self.client.read(name, where="region = 'r1'").sort_by("id").to_pylist()
            assert found == [row for row in expected if row["region"] == "r1"]

    def in_layout(self, name: str) -> list[Any]:
        """The rows of the layout, as stock pyiceberg reads them."""
        described = self.client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        try:
            table = catalog.load_table(("default", f"{name}$batch"))
            found = table.scan(selected_fields=tuple(SCHEMA.names)).to_arrow()
            return found.sort_by("id").to_pylist()
        finally:
            catalog.close()

    def check_layouts(self) -> None:
        self.check()
        for name, rows in (("logged", self.logged), ("keyed", self.keyed)):
            assert self.in_layout(name) == [rows[key] for key in sorted(rows)]
            state = self.client.table_state(name)
            assert state.lake.batch is not None
            tops = {bucket: at.high_watermark for bucket, at in state.positions.items()}
            assert state.lake.batch.tiered_offsets == tops

    def go_on(self) -> None:
        """Two more rounds; both layouts have all rows after each."""
        for _ in range(2):
            self.write()
            tier_once(self.client)
            self.check_layouts()


def _kill_worker(endpoint: str, step: str) -> None:
    done = run_python(["-m", "tests.support.doomed_worker", endpoint, step])
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("step", BATCH_STEPS)
def test_it_has_every_row_though_worker_and_service_are_killed(tmp_path: Path, step: str) -> None:
    with ServiceProcess(tmp_path, *OPTIONS) as service:
        with StreamhouseClient(service.endpoint) as client:
            tables = Tables(client)
            tables.lose_log()
            tables.write()
            for name in ("logged", "keyed"):
                streamhouse(
                    *("alter", name, "--endpoint", service.endpoint),
                    *("--set", f"{SORT}=region, id"),
                )
            tables.check()
            _kill_worker(service.endpoint, step)
            tables.check()
        service.kill()
    with ServiceProcess(tmp_path, *OPTIONS) as service:
        with StreamhouseClient(service.endpoint) as client:
            tables.client = client
            tables.check()
            tables.go_on()
        assert service.terminate() == 0
    streamhouse("check", "--data-dir", tmp_path, "--lake-rows")


def test_the_schema_may_have_changed_before(tmp_path: Path) -> None:
    """Nested fields have other ids in a lake table that was made later."""
    with ServiceProcess(tmp_path, *OPTIONS) as service:
        with StreamhouseClient(service.endpoint) as client:
            tables = Tables(client)
            tables.lose_log()
            client.drop_column("keyed", "place", confirm="place")
            client.rename_column("keyed", "region", "area")
            client.add_column("keyed", "region", pa.string(), first=True)
            spot = pa.list_(pa.struct([("x", pa.int32()), ("y", pa.string())]))
            client.add_column("keyed", "spot", spot)
            new = [
                {"id": i, "area": "a", "region": "new", "spot": [{"x": i, "y": f"{i}"}]}
                for i in range(100)
            ]
            schema = client.describe_table("keyed").schema.to_arrow()
            client.upsert("keyed", pa.Table.from_pylist(new, schema=schema))
            tier_once(client)
            expected = client.read("keyed").sort_by("id")
            assert expected.num_rows == len(tables.keyed.keys() | range(100))

            client.alter_properties("keyed", updates={SORT: "area, id"})
            tier_once(client)

            described = client.lake_catalog()
            catalog = load_catalog(described.name, **described.properties)
            files = list(catalog.load_table(("default", "keyed$batch")).scan().plan_files())
            catalog.close()
            assert not any(file.delete_files for file in files)
            # Not by pyiceberg, which makes empty lists of null ones whose elements are structs.
            paths = [file.file.file_path.removeprefix("file://") for file in files]
            found = pa.concat_tables(pq.read_table(path) for path in paths).sort_by("id")
            assert found.select(expected.column_names).to_pylist() == expected.to_pylist()
            assert client.read("keyed", where="area = 'a'").num_rows == 100
        assert service.terminate() == 0


@pytest.mark.parametrize("access", [pytest.param("direct", marks=pytest.mark.long), "service"])
def test_a_layout_is_changed_dropped_and_given_again(tmp_path: Path, access: str) -> None:
    with ServiceProcess(tmp_path, *OPTIONS, "--catalog-access", access) as service:
        with StreamhouseClient(service.endpoint) as client:
            tables = Tables(client)
            tables.lose_log()
            layouts = (
                {SORT: "region, id"},
                {SORT: "zorder(id, region)", "table.datalake.batch-layout.partition": "region"},
                None,
                {"table.datalake.batch-layout.partition": "bucket(3, id)"},
            )
            for layout in layouts:
                for name in ("logged", "keyed"):
                    keys = (SORT, "table.datalake.batch-layout.partition")
                    removals = [key for key in keys if key not in (layout or {})]
                    client.alter_properties(name, updates=layout or {}, removals=removals)
                    assert client.table_state(name).lake.batch is None
                tables.check()
                tables.write()
                tier_once(client)
                if layout is None:
                    tables.check()
                    tables.lose_log()
                    assert client.table_state("keyed").lake.batch is None
                else:
                    tables.check_layouts()
        assert service.terminate() == 0
    streamhouse("check", "--data-dir", tmp_path, "--lake-rows")


@pytest.mark.parametrize(
    "step", ["", "committed", *(pytest.param(step, marks=pytest.mark.long) for step in BATCH_STEPS)]
)
def test_a_layout_is_given_again_after_its_lake_table_was_dropped(
    tmp_path: Path, step: str
) -> None:
    """Reads by either layout say the same after each step, whoever dies."""
    options = (*OPTIONS, "--catalog-access", "service" if step else "direct")
    with (
        ServiceProcess(tmp_path, *options) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        tables = Tables(client)
        _alter(client, {SORT: "region, id"})
        tables.lose_log()
        tables.check_layouts()

        for layout in ({SORT: "id"}, {}, {SORT: "region"}):
            _alter(client, layout)
            if layout:
                with pytest.raises(ForbiddenError, match="must not be dropped"):
                    _drop_layouts(service.endpoint, is_purged=True)
        _alter(client, {})
        tables.check()
        tables.write()
        tier_once(client)
        _drop_layouts(service.endpoint, is_purged=False)
        tables.check()
        tables.write()
        _alter(client, {"table.datalake.batch-layout.partition": "bucket(3, id)"})
        tables.check()
        if step:
            _kill_worker(service.endpoint, step)
            tables.check()
            # Of what it has left in one of them, nothing is gone on from.
            _alter(client, {})
            _drop_layouts(service.endpoint, is_purged=True)
            tables.check()
            service.kill()
    with ServiceProcess(tmp_path, *options) as service:
        with StreamhouseClient(service.endpoint) as client:
            tables.client = client
            _alter(client, {SORT: "region, id"})
            tables.go_on()
        assert service.terminate() == 0
    streamhouse("check", "--data-dir", tmp_path, "--lake-rows")


def _alter(client: StreamhouseClient, layout: dict[str, str]) -> None:
    keys = (SORT, "table.datalake.batch-layout.partition")
    for name in ("logged", "keyed"):
        removals = [key for key in keys if key not in layout]
        client.alter_properties(name, updates=layout, removals=removals)


def _drop_layouts(endpoint: str, *, is_purged: bool) -> None:
    """Drop those that are there, over the REST catalog."""
    with contextlib.closing(
        load_catalog("rest", type="rest", uri=endpoint + "/iceberg")
    ) as catalog:
        for name in ("logged", "keyed"):
            identifier = ("default", f"{name}$batch")
            if catalog.table_exists(identifier):
                drop = catalog.purge_table if is_purged else catalog.drop_table
                drop(identifier)
