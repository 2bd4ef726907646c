"""docs/python.md has every public name of the client, and every public method of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

import pytest

import streamhouse

DOCS: Final = Path(__file__).resolve().parents[3] / "docs"
TEXT: Final = (DOCS / "python.md").read_text(encoding="utf-8")
ALL_TEXT: Final = TEXT + "".join(
    path.read_text(encoding="utf-8") for path in DOCS.glob("spark*.md")
)

# What a user calls, and not only reads the fields of.
CLASSES: Final = (
    "AsyncStreamhouseClient",
    "StreamhouseClient",
    "Producer",
    "Subscription",
    "TableScan",
    "Transaction",
)


def _methods(name: str) -> list[str]:
    return [method for method in dir(getattr(streamhouse, name)) if not method.startswith("_")]


def _is_documented(method: str) -> bool:
    return re.search(rf"[.`]{method}\b", TEXT) is not None


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_documented(name: str) -> None:
    assert [method for method in _methods(name) if not _is_documented(method)] == []


def test_every_public_name_is_documented() -> None:
    names = {name for name in streamhouse.__all__ if name != "__version__"}

    assert {name for name in names if not re.search(rf"\b{name}\b", ALL_TEXT)} == set()


def test_every_error_is_documented_as_its_docstring_says() -> None:
    documented = dict(re.findall(r"^\| `(\w+Error)` \| (.*) \|$", TEXT, re.MULTILINE))
    errors = [
        value
        for name in streamhouse.__all__
        if inspect.isclass(value := getattr(streamhouse, name))
        and issubclass(value, streamhouse.StreamhouseError)
    ]

    assert documented == {
        error.__name__: (inspect.getdoc(error) or "").splitlines()[0] for error in errors
    }
