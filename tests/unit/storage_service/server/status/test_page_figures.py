"""The status page's figures, order and troubles, in the language that they are written in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from streamhouse.storage_service.server import status

NODE = shutil.which("node")
FIGURES = Path(status.__file__).parent / "page" / "figures.js"


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_functions_of_the_page_hold() -> None:
    assert NODE is not None
    script = Path(__file__).parent / "figures.test.js"

    done = subprocess.run(
        [NODE, "--test", str(script)],
        env={**os.environ, "FIGURES": str(FIGURES)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
