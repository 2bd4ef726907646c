"""What a connection writes to, in memory."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["MemoryTransport"]


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; always has room."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False
        self.reads = True

    def write(self, data: Any) -> None:
        """Keep bytes."""
        assert not self.is_closed
        self.sent += data

    def close(self) -> None:
        """Close at once."""
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        """Whether the transport is closed."""
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return addresses."""
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def pause_reading(self) -> None:
        """Note that nothing is read."""
        self.reads = False

    def resume_reading(self) -> None:
        """Note that bytes are read again."""
        self.reads = True

    def get_write_buffer_size(self) -> int:
        """Return 0: all is sent at once."""
        return 0
