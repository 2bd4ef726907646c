"""Plain English: the share of pronouns in each document has a limit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.source_files import ROOT

# The limits of a document: pronouns in percent of the words, and heavy sentences (a quarter
# pronouns and more) in percent of the sentences.
_PRONOUNS_MAX: Final = 4.0
_HEAVY_MAX: Final = 0.5
_HEAVY: Final = 0.25
# Shorter pieces are labels; longer ones are lists.
_WORDS_MIN, _WORDS_MAX = 9, 45

_PRONOUN: Final = re.compile(
    r"\b(it|its|what|that|those|these|who|whoever|whatever|one|ones|others?|them|they|theirs"
    r"|nobody|somebody|anybody|either|neither|so|such|there|then)\b",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"[A-Za-z']+")
_FENCE: Final = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`]+`")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# Blocks: paragraphs, list items and the cells of tables.
_BLOCK: Final = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|\n(?=\|)|\|")
SENTENCE_END: Final = re.compile(r"(?<=[.;:])\s+")


@dataclass(frozen=True, slots=True)
class Density:
    """How dense pronouns are in the sentences of a text."""

    pronouns: float
    heavy: float


def sentences(document: str) -> list[str]:
    """Return the sentences of a Markdown document, without code and headings."""
    text = re.sub(r"^#.*$|^    \S.*$", "", _FENCE.sub("", document), flags=re.MULTILINE)
    text = _LINK.sub(r"\1", _CODE.sub("code", text))
    return [s for block in _BLOCK.split(text) for s in SENTENCE_END.split(block.replace("\n", " "))]


def density(texts: list[str]) -> Density:
    """Return the mean share of pronouns in sentences, and the share of heavy sentences."""
    shares = [
        len(_PRONOUN.findall(text)) / words
        for text in texts
        if _WORDS_MIN <= (words := len(_WORD.findall(text))) <= _WORDS_MAX
    ]
    if not shares:
        return Density(0.0, 0.0)
    heavy = sum(share >= _HEAVY for share in shares)
    return Density(100 * sum(shares) / len(shares), 100 * heavy / len(shares))


def _documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("path", _documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_plain(path: Path) -> None:
    measured = density(sentences(path.read_text(encoding="utf-8")))

    assert measured.pronouns <= _PRONOUNS_MAX
    assert measured.heavy <= _HEAVY_MAX


def test_pronouns_are_counted_by_sentence() -> None:
    plain = "The worker writes the file and reports the size of the file to the service."
    heavy = "What it has is what others lack, so it is theirs and nobody's who has it then."

    assert density([plain]) == Density(0.0, 0.0)
    assert density([plain, heavy]).heavy == 50.0
