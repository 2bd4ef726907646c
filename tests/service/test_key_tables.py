"""Primary key tables in a real process, against a dict: crashes, retries, many writers."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import AppendWriter, StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.flaky_proxy import FlakyProxy
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
KEY = ("region", "id")
KEYS = pa.schema([SCHEMA.field(name) for name in KEY])
NO_LAKE = {"table.datalake.enabled": "false"}

Row = dict[str, Any]
State = dict[tuple[Any, ...], Row]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _folded(client: StorageClient, path: str) -> State:
    """Fold the fetched changelog, by offsets alone; check that every retraction is right."""
    state: State = {}
    for bucket, positions in client.positions(path).items():
        live: dict[int, Row] = {}
        for batch in client.read_range(path, bucket, 0, positions.high_watermark):
            for offset, row in enumerate(batch.data.to_pylist(), batch.base_offset):
                kind, retracts = row.pop("__change_type"), row.pop("__retracts")
                if kind in (3, 4):
                    assert _key(live.pop(retracts)) == _key(row)
                if kind in (1, 3):
                    live[offset] = row
        state |= {_key(row): row for row in live.values()}
        assert len({_key(row) for row in live.values()}) == len(live)
    return state


def _looked_up(client: StorageClient, path: str, keys: list[tuple[Any, ...]]) -> State:
    asked = pa.Table.from_pylist([dict(zip(KEY, k, strict=True)) for k in keys], schema=KEYS)
    rows = client.lookup(path, asked).to_pylist()
    assert len(rows) == len(keys)
    return {
        key: {name: row[name] for name in SCHEMA.names}
        for key, row in zip(keys, rows, strict=True)
        if row["__found"]
    }


POOL = [(region, number) for region in ("eu", "us", "ap") for number in range(40)]


class _Model:
    """The table as a dict, and random writes to both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: State = {}

    def write(self, client: StorageClient, path: str) -> None:
        kind = self.random.choice(["upsert", "upsert", "delete", "partial", "changes"])
        keys = self.random.choices(POOL, k=self.random.randint(1, 60))
        if kind == "delete":
            table = pa.Table.from_pylist([dict(zip(KEY, k, strict=True)) for k in keys], KEYS)
            client.delete(path, table)
            for key in keys:
                self.rows.pop(key, None)
        elif kind == "partial":
            columns = [*KEY, "score"]
            rows = [{n: r[n] for n in columns} for r in map(self._row, keys)]
            part = pa.schema([SCHEMA.field(name) for name in columns])
            client.upsert(path, pa.Table.from_pylist(rows, part), columns=columns)
            for row in rows:
                old = self.rows.get(_key(row), dict.fromkeys(SCHEMA.names))
                self.rows[_key(row)] = {**old, **row}
        else:
            rows = [self._row(key) for key in keys]
            table = pa.Table.from_pylist(rows, SCHEMA)
            deletes = [False] * len(rows)
            if kind == "changes":
                deletes = [self.random.random() < 0.3 for _ in rows]
                names = pa.array(["-D" if d else "+U" for d in deletes])
                table = table.append_column("__change_type", names)
            client.upsert(path, table)
            for row, is_delete in zip(rows, deletes, strict=True):
                if is_delete:
                    self.rows.pop(_key(row), None)
                else:
                    self.rows[_key(row)] = row

    def _row(self, key: tuple[Any, ...]) -> Row:
        pick = self.random
        return {
            "region": key[0],
            "id": key[1],
            "name": pick.choice([None, "", "a", "bb"]),
            "score": pick.choice([None, 0.5, 1.5]),
            "tags": pick.choice([None, [], ["x"], ["y", None]]),
        }

    def check(self, client: StorageClient, path: str) -> None:
        assert _looked_up(client, path, POOL) == self.rows
        assert client.count(path) == len(self.rows)
        assert _folded(client, path) == self.rows


@pytest.mark.parametrize("image", ["full", "after"])
def test_state_changelog_lookups_and_count_agree_over_crashes(tmp_path: Path, image: str) -> None:
    """Random writes, a kill -9 or a clean stop after some: everything equals the dict."""
    model = _Model(seed=7)
    for life in range(5):
        with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
            if life == 0:
                client.create_table(
                    "t",
                    SCHEMA,
                    primary_key=KEY,
                    bucket_count=3,
                    properties={"table.changelog.image": image},
                )
            model.check(client, "t")
            for _ in range(25):
                model.write(client, "t")
            model.check(client, "t")
            if life % 2:
                assert service.terminate() == 0
            else:
                service.kill()


def test_a_writer_killed_midway_leaves_each_write_whole_or_absent(tmp_path: Path) -> None:
    """Each write sets all keys of one bucket to one number; then a kill; then they still agree."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
    acknowledged = -1
    attempted = -1
    for life in range(4):
        with ServiceProcess(tmp_path) as service:
            with StorageClient(service.endpoint) as client:
                if life == 0:
                    client.create_table("t", schema, primary_key=["id"])
                else:
                    rows = client.lookup("t", pa.table({"id": range(2_000)})).to_pylist()
                    found = {row["n"] for row in rows if row["__found"]}
                    assert len(found) == 1
                    assert acknowledged <= found.pop() <= attempted
                    assert client.count("t") == 2_000
            enough, is_over = threading.Event(), threading.Event()

            def write(
                endpoint: str, enough: threading.Event, is_over: threading.Event, first: int
            ) -> None:
                nonlocal acknowledged, attempted
                with StorageClient(endpoint, timeout_s=0.5) as writer:
                    for number in range(first, first + 100_000):
                        attempted = number
                        rows = pa.table({"id": range(2_000), "n": [number] * 2_000})
                        try:
                            writer.upsert("t", rows)
                        except StreamhouseError:
                            if is_over.is_set():
                                return
                            # A busy machine, or the last moments of the service.
                            continue
                        acknowledged = number
                        if number >= first + 10:
                            enough.set()

            thread = threading.Thread(
                target=write, args=(service.endpoint, enough, is_over, attempted + 1)
            )
            thread.start()
            assert enough.wait(60)
            service.kill()
            is_over.set()
            thread.join()


def test_lost_answers_apply_nothing_twice(tmp_path: Path) -> None:
    """A sum would show a write applied twice, and the changelog one stored twice."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
    properties = {"table.merge-engine": "aggregation", "fields.n.agg": "sum"}
    with ServiceProcess(tmp_path) as service:
        port = urlsplit(service.endpoint).port
        assert port is not None
        with FlakyProxy(port) as proxy, StorageClient(proxy.endpoint) as client:
            client.create_table(
                "t", schema, primary_key=["id"], bucket_count=2, properties=properties
            )
            nothing = pa.table({"id": range(10), "n": pa.array([0] * 10, pa.int64())})
            client.upsert("t", nothing)
            for _ in range(20):
                proxy.answers_to_lose = 1
                client.upsert("t", pa.table({"id": range(10), "n": [1] * 10}))
                # Nothing changes, the answer is lost, and the writer goes on all the same.
                proxy.answers_to_lose = 1
                client.upsert("t", nothing)

            assert proxy.answers_lost == 40
            rows = client.lookup("t", pa.table({"id": range(10)})).to_pylist()
            assert [row["n"] for row in rows] == [20] * 10
            ends = [p.high_watermark for p in client.positions("t").values()]
            assert sum(ends) == 10 + 20 * 10 * 2


def test_a_repeated_call_is_answered_with_the_same_changes(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY)
        row = {"region": "eu", "id": 1, "name": "a", "score": 1.0, "tags": None}
        first = client.upsert("t", pa.Table.from_pylist([row], SCHEMA), writer=AppendWriter(5))
        client.upsert("t", pa.Table.from_pylist([{**row, "name": "b"}], SCHEMA))

        again = client.upsert("t", pa.Table.from_pylist([row], SCHEMA), writer=AppendWriter(5))

        assert again == first == {0: (0, 1)}
        found = client.lookup_one("t", region="eu", id=1)
        assert found is not None
        assert found["name"] == "b"


def test_what_is_acknowledged_or_fetched_is_looked_up_at_once(tmp_path: Path) -> None:
    """A reader follows the changelog and looks up each row: never older than the change seen."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
    last = 150
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", schema, primary_key=["id"], bucket_count=2)
        failures: list[str] = []

        def follow() -> None:
            with StorageClient(service.endpoint) as reader:
                for batch in reader.subscribe("t", start={0: 0, 1: 0}):
                    seen = dict(
                        zip(
                            batch.data.column("id").to_pylist(),
                            batch.data.column("n").to_pylist(),
                            strict=True,
                        )
                    )
                    rows = reader.lookup("t", pa.table({"id": list(seen)})).to_pylist()
                    failures.extend(str(r) for r in rows if r["n"] < seen[r["id"]])
                    # And not newer than what can be fetched now.
                    newest = max(row["n"] for row in rows)
                    end = reader.positions("t")[batch.bucket].high_watermark
                    tail = list(reader.read_range("t", batch.bucket, max(0, end - 40), end))
                    if max(max(b.data.column("n").to_pylist()) for b in tail) < newest:
                        failures.append(f"{newest} was looked up before it could be fetched")
                    if max(seen.values()) == last:
                        return

        thread = threading.Thread(target=follow)
        thread.start()
        for number in range(last + 1):
            client.upsert("t", pa.table({"id": range(20), "n": [number] * 20}))
            one = client.lookup_one("t", id=number % 20)
            assert one == {"id": number % 20, "n": number}
        thread.join(60)

        assert not thread.is_alive()
        assert failures == []


def test_many_writers_of_the_same_keys_lose_no_change(tmp_path: Path) -> None:
    """Six connections add one to the same counters; each counter ends at the number of writes."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
    properties = {"table.merge-engine": "aggregation", "fields.n.agg": "sum"}
    rounds, writers = 40, 6
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", schema, primary_key=["id"], bucket_count=3, properties=properties)

        def write() -> None:
            with StorageClient(service.endpoint) as own:
                for _ in range(rounds):
                    own.upsert("t", pa.table({"id": range(30), "n": [1] * 30}))

        threads = [threading.Thread(target=write) for _ in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        rows = client.lookup("t", pa.table({"id": range(30)})).to_pylist()
        assert {row["n"] for row in rows} == {rounds * writers}
        service.kill()
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        rows = client.lookup("t", pa.table({"id": range(30)})).to_pylist()
        assert {row["n"] for row in rows} == {rounds * writers}


def test_without_a_lake_no_change_expires(tmp_path: Path) -> None:
    """The changelog is all that readers have: it stays, however old it is, also over kill -9."""
    properties = {**NO_LAKE, "table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
    options = ("--retention-interval-ms", "20")
    with ServiceProcess(tmp_path, *options) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY, properties=properties)
        client.create_table("log", SCHEMA, properties=properties)
        model = _Model(seed=3)
        # Writing goes on until retention, which runs beside it, has cut the log table.
        while client.positions("log")[0].log_start_offset == 0:
            model.write(client, "t")
            client.append("log", pa.Table.from_pylist([model._row(POOL[0])] * 300, SCHEMA))
        assert client.positions("t")[0].log_start_offset == 0
        service.kill()
    with ServiceProcess(tmp_path, *options) as service, StorageClient(service.endpoint) as client:
        model.check(client, "t")
        client.drop_table("t")
        client.create_table("t", SCHEMA, primary_key=KEY, properties=properties)
        assert client.count("t") == 0
        assert _looked_up(client, "t", POOL) == {}
