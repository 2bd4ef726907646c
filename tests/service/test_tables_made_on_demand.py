"""Tables made, found and dropped without a look before: what there is, is no error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from streamhouse import (
    DatabaseNotFoundError,
    InvalidNameError,
    StreamhouseClient,
    TableExistsError,
    TableNotFoundError,
)
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

COLUMNS = "id BIGINT NOT NULL, name STRING"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("demand")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        yield opened


def test_a_table_is_made_with_its_database_and_found_again(client: StreamhouseClient) -> None:
    made = client.create_table(
        "shop.made", COLUMNS, primary_key="id", properties={"table.datalake.freshness": "1 min"}
    )
    client.alter_properties("shop.made", updates={"table.log.ttl": "7d"})

    found = client.create_table("shop.made", COLUMNS, primary_key="id", if_not_exists=True)

    assert "shop" in client.list_databases()
    assert found.table_id == made.table_id
    with pytest.raises(TableExistsError):
        client.create_table("shop.made", COLUMNS, primary_key="id")


@pytest.mark.parametrize(
    ("columns", "given", "said"),
    [
        ("id INT NOT NULL, name STRING", {}, "column 'id' is bigint NOT NULL there, and int NOT"),
        ("id BIGINT NOT NULL", {}, "column 'name' is there, and not here"),
        (COLUMNS + ", n INT", {}, "column 'n' is not there"),
        ("name STRING, id BIGINT NOT NULL", {}, "in another order: columns: id, name"),
        (COLUMNS, {"primary_key": "id"}, r"the primary key is \[\] there, and \['id'\] here"),
        (COLUMNS, {"bucket_count": 2}, "the number of buckets is 1 there, and 2 here"),
        (COLUMNS, {"bucket_key": "id"}, r"the bucket key is \[\] there"),
        (COLUMNS, {"partitioned_by": "name"}, r"the partitioning is \[\] there, and \['name'\]"),
        (
            COLUMNS,
            {"properties": {"table.log.ttl": "7d"}},
            "property table.log.ttl is not set there, and '7d' here",
        ),
    ],
)
def test_another_definition_is_refused_by_what_differs(
    client: StreamhouseClient, columns: str, given: dict[str, Any], said: str
) -> None:
    client.create_table("shop.known", COLUMNS, if_not_exists=True)

    with pytest.raises(TableExistsError, match=said):
        client.create_table("shop.known", columns, if_not_exists=True, **given)


def test_many_make_one_table_at_once(client: StreamhouseClient) -> None:
    ids: list[int] = []

    def make() -> None:
        ids.append(client.create_table("crowd.one", COLUMNS, if_not_exists=True).table_id)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(ids) == 8
    assert len(set(ids)) == 1


def test_what_is_not_there_is_dropped_already(client: StreamhouseClient) -> None:
    client.create_table("shop.dropped", COLUMNS)

    client.drop_table("shop.dropped", if_exists=True)
    client.drop_table("shop.dropped", if_exists=True)
    client.drop_table("nowhere.table", if_exists=True)

    assert "nowhere" not in client.list_databases()
    with pytest.raises((TableNotFoundError, DatabaseNotFoundError)):
        client.drop_table("nowhere.table")
    with pytest.raises(InvalidNameError):
        client.drop_table("no-name", if_exists=True)
