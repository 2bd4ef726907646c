"""`db.t$changes` against a model: versions, bounds, net changes, updates as two, streams.

A stream is what Spark's micro-batches read, without Spark: a follower and its positions as JSON.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.reading.follow.table_follower import TableFollower
from streamhouse.reading.options.options import STREAM, read_options, shape_options
from streamhouse.reading.plan.row_form import shape_columns
from streamhouse.reading.scan.split_reader import read_split
from tests.support.examples import examples
from tests.support.expired_log import EXPIRING, expire_log
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
_NUMBERS = itertools.count()
_KEYS = st.integers(0, 5)
_ROWS = st.lists(st.tuples(_KEYS, st.integers(0, 3)), min_size=1, max_size=8)
_REQUESTS = st.one_of(
    st.tuples(st.just("upsert"), _ROWS),
    st.tuples(st.just("delete"), st.lists(_KEYS, min_size=1, max_size=4)),
    st.tuples(st.just("transaction"), st.lists(_ROWS, min_size=1, max_size=3)),
    st.tuples(st.just("tier"), st.none()),
)

Change = tuple[str, int, int]


@dataclass
class _Model:
    """What a table is, and the changes of each commit that changed something."""

    rows: dict[int, int] = field(default_factory=dict)
    commits: list[list[Change]] = field(default_factory=list)

    def write(self, rows: list[tuple[int, int | None]]) -> None:
        commit: list[Change] = []
        for key, value in rows:
            old = self.rows.get(key)
            if value == old:
                continue
            if old is not None and value is not None:
                commit += [("update_preimage", key, old), ("update_postimage", key, value)]
            elif value is None:
                commit.append(("delete", key, old or 0))
            else:
                commit.append(("insert", key, value))
            if value is None:
                del self.rows[key]
            else:
                self.rows[key] = value
        if commit:
            self.commits.append(commit)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(Path(tmp_path_factory.mktemp("changes"))) as process:
        yield process


@settings(max_examples=examples(12), deadline=None)
@given(
    requests=st.lists(_REQUESTS, min_size=1, max_size=10),
    bucket_count=st.integers(1, 3),
    has_history=st.booleans(),
    data=st.data(),
)
def test_changes_are_those_of_the_commits(
    service: ServiceProcess,
    requests: list[tuple[str, Any]],
    bucket_count: int,
    has_history: bool,
    data: st.DataObject,
) -> None:
    table, model = f"d.t{next(_NUMBERS)}", _Model()
    with StreamhouseClient(service.endpoint) as client:
        client.create_table(
            table,
            _SCHEMA,
            primary_key=["id"],
            bucket_count=bucket_count,
            properties={"table.datalake.changelog": str(has_history).lower()},
        )
        for request, argument in requests:
            _send(client, table, request, argument)
            model.write(_written(request, argument))

        def read(**options: object) -> list[tuple[int, Change]]:
            rows = client.read(f"{table}$changes", **options).to_pylist()
            assert all(
                int(row["_commit_timestamp"].timestamp() * 1e6 + 0.5) == row["_commit_version"]
                for row in rows
            )
            return [(r["_commit_version"], (r["_change_type"], r["id"], r["v"])) for r in rows]

        changes = read()
        versions = sorted({version for version, _ in changes})
        commits = [Counter(c for v, c in changes if v == version) for version in versions]
        assert commits == [Counter(commit) for commit in model.commits]
        if not versions:
            return
        places = st.integers(0, len(versions) - 1)
        first, last = sorted((data.draw(places, "first"), data.draw(places, "last")))
        inclusive = data.draw(st.tuples(st.booleans(), st.booleans()), "inclusive")
        low, high = first + (not inclusive[0]), last + inclusive[1]
        bounds = {
            "startingVersion": versions[first],
            "endingVersion": versions[last],
            "startingBoundInclusive": inclusive[0],
            "endingBoundInclusive": inclusive[1],
        }
        within = [change for commit in model.commits[low:high] for change in commit]
        assert Counter(c for _, c in read(**bounds)) == Counter(within)
        two = Counter(c for _, c in read(**bounds, computeUpdates=False))
        assert two == Counter(map(_as_two, within))
        net = Counter(c for _, c in read(**bounds, deduplicationMode="netChanges"))
        assert net == Counter(_net(within))
        assert client.count(f"{table}$changes", **bounds, deduplicationMode="NetChanges") == sum(
            net.values()
        )


class _Stream:
    """A stream of a table's changes: reads one micro-batch at a time, as Spark does."""

    def __init__(self, client: StorageClient, table: str, **options: str) -> None:
        by_key = {"table": f"{table}$changes", "endpoint": "http://client", **options}
        state = client.table_state(table)
        output = shape_columns(state.table, shape_options(by_key))
        self._client = client
        self._make = lambda: TableFollower(
            read_options(by_key, use=STREAM), client.table_state(table), output, lambda: client
        )
        self._follower = self._make()
        self._at: Mapping[str, Any] = self._follower.start().to_json()
        self.batches: list[list[tuple[int, Change]]] = []

    def restart(self) -> None:
        """Go on from the checkpoint, with another follower."""
        self._follower.close()
        self._follower = self._make()
        self._at = json.loads(json.dumps(self._at))

    def read(self, rows_max: int | None = None) -> bool:
        """Read a micro-batch, twice, as after a failure; return False without changes."""
        end = self._follower.next_end(self._at, rows_max=rows_max, max_wait_ms=0).to_json()
        if end == self._at:
            return False
        batch = self._rows(end)
        assert Counter(self._rows(end)) == Counter(batch)
        self.batches.append(batch)
        self._at = end
        return True

    def close(self) -> None:
        while self.read():
            pass
        self._follower.close()

    def _rows(self, end: Mapping[str, Any]) -> list[tuple[int, Change]]:
        plan = self._follower.plan(self._at, end)
        rows = [
            row
            for split in plan.splits
            for batch in read_split(split, plan.context, client=self._client)
            for row in batch.to_pylist()
        ]
        return [(r["_commit_version"], (r["_change_type"], r["id"], r["v"])) for r in rows]


@settings(max_examples=examples(10), deadline=None)
@given(
    requests=st.lists(
        st.one_of(
            _REQUESTS,
            st.tuples(st.just("read"), st.one_of(st.none(), st.integers(1, 5))),
            st.tuples(st.just("restart"), st.none()),
        ),
        min_size=3,
        max_size=14,
    ),
    bucket_count=st.integers(1, 3),
    has_history=st.booleans(),
    data=st.data(),
)
def test_the_micro_batches_of_a_stream_are_the_batch_read(
    service: ServiceProcess,
    requests: list[tuple[str, Any]],
    bucket_count: int,
    has_history: bool,
    data: st.DataObject,
) -> None:
    table, model = f"d.t{next(_NUMBERS)}", _Model()
    with StreamhouseClient(service.endpoint) as client, StorageClient(service.endpoint) as follows:
        client.create_table(
            table,
            _SCHEMA,
            primary_key=["id"],
            bucket_count=bucket_count,
            properties={"table.datalake.changelog": str(has_history).lower()},
        )
        streams = [_Stream(follows, table), _Stream(follows, table, deduplicationMode="netChanges")]
        for request, argument in requests:
            if request == "read":
                for stream in streams:
                    stream.read(argument)
            elif request == "restart":
                for stream in streams:
                    stream.restart()
            else:
                _send(client, table, request, argument)
                model.write(_written(request, argument))
        for stream in streams:
            stream.close()

        every, net = ([c for batch in stream.batches for c in batch] for stream in streams)
        read = client.read(f"{table}$changes").to_pylist()
        assert Counter(every) == Counter(
            (r["_commit_version"], (r["_change_type"], r["id"], r["v"])) for r in read
        )
        # Each key's changes come in order, and make the table; so do those of one a key.
        for changes in (every, net):
            assert _applied(change for _, change in changes) == model.rows
        for batch in streams[1].batches:
            keys = Counter((key, kind == "update_preimage") for _, (kind, key, _) in batch)
            assert set(keys.values()) <= {1}
        versions = sorted({version for version, _ in every})
        if versions:
            since = data.draw(st.sampled_from(versions), "since")
            late = _Stream(follows, table, startingVersion=str(since))
            late.close()
            assert Counter(c for batch in late.batches for c in batch) == Counter(
                change for change in every if change[0] >= since
            )


def _written(request: str, argument: Any) -> list[tuple[int, int | None]]:
    if request == "delete":
        return [(key, None) for key in argument]
    if request == "transaction":
        return [row for rows in argument for row in rows]
    return argument if request == "upsert" else []


def _applied(changes: Iterable[Change]) -> dict[int, int]:
    """Return the table that the changes make; each change must fit the row before it."""
    rows: dict[int, int] = {}
    for kind, key, value in changes:
        if kind in ("delete", "update_preimage"):
            assert rows[key] == value
            if kind == "delete":
                del rows[key]
        else:
            assert (key in rows) is (kind == "update_postimage")
            rows[key] = value
    return rows


def _send(client: StreamhouseClient, table: str, request: str, argument: Any) -> None:
    if request == "tier":
        tier_once(client, table)
    elif request == "delete":
        client.delete(table, pa.table({"id": argument}, pa.schema([_SCHEMA.field("id")])))
    elif request == "upsert":
        client.upsert(table, _rows(argument))
    else:
        with client.begin_transaction(table, operation="upsert") as transaction:
            transaction.commit([transaction.stage(_rows(rows)) for rows in argument])


def _rows(rows: list[tuple[int, int]]) -> pa.Table:
    return pa.Table.from_pylist([{"id": key, "v": value} for key, value in rows], _SCHEMA)


def _as_two(change: Change) -> Change:
    kinds = {"update_preimage": "delete", "update_postimage": "insert"}
    return (kinds.get(change[0], change[0]), *change[1:])


def _net(changes: list[Change]) -> Iterator[Change]:
    for key in {change[1] for change in changes}:
        of_key = [change for change in changes if change[1] == key]
        existed = of_key[0][0] in ("delete", "update_preimage")
        exists = of_key[-1][0] in ("insert", "update_postimage")
        if existed:
            yield ("update_preimage" if exists else "delete", key, of_key[0][2])
        if exists:
            yield ("update_postimage" if existed else "insert", key, of_key[-1][2])


def test_changes_that_an_overwrite_of_a_log_table_took_are_refused(
    service: ServiceProcess,
) -> None:
    table = f"d.t{next(_NUMBERS)}"
    with StreamhouseClient(service.endpoint) as client, StorageClient(service.endpoint) as follows:
        client.create_table(table, _SCHEMA)
        client.append(table, _rows([(1, 1)]))
        client.append(table, _rows([(2, 2)]))
        first, second = sorted(client.read(f"{table}$changes")["_commit_version"].to_pylist())
        with client.begin_transaction(table, operation="overwrite") as transaction:
            transaction.commit([transaction.stage(_rows([(3, 3)]))])
        since = {"startingOffsets": "earliest"}
        rows = client.read(f"{table}$changes", **since).to_pylist()
        assert [(row["_change_type"], row["id"]) for row in rows] == [("insert", 3)]
        overwritten = rows[0]["_commit_version"]

        bounds: list[dict[str, Any]] = [
            {},
            {"startingVersion": first, "endingVersion": second},
            {"endingVersion": second, "deduplicationMode": "netChanges"},
            {"startingVersion": second + 1},
            {"startingVersion": overwritten},
        ]
        for options in bounds:
            with pytest.raises(OffsetOutOfRangeError, match="was overwritten at version"):
                client.read(f"{table}$changes", **options)
            with pytest.raises(OffsetOutOfRangeError, match="was overwritten at version"):
                client.count(f"{table}$changes", **options)
            if "endingVersion" not in options:
                with pytest.raises(OffsetOutOfRangeError, match="was overwritten at version"):
                    _Stream(follows, table, **{key: str(v) for key, v in options.items()})
        client.append(table, _rows([(4, 4)]))
        later = client.read(f"{table}$changes", startingVersion=overwritten + 1)
        assert later["id"].to_pylist() == [4]


def test_a_read_without_a_start_of_changes_that_left_the_log_is_refused(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path, "--retention-interval-ms", "20") as service,
        StreamhouseClient(service.endpoint) as client,
        StorageClient(service.endpoint) as follows,
    ):
        client.create_table("d.t", _SCHEMA, primary_key=["id"], properties=EXPIRING)
        for value in (1, 2):
            client.upsert("d.t", _rows([(key, value) for key in range(20_000)]))
        tier_once(client, "d.t")
        expire_log(client, "d.t")
        client.upsert("d.t", _rows([(1, 3)]))
        bounds: list[dict[str, Any]] = [
            {}, {"endingVersion": 1}, {"deduplicationMode": "netChanges"}
        ]  # fmt: skip
        for options in bounds:
            with pytest.raises(OffsetOutOfRangeError, match=r"table\.datalake\.changelog"):
                client.read("d.t$changes", **options)
        with pytest.raises(OffsetOutOfRangeError, match=r"table\.datalake\.changelog"):
            _Stream(follows, "d.t")
        assert client.read("d.t$changes", startingOffsets="earliest").num_rows == 2


def test_a_stream_since_a_version_in_the_future_leaves_out_earlier_commits(
    service: ServiceProcess,
) -> None:
    table = f"d.t{next(_NUMBERS)}"
    with StreamhouseClient(service.endpoint) as client, StorageClient(service.endpoint) as follows:
        client.create_table(table, _SCHEMA, primary_key=["id"])
        client.upsert(table, _rows([(1, 1)]))
        (version,) = client.read(f"{table}$changes")["_commit_version"].to_pylist()
        stream = _Stream(follows, table, startingVersion=str(version + 3_600_000_000))
        client.upsert(table, _rows([(2, 2)]))
        stream.close()
        assert [change for batch in stream.batches for change in batch] == []
