"""What hostile callers send: names, queries and bodies that nearly fit their route."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from tests.attack.world import KEYS, ROWS, key_rows
from tests.support.in_process_service import append_body

__all__ = ["HostileRequests", "quoted"]


class HostileRequests:
    """Draws parts of requests; they name code, hosts and files that belong to the attacker."""

    def __init__(self, chance: random.Random, place: Path, listener: str) -> None:
        self._chance = chance
        self._place = place
        self._listener = listener

    def name(self) -> str:
        """Return a name that no table has or may have."""
        return self._chance.choice(
            (
                "..",
                "../../etc/passwd",
                "default.../open",
                "a" * 5_000,
                "\x00",
                "default.open$lake",
                "default.guarded$lake",
                "ünïcode",
                "a.b.c.d",
                "guarded\x1fx",
                "%2e%2e%2f",
                "",
                "*",
                "elsewhere.t",
                "'; DROP TABLE iceberg_tables; --",
            )
        )

    def _value(self, depth: int = 0) -> Any:
        """Return what no field expects."""
        chance = self._chance
        some: tuple[Any, ...] = (
            None,
            True,
            -1,
            0,
            2**31,
            2**63,
            2**70,
            1e308,
            "",
            "x" * chance.choice((10, 10_000)),
            "\x00",
            "default.guarded",
            ["guarded", "default.guarded"],
            self.name(),
            [],
            {},
            f"file://{self._place}/outside/token",
            "/etc/passwd",
            self._listener,
        )
        if depth < 2 and chance.random() < 0.3:
            return {self.name(): self._value(depth + 1), "a": [self._value(depth + 1)]}
        return chance.choice(some)

    def query(self) -> str:
        """Return a query, with its question mark, or nothing."""
        chance = self._chance
        if chance.random() < 0.5:
            return ""
        names = (
            *(
                "offset",
                "max_bytes",
                "max_wait_ms",
                "columns",
                "start",
                "end_offset",
                "schema_id",
                "table_id",
            ),
            *("timestamp_us", "after", "database", "writer_id", "token", "purgeRequested"),
            *("pageSize", "pageToken", "snapshots", "warehouse", "parent", "key", "id", "limit"),
        )
        deep = "[" * 3_000
        values = (
            *("0", "-1", "1", str(2**70), "NaN", "1e400", "true", "", deep, '{"0":' * 900),
            *('["id"]', '["id","id"]', '{"0":0}', "%00", "guarded", "x" * 3_000),
        )
        pairs = [
            f"{chance.choice(names)}={quoted(chance.choice(values))}"
            for _ in range(chance.randint(1, 3))
        ]
        return "?" + "&".join(pairs)

    def body(self, route: str, caller: str) -> tuple[bytes, str]:
        """Return a body that nearly fits the route, and its content type."""
        chance = self._chance
        json_type, arrow_type = "application/json", "application/vnd.apache.arrow.stream"
        last = route.rsplit("/", 1)[-1]
        if last in ("append", "upsert", "delete", "lookup", "prefix_lookup", "stage"):
            return self._arrow_body(last), arrow_type
        if chance.random() < 0.1:
            raw = (b"[" * 50_000, b'{"a":' * 20_000, b"\xff\xfe", b"null", b"", b'{"a": NaN}')
            return chance.choice(raw), json_type
        body = self._json_body(route, last, caller)
        if body is None:
            return b"", json_type
        for _ in range(chance.choice((0, 0, 1, 2))):
            self._spoil(body)
        return json.dumps(body).encode(), json_type

    def _spoil(self, body: Any) -> None:
        """Change one value somewhere in a JSON value."""
        chance = self._chance
        while isinstance(body, (dict, list)) and body:
            key = (
                chance.choice(list(body)) if isinstance(body, dict) else chance.randrange(len(body))
            )
            if not isinstance(body[key], (dict, list)) or chance.random() < 0.3:
                body[key] = self._value()
                return
            body = body[key]

    def _arrow_body(self, last: str) -> bytes:
        chance = self._chance
        rows = key_rows(range(200, 220), "hostile").to_batches()[0]
        if last in ("delete", "lookup", "prefix_lookup"):
            body = append_body(KEYS, [(None, 0, rows.select(["id"]))])
        else:
            body = append_body(
                ROWS, [(chance.choice((None, 0, 1, 99)), chance.choice((0, 1)), rows)]
            )
        broken = bytearray(body)
        for _ in range(chance.choice((0, 1, 3))):
            at = chance.randrange(len(broken))
            match chance.randrange(4):
                case 0:
                    broken[at] ^= 1 << chance.randrange(8)
                case 1:
                    del broken[at + 1 :]
                case 2:
                    number = chance.choice((-1, 0, 2**31 - 1, -(2**31), 2**24))
                    broken[at : at + 4] = number.to_bytes(4, "little", signed=True)
                case _:
                    broken[at:at] = chance.randbytes(16)
        if chance.random() < 0.1:
            nested: pa.DataType = pa.int64()
            for _ in range(chance.choice((40, 500))):
                nested = pa.list_(nested)
            with pa.BufferOutputStream() as sink:
                with pa.ipc.new_stream(sink, pa.schema([("id", nested)])):
                    pass
                return bytes(sink.getvalue())
        return bytes(broken)

    def _json_body(self, route: str, last: str, caller: str) -> Any:
        if route.startswith("/iceberg"):
            return self._catalog_body(route, last)
        guarded = "default.open" if caller == "owner" else "default.guarded"
        bodies: dict[str, Any] = {
            "databases": {"name": self.name()},
            "tables": {
                "path": f"default.t{self._chance.randrange(5)}",
                "schema": [{"name": "id", "type": "bigint", "nullable": False}],
                "primary_key": [],
                "bucket_count": 1,
                "properties": self._properties(),
            },
            "properties": {"set": self._properties(), "remove": ["table.log.ttl"]},
            "partitioning": {"partitioned_by": ["bucket(3, id)", "day(name)"]},
            "schema": {"changes": [{"op": "add", "name": "x", "type": "string"}]},
            "adopt": {"force": True},
            "me": {"snapshot_id": "1", "ttl_ms": 10},
            "transactions": {"operation": "append"},
            "commit": {"parts": ["x", "../../table.json"]},
            "claim": {"worker": "w", "tables": [guarded] * self._chance.choice((1, 5_000))},
            "heartbeat": {"table": guarded, "table_id": 1, "epoch": 1},
            "complete": {
                "path": guarded,
                "epoch": 1,
                "snapshot_id": "1",
                "tiered_offsets": {"0": 9},
            },
            "fail": {"table": guarded, "table_id": 1, "epoch": 1, "error": "x" * 5_000},
            "backup": {"with_lake": False},
        }
        return bodies.get(last)

    def _properties(self) -> dict[str, str]:
        code = f"open({str(self._place / 'executed')!r}, 'w')"
        some = {
            "write.py-location-provider.impl": "builtins.eval",
            "py-io-impl": "builtins.eval",
            "py-catalog-impl": "builtins.eval",
            "s3.endpoint": self._listener,
            "s3.remote-signing-enabled": "true",
            "s3.signer.uri": self._listener,
            "uri": self._listener,
            "s3.access-key-id": "a",
            "write.data.path": str(self._place / "outside"),
            "write.metadata.path": code,
            "table.log.ttl": "1s",
            "table.nothing": "1",
            "comment": "harmless",
        }
        names = self._chance.sample(sorted(some), self._chance.randint(0, 3))
        return {name: some[name] for name in names}

    def _location(self) -> str:
        data = self._place / "data"
        return self._chance.choice(
            (
                f"open({str(self._place / 'executed')!r}, 'w')",
                str(data),
                f"file://{data}/tables/1",
                f"file://{data}/lake/warehouse/default/guarded",
                f"file://{data}/lake/warehouse/../../tables",
                f"file://{data}/lake/warehouse/default/mine{self._chance.randrange(9)}",
                f"file://{self._place}/outside",
                "s3://bucket/x",
                f"{self._listener}/x",
                "/etc",
            )
        )

    def _catalog_body(self, route: str, last: str) -> Any:
        chance = self._chance
        data = self._place / "data"
        guarded = {"namespace": ["default"], "name": "guarded"}
        schema = {
            "type": "struct",
            "schema-id": 0,
            "fields": [{"id": 1, "name": "id", "type": "long", "required": True}],
        }
        commit = {
            "identifier": dict(guarded),
            "requirements": chance.choice(([], [{"type": "assert-create"}])),
            "updates": [self._update(schema) for _ in range(chance.randint(1, 4))],
        }
        if route.endswith("tables/{table}"):
            commit.pop("identifier")
            return commit
        if last == "commit":
            return {"table-changes": [commit]}
        return {
            "namespaces": {"namespace": [self.name()], "properties": self._properties()},
            "properties": {"removals": ["a"], "updates": self._properties()},
            "tables": {
                "name": chance.choice(("mine", "guarded", self.name())),
                "schema": schema,
                "location": self._location(),
                "properties": self._properties(),
                "stage-create": chance.random() < 0.5,
            },
            "register": {
                "name": f"mine{chance.randrange(9)}",
                "metadata-location": chance.choice(
                    (
                        "/etc/passwd",
                        f"file://{self._place}/outside/token",
                        f"{self._place}/outside/grants.toml",
                        f"{data}/service.json",
                        f"{data}/lake/catalog.db",
                        f"{self._listener}/v1.metadata.json",
                        "s3://bucket/v1.metadata.json",
                    )
                ),
            },
            "rename": {"source": guarded, "destination": {"namespace": ["x"], "name": "y"}},
            "metrics": {"report-type": "scan-report"},
        }.get(last)

    def _update(self, schema: Any) -> Any:
        data = self._place / "data"
        guarded = f"file://{data}/lake/warehouse/default/guarded"
        snapshot = {
            "snapshot-id": 7,
            "sequence-number": 99,
            "timestamp-ms": 1_900_000_000_000,
            "manifest-list": self._chance.choice(
                (f"{guarded}/metadata/snap.avro", "/etc/passwd", f"{self._listener}/snap.avro")
            ),
            "summary": {"operation": "append"},
            "schema-id": 0,
        }
        return self._chance.choice(
            (
                {"action": "set-properties", "updates": self._properties()},
                {"action": "remove-properties", "removals": ["streamhouse.table-id"]},
                {"action": "set-location", "location": self._location()},
                {"action": "add-snapshot", "snapshot": snapshot},
                {
                    "action": "set-snapshot-ref",
                    "ref-name": "main",
                    "type": "branch",
                    "snapshot-id": 7,
                },
                {"action": "assign-uuid", "uuid": "00000000-0000-0000-0000-000000000000"},
                {"action": "add-schema", "schema": schema, "last-column-id": 1},
                {"action": "remove-snapshots", "snapshot-ids": [1, 2]},
                {"action": "set-statistics", "snapshot-id": 7, "statistics": self._value()},
                {"action": self.name()},
            )
        )


def quoted(text: str) -> str:
    """Return a text as a part of a path or query."""
    return quote(text, safe="")
