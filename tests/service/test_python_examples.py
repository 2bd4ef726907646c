"""The examples of docs/python.md, run from top to bottom against one service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_examples_run(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    examples = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(examples) > 10
    monkeypatch.setenv("STREAMHOUSE_ENDPOINT", service.endpoint)
    names: dict[str, Any] = {}

    for example in examples:
        # A failure says the line of the document.
        lines_before = text.count("\n", 0, example.start(1))
        program = compile("\n" * lines_before + example.group(1), str(DOCUMENT), "exec")
        exec(program, names)

    names["client"].close()
