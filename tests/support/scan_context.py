"""What a read of a log table shares among its splits, for tests of single pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamhouse.reading.plan.scan_schema import SYSTEM_COLUMNS, change_type_column
from streamhouse.reading.scan.scan import ScanContext

__all__ = ["scan_context"]

_BUCKET, _OFFSET, _TIMESTAMP = SYSTEM_COLUMNS


def scan_context(**more: Any) -> ScanContext:
    """Return a context without columns to show, but for what `more` says."""
    plain = ScanContext(
        table="db.t",
        table_id=1,
        schema_id=0,
        endpoint="",
        token=None,
        output=(),
        bucket_column=_BUCKET,
        offset_column=_OFFSET,
        timestamp_column=_TIMESTAMP,
        change_type_column=change_type_column(has_changelog=False),
    )
    return replace(plain, **more)
