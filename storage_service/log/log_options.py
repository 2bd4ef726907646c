"""Limits of one log, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.log.segment_format import PAYLOAD_BYTES_LIMIT

__all__ = ["LogOptions"]

_MIB: Final = 1024 * 1024
_DAY_US: Final = 24 * 60 * 60 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Limits of one log. Changing them never makes stored data unreadable."""

    # A segment exceeds this by one commit group at most.
    segment_bytes_max: int = 128 * _MIB
    index_interval_bytes: int = 4096
    # Payload of one frame.
    frame_bytes_max: int = 64 * _MIB
    # Batches remembered per idempotent writer, and writers: the longest idle is forgotten first.
    writer_window: int = 5
    writers_max: int = 20_000
    writer_expiry_us: int = 7 * _DAY_US

    def __post_init__(self) -> None:
        if not 0 < self.frame_bytes_max <= PAYLOAD_BYTES_LIMIT:
            raise ValueError(f"frame_bytes_max is {self.frame_bytes_max}, not in (0, 1 GiB]")
        for name in ("segment_bytes_max", "index_interval_bytes", "writer_window", "writers_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, not positive")
