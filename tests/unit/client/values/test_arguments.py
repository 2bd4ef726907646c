"""Arguments that have one meaning are taken, others are refused by one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from streamhouse.client.values import arguments
from streamhouse.core.errors import InvalidRequestError


def test_a_name_alone_is_one_name() -> None:
    assert arguments.names("id", argument="primary_key") == ("id",)
    assert arguments.names(["a", "b"], argument="primary_key") == ("a", "b")
    assert arguments.names((name for name in "ab"), argument="columns") == ("a", "b")


def test_properties_may_be_numbers_and_booleans() -> None:
    found = arguments.property_texts({"a": True, "b": 5, "c": "7d"}, argument="properties")

    assert found == {"a": "true", "b": "5", "c": "7d"}


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (arguments.names, None, "x is a list of names, as ['id'], not None"),
        (arguments.names, b"id", "not b'id'"),
        (arguments.names, [1], "not 1"),
        (arguments.whole, True, "not True"),
        (arguments.whole, 1.0, "not 1.0"),
        (arguments.whole, "4", "not '4'"),
        (arguments.seconds, "30", "x is a number of seconds above 0, not '30'"),
        (arguments.seconds, 0, "not 0"),
        (arguments.property_texts, {"a": None}, "x: 'a' is None, which is no text"),
        (arguments.property_texts, "a", "property -> value"),
    ],
)
def test_others_are_refused(check: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(value, argument="x")

    assert words in refused.value.message
