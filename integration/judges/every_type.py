"""Rows of every type with nulls, and the JSON that each judge makes of them."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa

from integration.judges.json_rows import to_json

__all__ = ["SCHEMA", "plain", "row"]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("number", pa.int32()),
        ("ratio", pa.float32()),
        ("amount", pa.float64()),
        ("price", pa.decimal128(9, 2)),
        ("wide", pa.decimal128(18, 3)),
        ("huge", pa.decimal128(38, 10)),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("ts_ntz", pa.timestamp("us")),
        ("tags", pa.list_(pa.int16())),
        ("counts", pa.map_(pa.string(), pa.int8())),
        ("place", pa.struct([("city", pa.string()), ("xy", pa.list_(pa.float64()))])),
    ]
)


def row(i: int) -> dict[str, Any]:
    """Return row `i`; its id is `i`."""
    day = dt.date(1970, 1, 1) + dt.timedelta(days=i % 9 - 4)
    moment = dt.datetime(1970, 1, 1) + dt.timedelta(hours=7 * i - 200, microseconds=i)
    values = {
        "id": i,
        "flag": i % 2 == 0,
        "tiny": i % 7 - 3,
        "small": i % 13 - 6,
        "number": i % 40 - 20,
        "ratio": i / 4,
        "amount": -i / 8,
        "price": (Decimal(i % 11 - 5) / 4).quantize(Decimal("0.01")),
        "wide": Decimal(i - 30) * Decimal("1234567.891"),
        "huge": Decimal(f"{i - 30}2345678901234567890.0000000001"),
        "name": ("", "a", "ü2", "name with spaces/and=more", "ü3")[i % 5],
        "raw": bytes([i % 3, 255]),
        "day": day,
        "ts": moment.replace(tzinfo=dt.UTC),
        "ts_ntz": moment,
        "tags": [i % 5, None],
        "counts": [(f"k{i % 2}", i % 100)],
        "place": {"city": f"c{i}", "xy": [i / 2]},
    }
    # One row in six has nulls wherever they may be, the others have one somewhere.
    nullable = [name for name in SCHEMA.names if name != "id"]
    gone = nullable if i % 6 == 5 else [nullable[i % len(nullable)]]
    return values | dict.fromkeys(gone)


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as the judges answer: JSON values, maps as objects, timestamps without a zone."""
    answers: list[dict[str, Any]] = json.loads(to_json(rows))
    for answer in answers:
        if answer.get("counts") is not None:
            answer["counts"] = dict(answer["counts"])
        if answer.get("ts") is not None:
            answer["ts"] = answer["ts"].removesuffix("+00:00")
    return answers
