"""Iceberg Java (Spark 3.5) on the service's REST catalog: reads, deletes, compacts, expires.

What it does must leave union reads right, and what it must not do is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.catalog import load_catalog

from integration.judges.engines import run_in_spark35
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(900)]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TOKEN = "a-secret-of-tests"
EXPIRING = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


def _spark(service: ServiceProcess, statements: list[str]) -> list[Any]:
    uri = f"{service.endpoint}/iceberg"
    return run_in_spark35(statements, uri=uri, token=TOKEN)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    arguments = ("--token-file", str(token_file), "--catalog-access", "service")
    with ServiceProcess(tmp_path / "data", *arguments) as started:
        yield started


READ = "SELECT count(*) AS n, sum(id) AS s FROM lake.{t}"
WORK = (
    READ,
    "DELETE FROM lake.{t} WHERE id % 10 = 3",
    READ,
    "CALL lake.system.rewrite_data_files(table => '{t}', options => map('rewrite-all', 'true'))",
    "CALL lake.system.rewrite_manifests('{t}')",
    "ALTER TABLE lake.{t} WRITE UNORDERED",
    "UPDATE lake.{t} SET name = 'changed' WHERE id = 20",
    "CALL lake.system.expire_snapshots(table => '{t}', retain_last => 1,"
    " older_than => TIMESTAMP '2999-01-01 00:00:00')",
    READ,
    "ALTER TABLE lake.{t} ADD COLUMN note string",
)
OWN = (
    "CREATE NAMESPACE lake.`a b`",
    "CREATE TABLE lake.`a b`.spaced (n INT) USING iceberg",
    "INSERT INTO lake.`a b`.spaced VALUES (1)",
    "CREATE TABLE lake.default.mine USING iceberg AS SELECT id FROM lake.default.copied",
    "INSERT INTO lake.default.mine VALUES (1), (2)",
    "ALTER TABLE lake.default.mine RENAME TO default.yours",
    "SELECT count(*) AS n FROM lake.default.yours",
    "SHOW TABLES IN lake.default",
    "DROP TABLE lake.default.yours PURGE",
)
REFUSED = {
    "INSERT INTO lake.{t} SELECT * FROM lake.{t} LIMIT 3": "more rows than it removes",
    "ALTER TABLE lake.{t} RENAME COLUMN __offset TO o": "must keep its name",
    "ALTER TABLE lake.{t} DROP COLUMN name": "column 'name' must stay",
    "ALTER TABLE lake.{t} UNSET TBLPROPERTIES ('streamhouse.table-id')": "must stay 1",
    "DROP TABLE lake.{t}": "must not be dropped",
    "ALTER TABLE lake.{t} SET TBLPROPERTIES ('streamhouse.tiered-offsets'='{{}}')": "tiering round",
}
KEYED = (
    "CALL lake.system.rewrite_data_files(table => 'default.keyed', options =>"
    " map('rewrite-all', 'true'))",
    "CALL lake.system.rewrite_position_delete_files(table => 'default.keyed', options =>"
    " map('rewrite-all', 'true'))",
    "CALL lake.system.rewrite_manifests('default.keyed')",
)
KEYED_REFUSED = (
    "DELETE FROM lake.default.keyed WHERE id = 20",
    "UPDATE lake.default.keyed SET name = 'changed' WHERE id = 20",
    "TRUNCATE TABLE lake.default.keyed",
    "INSERT OVERWRITE lake.default.keyed SELECT * FROM lake.default.keyed WHERE id > 20",
)
MODES = {"default.copied": "copy-on-write", "default.merged": "merge-on-read"}


def _set_mode(path: str) -> str:
    modes = ", ".join(f"'write.{w}.mode'='{MODES[path]}'" for w in ("delete", "update", "merge"))
    return f"ALTER TABLE lake.{path} SET TBLPROPERTIES ({modes})"


def test_java_reads_deletes_compacts_and_expires(service: ServiceProcess) -> None:
    with StreamhouseClient(service.endpoint, token=TOKEN) as client:
        for path in MODES:
            client.create_table(path, SCHEMA, bucket_count=2, properties=EXPIRING)
            for start in range(0, 400, 100):
                client.append(path, _rows(start, start + 100))
                tier_once(client, path, token=TOKEN)
        work = [[_set_mode(t), *(text.format(t=t) for text in WORK)] for t in MODES]
        allowed = [*itertools.chain(*work), *OWN]
        refused = [text.format(t="default.copied") for text in REFUSED]

        answers = _spark(service, [*allowed, *refused])

        worked = list(zip(allowed, answers, strict=False))
        assert {t: a["error"] for t, a in worked if "error" in a} == {}
        ids = [i for i in range(400) if i % 10 != 3]
        left = [{"n": len(ids), "s": sum(ids)}]
        for path in MODES:
            reads = [answer for text, answer in worked if text == READ.format(t=path)]
            assert reads == [[{"n": 400, "s": sum(range(400))}], left, left]
        assert dict(worked)["SELECT count(*) AS n FROM lake.default.yours"] == [{"n": len(ids) + 2}]
        for text, why, answer in zip(
            refused, REFUSED.values(), answers[len(allowed) :], strict=True
        ):
            assert why in answer["error"], text
            assert "ForbiddenException" in answer["error"], text
        for path in MODES:
            _check_that_tiering_goes_on(client, path, ids)


def test_java_compacts_tables_with_a_primary_key_and_does_nothing_else(
    service: ServiceProcess,
) -> None:
    with StreamhouseClient(service.endpoint, token=TOKEN) as client:
        client.create_table("default.keyed", SCHEMA, primary_key=["id"], bucket_count=2)
        for start in range(0, 300, 100):
            client.upsert("default.keyed", _rows(start, start + 200))
            tier_once(client, "default.keyed", token=TOKEN)

        answers = _spark(service, [*KEYED, *KEYED_REFUSED])

        assert [a for a in answers[: len(KEYED)] if "error" in a] == []
        for answer in answers[len(KEYED) :]:
            assert "through the streamhouse service only" in answer["error"]
        assert client.count("default.keyed") == client.read("default.keyed").num_rows == 400
        client.delete("default.keyed", _rows(0, 50).select(["id"]))
        tier_once(client, "default.keyed", token=TOKEN)
        assert client.count("default.keyed") == client.read("default.keyed").num_rows == 350


def _check_that_tiering_goes_on(client: StreamhouseClient, path: str, ids: list[int]) -> None:
    """The union of lake and log has what Java left and what came since."""
    client.append(path, _rows(400, 450))
    assert tier_once(client, path, token=TOKEN) == 50
    client.append(path, _rows(450, 500))

    found = client.read(path)

    assert sorted(found["id"].to_pylist()) == [*ids, *range(400, 500)]
    assert found.filter(pc.equal(found["name"], "changed"))["id"].to_pylist() == [20]
    catalog = load_catalog("c", type="rest", uri=f"{client.endpoint}/iceberg", token=TOKEN)
    assert catalog.load_table(path).scan().to_arrow().num_rows == len(ids) + 50
