"""Two texts have the same words only if they are equal, and only short texts are found by them."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from streamhouse.connector.lookup._key_rows import KeyRows, Keys
from streamhouse.connector.lookup._text_words import are_short_texts, text_words


def test_words_of_texts_differ_as_the_texts_do() -> None:
    random = Random(3)
    letters = ["\0", "a", "é", "\x7f"]
    texts = ["".join(random.choices(letters, k=random.randint(0, 20))) for _ in range(5_000)]
    texts += ["a" * n for n in range(600)] + ["", "\0", "\0\0", "a\0"]
    array = pa.array(["before", *texts])[1:]

    head, tail = (words.tolist() for words in text_words(array))

    seen: dict[tuple[int, int], str] = {}
    for text, words in zip(texts, zip(head, tail, strict=True), strict=True):
        if len(text.encode()) <= 15:
            assert seen.setdefault(words, text) == text
    for text, words in zip(texts, zip(head, tail, strict=True), strict=True):
        assert len(text.encode()) <= 15 or words not in seen
    assert [words.tolist() for words in text_words(array[:0])] == [[], []]


@pytest.mark.parametrize("longest", [3, 15, 16])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_a_table_of_texts_finds_its_own_and_no_others(longest: int, kind: pa.DataType) -> None:
    known = pa.array([f"{i:03}" for i in range(700)] + ["x" * longest, ""], kind)
    keys = Keys([known])
    assert keys.are_short_texts == are_short_texts(known) == (longest <= 15)
    rows = pa.RecordBatch.from_arrays([pa.array(range(702))], names=["v"])

    table = KeyRows.complete(rows.schema, keys, rows, has_runs=False)

    assert table.find(keys).tolist() == [*range(1, 703)]
    others = pa.array(["700", "00", "0000", "x" * (longest + 1), "x" * 17, "\0", "x" * 300], kind)
    assert table.find(Keys([others])).tolist() == [0] * 7
