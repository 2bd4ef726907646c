"""The wheel as users get it, and commands run with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

__all__ = ["ROOT", "run", "start", "wheel"]

ROOT: Final = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def start(*command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command without what points to this tree; it may fail."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")}
    return subprocess.run(
        command,
        env={**kept, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run(*command: str, timeout_s: float = 240) -> str:
    """Run a command that must not fail; return what it printed."""
    done = start(*command, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()
