"""The `streamhouse` command as a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from tests.support.python_process import run_python

__all__ = ["streamhouse"]


def streamhouse(
    *arguments: object, expect: int | None = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command; its exit code must be `expect`, if that is given."""
    done = run_python(
        ["-c", "from streamhouse.cli import main; main()", *map(str, arguments)], env=env
    )
    is_expected = expect is None or done.returncode == expect
    assert is_expected, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done
