"""The `streamhouse` command as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

__all__ = ["streamhouse"]


def streamhouse(
    *arguments: object, expect: int = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command; its exit code must be `expect`."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from streamhouse.cli import main; main()",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done
