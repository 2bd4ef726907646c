"""The figures, order, troubles and values of the status page, run as JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from streamhouse.storage_service.server import status

NODE = shutil.which("node")
PAGE = Path(status.__file__).parent / "page"


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_functions_of_the_page_hold() -> None:
    assert NODE is not None
    scripts = sorted(map(str, Path(__file__).parent.glob("*.test.js")))

    done = subprocess.run(
        [NODE, "--test", *scripts],
        env={**os.environ, "PAGE": str(PAGE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
