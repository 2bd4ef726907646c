"""The results of checks: facts about every bucket, and findings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BucketFacts", "CheckReport", "Finding", "Severity", "TableFacts"]


class Severity(enum.StrEnum):
    """Errors: acknowledged data is damaged. Warnings: mended by the next start, or meant."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault and its place."""

    severity: Severity
    where: str
    problem: str

    def to_json(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"severity": str(self.severity), "where": self.where, "problem": self.problem}


@dataclass(slots=True, kw_only=True)
class BucketFacts:
    """The facts of one bucket. Without rows by key `applied_offset` and `key_count` are None.

    `transaction_us` is the time of the last rows that a transaction wrote to the log; rows below
    `forgotten_offset` may have left the log without a copy in the lake.
    """

    bucket: int
    log_start_offset: int = 0
    log_end_offset: int = 0
    segments: int = 0
    frames: int = 0
    rows: int = 0
    log_bytes: int = 0
    applied_offset: int | None = None
    key_count: int | None = None
    tiered_offset: int = 0
    transaction_us: int = 0
    forgotten_offset: int = 0


@dataclass(slots=True, kw_only=True)
class TableFacts:
    """The facts of one table, bucket by bucket.

    `lake_offsets` has, by (bucket, offset), the offsets of the row versions that a lake table of a
    primary key table must have if it covers the bucket up to the offset; only where known.
    """

    path: str
    table_id: int
    buckets: list[BucketFacts] = field(default_factory=list)
    lake_offsets: dict[tuple[int, int], npt.NDArray[np.int64]] = field(
        default_factory=dict, repr=False
    )
    logs: dict[int, Callable[[Collection[int]], dict[int, str]]] = field(
        default_factory=dict, repr=False
    )

    def fingerprints(self, bucket: int, offsets: Collection[int]) -> dict[int, str]:
        """See the class."""
        log = self.logs.get(bucket)
        return {} if log is None else log(offsets)


@dataclass(slots=True)
class CheckReport:
    """All facts and findings of a check."""

    data_dir: str
    tables: list[TableFacts] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def error(self, where: str, problem: str) -> None:
        """Add an error: damage."""
        self.findings.append(Finding(Severity.ERROR, where, problem))

    def warning(self, where: str, problem: str) -> None:
        """Add a warning: the next start mends the fault, or the fault may be meant."""
        self.findings.append(Finding(Severity.WARNING, where, problem))

    @property
    def is_sound(self) -> bool:
        """Whether all acknowledged data is undamaged."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "data_dir": self.data_dir,
            "is_sound": self.is_sound,
            "tables": [
                {
                    "path": table.path,
                    "table_id": table.table_id,
                    "buckets": [
                        {name: getattr(facts, name) for name in BucketFacts.__slots__}
                        for facts in table.buckets
                    ],
                }
                for table in self.tables
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }
