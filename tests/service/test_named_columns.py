"""A name in a write means the column that it has in the version of the schema the writer speaks of.

Random changes of a schema, and between them writes by every form and by writers that know any
version there was, against a model of columns with ids. What the model refuses is refused, with
nothing written.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.client import Producer, StorageClient
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.wire.arrow_body import encode_append_body
from tests.support.examples import examples
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
TEXTS = {"json": "application/json", "ndjson": "application/x-ndjson", "csv": "text/csv"}
RAW = ("arrow", "arrow columns", "stage", "stage columns", *TEXTS)
CLIENTS = ("dict", "table", "dict columns", "transaction", "transaction columns", "reject")
Columns = dict[str, int]
"""Name -> the column's id."""


class _Refused(Exception):
    """The model says that a write is refused."""


@dataclass
class _Table:
    """What the table must have: the columns of each version, and the values by their ids."""

    is_keyed: bool
    versions: list[Columns] = field(default_factory=lambda: [{"id": 0, "a": 1}])
    rows: list[dict[int, int]] = field(default_factory=list)
    ids: int = 2

    @property
    def now(self) -> Columns:
        return self.versions[-1]

    def change(self, change: Mapping[str, str]) -> None:
        columns = dict(self.now)
        if "add" in change:
            columns[change["add"]] = self.ids
            self.ids += 1
        elif "drop" in change:
            del columns[change["drop"]]
        else:
            columns[change["to"]] = columns.pop(change["rename"])
        self.versions.append(columns)

    def check_one_meaning(self, names: set[str]) -> None:
        """Rows of Arrow that name no version mean one column by each name, or are refused."""
        for name in names & set(self.now):
            if {version.get(name, self.now[name]) for version in self.versions} != {self.now[name]}:
                raise _Refused(name)

    def write(self, kind: str, version: int, row: Mapping[str, int]) -> None:
        """Write a row by `version`: all columns, some of them, or with null in those not named."""
        spoken, names = self.versions[version], set(row)
        if kind == "whole":
            earlier = [
                v
                for v in range(version + 1)
                if set(self.versions[v]) == names and self.versions[v].items() <= spoken.items()
            ]
            if not earlier:
                raise _Refused("no version")
        if not names <= set(spoken):
            raise _Refused("unknown")
        values = {spoken[name]: value for name, value in row.items()}
        if not set(values) <= set(self.now.values()):
            raise _Refused("dropped")
        found = [old for old in self.rows if old[0] == values[0]] if self.is_keyed else []
        if not found:
            self.rows.append(values)
            return
        if kind != "partial":
            found[0].clear()
        found[0].update(values)

    def content(self) -> list[dict[str, int | None]]:
        live = [{name: row.get(i) for name, i in self.now.items()} for row in self.rows]
        return sorted(live, key=str)


@dataclass
class _Writer:
    """A client that learned of the table at a version, and a producer made then."""

    client: StorageClient
    producer: Producer
    known: int
    """The version the client knows."""
    made_at: int


class _World:
    def __init__(self, service: ServiceProcess, opened: ExitStack, *, is_keyed: bool) -> None:
        self._service, self._opened = service, opened
        self.admin = opened.enter_context(StorageClient(service.endpoint))
        self.path = f"default.t{secrets.token_hex(6)}"
        self.verb = "upsert" if is_keyed else "append"
        self.table = _Table(is_keyed)
        self.writers: list[_Writer] = []
        created = self.admin.create_table(
            self.path,
            pa.schema([pa.field("id", pa.int64(), nullable=False), ("a", pa.int64())]),
            primary_key=["id"] if is_keyed else (),
        )
        self.table_id = created.table_id
        self.join()

    def join(self) -> None:
        """Let one more writer learn of the table as it is now."""
        client = self._opened.enter_context(StorageClient(self._service.endpoint))
        producer = self._opened.enter_context(
            Producer(client, self.path, operation=self.verb, linger_ms=0)  # type: ignore[arg-type]
        )
        version = len(self.table.versions) - 1
        self.writers.append(_Writer(client, producer, version, version))

    def change(self, change: Mapping[str, str]) -> None:
        self.admin.alter_schema(self.path, [change])
        self.table.change(change)

    def check(self) -> None:
        if self.table.is_keyed:
            rows = [self.admin.lookup_one(self.path, id=row[0]) for row in self.table.rows]
        else:
            batches = self.admin.fetch(self.path, 0, 0)
            rows = [row for batch in batches for row in batch.data.to_pylist()]
        assert sorted(rows, key=str) == self.table.content()

    # -- requests as they are ------------------------------------------------------------------

    def send(self, form: str, stated: int | None, row: dict[str, int], *, is_whole: bool) -> None:
        query = {}
        if stated is not None:
            query["schema_id"] = f"{self.table_id}.{stated}" if is_whole else str(stated)
        transport = self.admin.transport
        url = f"/v1/tables/{self.path}"
        columns = list(row) if form.endswith("columns") else None
        if form in TEXTS:
            body, content_type = _text(form, row), TEXTS[form]
            transport.request(
                "POST",
                f"{url}/{self.verb}",
                query=query,
                body=body,
                content_type=content_type,
                is_repeatable=False,
            )
            return
        rows = _batch(row)
        body = encode_append_body(rows.schema, [(None, 0, rows)])
        if form.startswith("arrow"):
            if columns is not None:
                query["columns"] = ",".join(columns)
            transport.request(
                "POST", f"{url}/{self.verb}", query=query, body=body, is_repeatable=False
            )
            return
        begin: dict[str, Any] = {"operation": self.verb, "columns": columns, **query}
        begun = transport.request_json("POST", f"{url}/transactions", body=begin)
        url = f"{url}/transactions/{begun['transaction_id']}"
        try:
            answer = transport.request(
                "POST", f"{url}/stage", query=query, body=body, is_repeatable=False
            )
            parts = [json.loads(answer.data)["part"]]
            transport.request_json("POST", f"{url}/commit", body={"parts": parts})
        except InvalidRequestError:
            transport.request_json("POST", f"{url}/abort")
            raise

    def expect_sent(self, form: str, stated: int | None, row: dict[str, int]) -> None:
        if stated is None and form not in TEXTS:
            self.table.check_one_meaning(set(row))
        version = len(self.table.versions) - 1 if stated is None else stated
        self.table.write(_kind(form), version, row)

    # -- writers -------------------------------------------------------------------------------

    def call(self, form: str, writer: _Writer, row: dict[str, int]) -> None:
        client, path = writer.client, self.path
        columns = list(row) if form.endswith("columns") else None
        if form == "producer":
            writer.producer.send(_batch(row)).result()
        elif form.startswith("transaction"):
            with client.begin_transaction(path, operation=self.verb, columns=columns) as begun:
                begun.commit([begun.stage(_batch(row))])
        else:
            data: Any = [row] if form.startswith("dict") else _batch(row)
            if not self.table.is_keyed:
                client.append(path, data, on_error="reject" if form == "reject" else "refuse")
            elif columns is not None:
                client.upsert(path, data, columns=columns)
            else:
                client.upsert(path, data, on_error="reject" if form == "reject" else "refuse")

    def expect_called(self, form: str, writer: _Writer, row: dict[str, int]) -> None:
        newest = len(self.table.versions) - 1
        kind = _kind(form)
        if form == "producer":
            self.table.write("whole", writer.made_at, row)
            return
        if form == "dict" and not self.table.is_keyed:
            kind = "text"
        if form == "transaction":
            # Its version is that of the table at the first rows.
            writer.known = newest
        if form == "reject" and set(row) != set(self.table.versions[writer.known]):
            writer.known = newest
            if set(row) != set(self.table.now):
                raise _Refused("not the columns")
        try:
            self.table.write(kind, writer.known, row)
        except _Refused as refused:
            # What its client does not know of is looked for in the table there is now.
            is_stale, writer.known = writer.known != newest, newest
            if not is_stale or str(refused) == "dropped":
                raise
            self.table.write(kind, newest, row)


def _kind(form: str) -> str:
    return "partial" if form.endswith("columns") else "text" if form in TEXTS else "whole"


def _batch(row: Mapping[str, int]) -> pa.RecordBatch:
    arrays = {name: pa.array([value], pa.int64()) for name, value in row.items()}
    return pa.RecordBatch.from_pydict(arrays)


def _text(form: str, row: Mapping[str, int]) -> bytes:
    if form == "csv":
        return f"{','.join(row)}\n{','.join(map(str, row.values()))}\n".encode()
    return json.dumps([row] if form == "json" else row).encode()


def _is_refused(call: Any, *arguments: Any, **options: Any) -> bool:
    try:
        call(*arguments, **options)
    except (_Refused, InvalidRequestError):
        return True
    return False


@st.composite
def _changes(draw: st.DrawFn, now: Columns) -> dict[str, str]:
    free = [name for name in NAMES if name not in now]
    taken = [name for name in now if name != "id"]
    verb = draw(st.sampled_from(["add"] * bool(free) + ["drop"] * bool(taken) + ["rename"] * 2))
    if verb == "add" or not (free and taken):
        if not free:
            name = draw(st.sampled_from(taken))
            return {"drop": name, "confirm": name}
        return {"add": draw(st.sampled_from(free)), "type": "bigint"}
    name = draw(st.sampled_from(taken))
    if verb == "drop":
        return {"drop": name, "confirm": name}
    return {"rename": name, "to": draw(st.sampled_from(free))}


@pytest.mark.parametrize("is_keyed", [True, False], ids=["keyed", "log"])
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_name_means_the_writers_column_or_is_refused(
    service: ServiceProcess, is_keyed: bool, data: st.DataObject
) -> None:
    with ExitStack() as opened:
        world = _World(service, opened, is_keyed=is_keyed)
        for value in _numbers(data):
            if data.draw(st.booleans(), label="is a change"):
                world.change(data.draw(_changes(world.table.now), label="change"))
                if data.draw(st.booleans(), label="is one more writer"):
                    world.join()
                continue
            version = data.draw(st.sampled_from(world.table.versions), label="columns of")
            others = [name for name in version if name != "id"]
            names = others
            if data.draw(st.booleans(), label="is partial"):
                names = data.draw(st.lists(st.sampled_from(NAMES), unique=True), label="names")
            row = {"id": data.draw(st.integers(1, 2)), **dict.fromkeys(names, value)}
            forms = [f for f in (*RAW, *CLIENTS, "producer") if is_keyed or "columns" not in f]
            form = data.draw(st.sampled_from(forms), label="form")
            if form in RAW:
                known = [None, *range(len(world.table.versions))]
                stated = data.draw(st.sampled_from(known), label="stated")
                is_whole = data.draw(st.booleans(), label="is the table stated")
                is_expected = _is_refused(world.expect_sent, form, stated, row)
                is_done = _is_refused(world.send, form, stated, row, is_whole=is_whole)
            else:
                writer = data.draw(st.sampled_from(world.writers), label="writer")
                is_expected = _is_refused(world.expect_called, form, writer, row)
                is_done = _is_refused(world.call, form, writer, row)
            assert is_done == is_expected, "refused or not"
            world.check()


def _numbers(data: st.DataObject) -> Iterator[int]:
    yield from range(100, 100 + data.draw(st.integers(2, 12), label="steps"))
