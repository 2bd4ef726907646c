"""A null in a primary key is refused with the reason, not with advice for other columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse import Producer, StreamhouseClient
from streamhouse.core.errors import SchemaMismatchError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

NULL: Final = {"id": None, "v": "a"}
NULLS: Final = pa.table({"id": pa.array([1, None], pa.int64()), "v": ["a", "b"]})
KEYS: Final = pa.table({"id": pa.array([1, None], pa.int64())})
Door = Callable[[StreamhouseClient, str], Any]


def _staged(client: StreamhouseClient, table: str) -> Any:
    with client.begin_transaction(table, operation="upsert") as transaction:
        return transaction.commit([transaction.stage(NULLS)])


def _produced(client: StreamhouseClient, table: str) -> Any:
    with Producer(client, table, operation="upsert") as producer:
        return producer.send(NULLS).result()


DOORS: Final[dict[str, Door]] = {
    "upsert of dicts": lambda client, table: client.upsert(table, NULL),
    "upsert of Arrow": lambda client, table: client.upsert(table, NULLS),
    "partial upsert": lambda client, table: client.upsert(table, NULLS, columns=["id", "v"]),
    "delete": lambda client, table: client.delete(table, KEYS),
    "lookup": lambda client, table: client.lookup(table, KEYS),
    "prefix_lookup": lambda client, table: client.prefix_lookup(table, KEYS),
    "transaction": _staged,
    "producer": _produced,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("nulls")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        for table, bucket_count in (("one", 1), ("two", 2)):
            opened.create_table(
                table, "id BIGINT NOT NULL, v STRING", primary_key="id", bucket_count=bucket_count
            )
        yield opened


@pytest.mark.parametrize("table", ["one", "two"])
@pytest.mark.parametrize("door", DOORS)
def test_a_null_key_is_told_from_other_columns(
    client: StreamhouseClient, door: str, table: str
) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        DOORS[door](client, table)

    assert "column 'id' must not be null" in refused.value.message
    assert "it is part of the primary key" in refused.value.message
    assert "--drop-not-null" not in refused.value.message


def test_another_column_is_freed_by_a_command(client: StreamhouseClient) -> None:
    client.create_table("strict", "id BIGINT NOT NULL")

    with pytest.raises(SchemaMismatchError, match="--drop-not-null id`"):
        client.append("strict", {"id": None})
