"""Plain English in code: no room is above the bars for names and docstrings."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from typing import Final, NamedTuple

import pytest

from tests.architecture.source_files import SourceFile, library_files
from tests.architecture.test_plain_english import SENTENCE_END, density
from tests.architecture.test_public_modules import room_of

# Words that say nothing of the thing that they name.
_VAGUE: Final = frozenset(
    {
        *("found", "known", "own", "owns", "given", "wanted", "left", "taken", "asked", "told"),
        *(
            "said",
            "kept",
            "held",
            "made",
            "done",
            "here",
            "there",
            "others",
            "other",
            "one",
            "ones",
        ),
        *("what", "who", "whose", "rest", "more", "most", "now", "then", "before", "after"),
        "beside",
    }
)


class Bars(NamedTuple):
    """What a room may have at most, each in percent."""

    names: float  # assigned names that say nothing, of all assigned names
    pronouns: float  # pronouns, of the words of docstrings
    heavy: float  # sentences of docstrings of which a quarter are pronouns


_PLAIN: Final = Bars(1.0, 4.0, 0.5)


@cache
def _rooms() -> dict[str, list[SourceFile]]:
    rooms = defaultdict(list)
    for file in library_files():
        rooms[room_of(file.module)].append(file)
    return dict(rooms)


def _names(files: list[SourceFile]) -> list[str]:
    return [
        node.id
        for file in files
        for node in file.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _docstring_sentences(files: list[SourceFile]) -> list[str]:
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    return [
        sentence
        for file in files
        for node in file.nodes
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        for sentence in SENTENCE_END.split(text.replace("\n", " "))
    ]


def measured(room: str) -> Bars:
    """Return how plain a room is."""
    files = _rooms()[room]
    names, spoken = _names(files), density(_docstring_sentences(files))
    vague = sum(name in _VAGUE for name in names)
    return Bars(100 * vague / max(1, len(names)), spoken.pronouns, spoken.heavy)


@pytest.mark.parametrize("room", sorted(_rooms()))
def test_a_room_is_plain(room: str) -> None:
    values = measured(room)

    assert all(value <= bar for value, bar in zip(values, _PLAIN, strict=True)), (
        f"{values} of {room} is above {_PLAIN}: say things by their names"
    )
