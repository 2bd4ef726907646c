"""What a service with many tables may say of itself, and a server that says it to the page."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from streamhouse.storage_service.server.routes import DOCUMENT_FILES
from streamhouse.storage_service.server.status._status_page import status_page

__all__ = ["NOW_US", "PageServer", "newest_rows", "page_server", "status_of", "table_info"]

_DOCUMENTS: Final = Path(__file__).resolve().parents[5] / "docs"

NOW_US: Final = 1_800_000_000_000_000
_DATABASES: Final = ("sales", "market", "web", "billing", "iot", "ops")
_NOUNS: Final = ("orders", "clicks", "sessions", "payments", "devices", "shops", "prices", "alerts")


def _wave(rng: random.Random, points: int, rate: float) -> list[int]:
    phase, swing = rng.random() * 6, rng.random() * 0.5
    return [
        max(0, round(rate * (1 + swing * math.sin(phase + i / 4) + rng.gauss(0, 0.06))))
        for i in range(points)
    ]


def _table(number: int, rng: random.Random) -> dict[str, Any]:
    name = f"{_DATABASES[number % 6]}.{_NOUNS[number // 6 % 8]}_{number:03d}"
    is_busy, rows = rng.random() < 0.3, int(10 ** rng.uniform(2, 7.5))
    rate = 10 ** rng.uniform(0.5, 3.8) if is_busy else 0
    rows += round(rate * rng.uniform(1, 90) * 86_400)
    # A service has a figure for each sample, also of a table that nobody writes to.
    past = _wave(rng, 24, rate) if is_busy else [0] * 24
    return {
        "table": name,
        "is_primary_key_table": rng.random() < 0.4,
        "row_count": rows,
        "log_bytes": round(rate * 3_600 * 85) if is_busy else rows % 900_000,
        "written_rows_per_s": float(past[-1]),
        "read_rows_per_s": float(past[-1] * 2.1) if is_busy and rng.random() < 0.6 else 0.0,
        "is_tiered": rng.random() < 0.93,
        "freshness_ms": rng.choice([30_000, 60_000, 180_000]),
        "lag_ms": rng.randrange(28_000) if is_busy else 0,
        "tiering": {"untiered_rows": round(rate * 12)} if is_busy else {},
        "unusable": [],
        "history": {"written_rows_per_s": past},
    }


def _troubled(tables: list[dict[str, Any]]) -> None:
    lags_ms = (1_260_000, 412_000, 305_000, 250_000, 199_000, 181_000)
    for table, lag_ms in zip(tables[3:9], lags_ms, strict=True):
        table |= {"is_tiered": True, "lag_ms": lag_ms}
        rate = table["written_rows_per_s"]
        table["tiering"] = {"untiered_rows": round(max(rate, 3) * lag_ms / 1_000)}
    tables[11]["is_tiered"] = tables[14]["is_tiered"] = tables[17]["is_tiered"] = True
    tables[11]["tiering"] = {
        "untiered_rows": 1_204_553,
        "failures": 4,
        "last_error": "CommitFailedError: the catalog answers 503 to a commit of "
        "s3://lake/warehouse/web/orders_011; it is tried again after a pause of 32 s",
    }
    tables[11]["since_us"] = NOW_US - 412_000_000
    tables[14]["since_us"] = tables[17]["since_us"] = NOW_US - 7_200_000_000
    tables[14]["tiering"] = {"maintenance_debt": _debt(small_files=1_991, delete_files=1_769)}
    tables[17]["lag_ms"] = 0
    tables[17]["tiering"] = {"maintenance_debt": _debt(small_files=240, delete_files=12)}


def _debt(**changes: Any) -> dict[str, Any]:
    return {
        "data_files": 2_310,
        "delete_files": 0,
        "snapshots": 42,
        "small_files": 3,
        "deleted_share": 0.31,
        "maintained_at_us": NOW_US - 7_200_000_000,
        "maintenance_error": "",
        **changes,
    }


def _readers(tables: list[dict[str, Any]], count: int, rng: random.Random) -> dict[str, Any]:
    lags = sorted((int(10 ** rng.uniform(2, 6.6)) for _ in range(min(50, count))), reverse=True)
    worst = [
        {
            "table": tables[number * 7 % len(tables)]["table"],
            "name": f"{rng.choice(['fraud', 'dashboards', 'search-index', 'mail'])}-{number:02d}",
            "lag_rows": round(lag_ms * rng.uniform(0.02, 3)),
            "lag_ms": lag_ms if number else None,
            "rows_at_risk": 48_210 if number < 2 else 0,
            # Some have stopped to report: nobody started them again.
            "reported_us": NOW_US
            - (1_000 * lag_ms if number in (3, 5) else rng.randrange(9_000_000)),
        }
        for number, lag_ms in enumerate(lags)
    ]
    return {"count": count, "worst": worst}


def _service(rng: random.Random) -> dict[str, Any]:
    written, read = _wave(rng, 119, 48_000), _wave(rng, 119, 121_000)
    return {
        "role": "alone",
        "journal": None,
        "version": "0.1.0",
        "uptime_ms": 273_900_000,
        "memory_bytes": 1_240_000_000,
        "request_memory_bytes": 24_000_000,
        "disk_bytes": 43_100_000_000,
        "disk_bytes_max": 50_000_000_000,
        "disk_free_bytes": 61_000_000_000,
        "disk_total_bytes": 210_000_000_000,
        "written_rows_per_s": float(written[-1]),
        "read_rows_per_s": float(read[-1]),
        "processor_share": 0.83,
        "threads": [
            {"name": "rows", "alive": 3, "bound": 4},
            {"name": "disk", "alive": 2, "bound": 4},
        ],
        "latency": {
            "write": {"p50_ms": 1.42, "p99_ms": 6.8},
            "lookup": {"p50_ms": 0.31, "p99_ms": 1.1},
        },
        "errors_window_ms": 595_000,
        "errors": {"overloaded": 112, "schema_mismatch": 9},
        "history": {"written_rows_per_s": written, "read_rows_per_s": read},
    }


def status_of(
    table_count: int, *, consumer_count: int = 1_000, is_troubled: bool = True
) -> dict[str, Any]:
    """Return the brief status of a service with so many tables; the same one each time."""
    rng = random.Random(17)
    tables = sorted((_table(n, rng) for n in range(table_count)), key=lambda t: str(t["table"]))
    for table in tables:
        table["lag_ms"] = min(table["lag_ms"], table["freshness_ms"])
    if is_troubled and table_count > 20:
        _troubled(tables)
    busy = [table for table in tables if table["tiering"].get("untiered_rows")][:9]
    writing = {"step": "writing", "rows_done": 610_000, "rows_planned": 1_950_000}
    damage: dict[str, Any] = {"table": "ops.audit_trail", "code": "corrupt_log", "shard": None}
    damage["since_us"] = NOW_US - 3_900_000_000
    damage["reason"] = "bucket 2: segment 00000000000041203311.log: checksum mismatch at 48 811 008"
    return {
        "now_us": NOW_US,
        "sample_interval_ms": 5_000,
        "service": _service(rng),
        "table_count": table_count,
        "damaged_tables": [damage] if is_troubled else [],
        "strangers": [],
        "workers": [
            {
                "worker_id": f"tier-worker-{number}.eu-west-1",
                "table": table["table"],
                "round_ms": 1_000 * (41 - 4 * number),
                "untiered_rows": 1_950_000,
                "lease_left_ms": 9_000,
                "progress": writing if number % 3 else {**writing, "step": "committing"},
            }
            for number, table in enumerate(busy)
        ],
        "idle_workers": [{"worker_id": "tier-worker-9.eu-west-1", "reason": "leased"}],
        "consumers": _readers(tables, consumer_count, rng)
        if consumer_count and tables
        else {"count": 0, "worst": []},
        "tables": tables,
    }


def _rounds() -> list[dict[str, Any]]:
    errors = ("", "", "CommitFailedError: the catalog answers 503 to s3://lake/warehouse", "", "")
    return [
        {"ended_us": NOW_US - 60_000_000 * (n + 1), "round_ms": 8_412 + 700 * n, "error": error}
        for n, error in enumerate(errors)
    ]


def in_full(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the full form of a table that `status_of` has told in brief."""
    count, rows = 8, table["row_count"] // 8
    rate = table["written_rows_per_s"] / 8
    lags = [table["lag_ms"] * (8 - bucket * 3 % 8) // 8 for bucket in range(count)]
    tiering = {
        **dict.fromkeys(("untiered_rows", "lease_left_ms", "failures", "round_ms"), 0),
        **dict.fromkeys(("diverged", "worker_id", "last_error"), ""),
        "tiering_epoch": 311,
        "tiered_at_us": NOW_US - 60_000_000,
        "last_round_ms": 8_412,
        "pause_left_ms": 0,
        "rounds": _rounds(),
        "progress": None,
        "maintenance_debt": _debt(deleted_share=0.002),
        **table["tiering"],
    }
    return {
        **table,
        "lake_snapshot_id": "6194823109123847123",
        "tiering": tiering,
        "has_much_debt": "maintenance_debt" in table["tiering"],
        "live": {"made_us": NOW_US - 4_000_000, "rows_since": 812},
        "constraints": [
            {"name": "positive", "predicate": "price > 0", "refused_rows": 0}
            | {"rejected_rows": 1_234}
        ],
        "consumers": _readers([table], 3, rng)["worst"],
        "buckets": [
            {
                "bucket": bucket,
                "log_start_offset": max(0, rows - round(rate * 3_600)),
                "high_watermark": rows + 37 * bucket,
                "tiered_offset": max(0, rows + 37 * bucket - round(rate * lags[bucket] / 1_000)),
                "lag_ms": lags[bucket],
            }
            for bucket in range(count)
        ],
        "history": {
            "written_rows_per_s": _wave(rng, 119, table["written_rows_per_s"]),
            "read_rows_per_s": _wave(rng, 119, table["read_rows_per_s"]),
            "lag_ms": [
                [round(lag * (0.4 + 0.6 * (i % 30) / 30)) for lag in lags] for i in range(120)
            ],
        },
    }


_COLUMNS: Final[list[dict[str, Any]]] = [
    {"id": 1, "name": "id", "type": "bigint", "nullable": False, "comment": "given by the shop"},
    {"id": 2, "name": "placed", "type": "timestamp", "nullable": False},
    {"id": 3, "name": "item", "type": "string", "nullable": True},
    {"id": 4, "name": "price", "type": "decimal(10,2)", "nullable": True},
    {"id": 5, "name": "tags", "type": {"type": "array", "element": "string"}, "nullable": True},
    {"id": 6, "name": "picture", "type": "binary", "nullable": True},
]


def table_info(table: str) -> dict[str, Any]:
    """Return the description of a table with six columns."""
    return {
        "path": table,
        "schema": _COLUMNS,
        "primary_key": [],
        "bucket_count": 2,
        "bucket_key": ["item"],
        "partitioned_by": ["day(placed)"],
        "properties": {"table.datalake.freshness": "30s", "table.log.ttl": "7d"},
        "table_id": 17,
        "schema_id": 2,
        "created_at_us": NOW_US - 40 * 86_400_000_000,
    }


def newest_rows(bucket: int) -> dict[str, Any]:
    """Return the newest rows of one of two buckets, as a fetch does."""
    long = "Assam, second flush, whole leaf, from a small garden; " * 9
    items = ("green tea", "coffee", None, "", "two\nlines", long)
    rows = [
        {
            "id": 9007199254740993 + 2 * number + bucket,
            "placed": f"2027-01-15T07:59:{30 + number:02d}.125000+00:00",
            "item": items[number % 6],
            "price": None if number == 2 else f"{number}.50",
            "tags": [None, [], ["new", "sale"]][number % 3],
            "picture": None if number % 4 else "89504e470d0a1a0a" * 8,
        }
        for number in range(12)
    ]
    times = [[100 + n, NOW_US - 30_000_000 + n * 2_000_000 + bucket] for n in range(12)]
    ends = {"log_start_offset": 0, "high_watermark": 112, "written_us": times}
    return {
        "table_id": 17,
        "bucket": bucket,
        "first_offset": 100,
        "next_offset": 112,
        **ends,
        "rows": rows,
    }


def lake_table(database: str, name: str) -> dict[str, Any]:
    """Return a lake table with a few snapshots, as the catalog loads it."""
    place = f"s3://lake/warehouse/{database}/{name}"
    snapshots = [
        {
            "snapshot-id": 6194823109123847123 - number,
            "timestamp-ms": NOW_US // 1_000 - 60_000 * (number + 1),
            "summary": {
                "operation": "overwrite" if number == 2 else "append",
                "added-records": str(12_345 * (number + 1)),
                "added-data-files": "8",
                "total-records": str(2_000_000_000 - 50_000 * number),
            },
        }
        for number in range(5)
    ]
    metadata = {"format-version": 2, "location": place, "snapshots": snapshots}
    return {"metadata-location": f"{place}/metadata/00042-7d.metadata.json", "metadata": metadata}


class PageServer:
    """The page and a status that a test sets. `token` is the one that is asked for."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.full: Callable[[dict[str, Any]], dict[str, Any]] = lambda table: in_full(
            table, random.Random(3)
        )
        self.token: str | None = None
        self.refuses = False
        self.may_read_rows = True
        self.owner: str | None = None
        """The shard of the tables, if that is another one."""
        self.info: Callable[[str], dict[str, Any]] = table_info
        self.rows: Callable[[int], dict[str, Any]] = newest_rows
        self.rejecting = "billing.alerts_189"
        """The table with rejected rows."""
        self.asked: list[str] = []
        self.url = ""

    def answer(self, target: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        self.asked.append(target)
        url = urlsplit(target)
        if url.path == "/":
            page = status_page()
            return 200, dict(page.headers), bytes(page.body)
        if url.path in DOCUMENT_FILES:
            return 200, {}, (_DOCUMENTS / DOCUMENT_FILES[url.path]).read_bytes()
        if self.token is not None and token != f"Bearer {self.token}":
            return _refused(401, "unauthorized", "a token is needed")
        if url.path != "/v1/status":
            return self._answer_of_table(unquote(url.path))
        if self.refuses or self.status is None:
            return _refused(503, "unavailable", "the service is stopping")
        status = self.status
        if table := parse_qs(url.query).get("table"):
            found = [self.full(t) for t in status["tables"] if t["table"] == table[0]]
            status = {**status, "tables": found}
        return 200, {"content-type": "application/json"}, json.dumps(status).encode()

    def _answer_of_table(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return what a page asks for once about one table."""
        parts = path.split("/")[1:]
        answer: dict[str, Any]
        if not self.may_read_rows:
            return _refused(403, "forbidden", "the token has no grant")
        if self.owner is not None and parts[0] != "iceberg":
            return _refused(421, "not_owner", "another shard has it", owner=self.owner)
        if parts[0] == "iceberg":
            answer = lake_table(parts[3], parts[5])
        elif parts[-1] == "tables":
            answer = {"tables": [f"{self.rejecting}__rejected"]}
        elif parts[-1] == "count":
            answer = {"count": 1_234}
        elif parts[-1] == "state":
            ends = {"log_start_offset": 0, "high_watermark": 112}
            answer = {"positions": {"0": ends, "1": ends}}
        elif parts[-1] == "fetch":
            answer = self.rows(int(parts[-2]))
        else:
            answer = self.info(parts[-1])
        return 200, {"content-type": "application/json"}, json.dumps(answer).encode()


def _refused(
    status: int, code: str, message: str, **more: str
) -> tuple[int, dict[str, str], bytes]:
    body = {"error": {"code": code, "message": message, **more}}
    return status, {"content-type": "application/json"}, json.dumps(body).encode()


@contextlib.contextmanager
def page_server() -> Iterator[PageServer]:
    """Serve the page on a port of its own; leaving ends that."""
    world = PageServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = world.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        world.url = f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield world
        finally:
            server.shutdown()
            thread.join()
