"""The examples of HTTP: those of docs/http_api.md with curl, that in JavaScript with node."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "examples" / "javascript"
TEXT: Final = (ROOT / "docs" / "http_api.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```sh\n(.*?)^```\n(?:\n```json\n(.*?)^```)?", TEXT, re.M | re.S)
_TIMEOUT_S: Final = 120


def _without_places(value: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what depends on what was written before, and when."""
    return {
        name: v
        for name, v in value.items()
        if name not in ("buckets", "timestamp_us", "written_us")
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_answers_of_the_documented_calls_are_those_documented(
    service: ServiceProcess, tmp_path: Path
) -> None:
    documented = [(shell, said) for shell, said in BLOCKS if '"$URL/' in shell]
    assert len(documented) >= 4

    for shell, said in documented:
        answers = _curl(shell, service, tmp_path)
        assert all("error" not in answer for answer in answers), (shell, answers)
        if said:
            known = _without_places(json.loads(said))
            assert _without_places(answers[0]) == known, shell


def _curl(shell: str, service: ServiceProcess, directory: Path) -> list[dict[str, Any]]:
    """Run commands; return the JSON that they have printed."""
    done = subprocess.run(
        ["sh", "-ec", shell.replace("curl ", "curl --silent --noproxy '*' ")],
        cwd=directory,
        env={**os.environ, "URL": service.endpoint},
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    text, answers = done.stdout.decode(), []
    while text.strip():
        answer, end = json.JSONDecoder().raw_decode(text := text.lstrip())
        answers.append(answer)
        text = text[end:]
    return answers


def test_the_example_in_javascript(service: ServiceProcess, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed: the example in JavaScript was not run")
    for name in ("package.json", "package-lock.json", "boxes.js"):
        shutil.copy(EXAMPLE / name, tmp_path)
    install = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    installed = subprocess.run(
        install, cwd=tmp_path, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if installed.returncode:
        pytest.skip("npm has no apache-arrow here: the example in JavaScript was not run")

    done = subprocess.run(
        [node, "boxes.js"],
        cwd=tmp_path,
        env={**os.environ, "STREAMHOUSE_ENDPOINT": service.endpoint},
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == [
        "changes 3 of red, blue, red",
        'found [{"id":2,"color":"blue","size":20.5},null]',
        "event +I 1 red",
        "event +I 2 blue",
        "event +I 3 red",
        "event +I 4 green",
        "event -D 2 blue",
    ]
