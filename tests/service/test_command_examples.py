"""The examples of docs/command_line.md, run from top to bottom against one service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"
_TIMEOUT_S: Final = 120
_PROGRAM: Final = (
    f"#!/bin/sh\nexec {sys.executable} -c 'from streamhouse.cli import main; main()' \"$@\"\n"
)


def test_the_examples_run(service: ServiceProcess, tmp_path: Path) -> None:
    examples = re.findall(r"^```sh\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    assert len(examples) > 5
    program = tmp_path / "bin" / "streamhouse"
    program.parent.mkdir()
    program.write_text(_PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "STREAMHOUSE_ENDPOINT": service.endpoint,
    }

    for example in examples:
        done = subprocess.run(
            ["bash", "-eu", "-c", example],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), example
