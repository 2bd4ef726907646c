"""`streamhouse serve` whose wall clock is set by a file. Run as a program:

    python -m tests.support.clocked_service FILE SERVE-ARGUMENT...

FILE holds how many seconds the clock is ahead, negative if it is behind; none means 0.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(file: str, *arguments: str) -> None:
    from streamhouse.cli import main as streamhouse

    path, real = Path(file), time.time_ns

    def time_ns() -> int:
        text = path.read_text(encoding="ascii") if path.exists() else ""
        return real() + int(text or "0") * 1_000_000_000

    time.time_ns = time_ns
    sys.argv = ["streamhouse", "serve", *arguments]
    streamhouse()


if __name__ == "__main__":
    main(*sys.argv[1:])
