"""`db.t$changes` against a model of commits: versions, bounds, net changes, updates as two."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.api.client import StreamhouseClient
from tests.support.examples import examples
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
            if request == "delete":
                model.write([(key, None) for key in argument])
            elif request == "upsert":
                model.write(argument)
            elif request == "transaction":
                model.write([row for rows in argument for row in rows])

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
