"""Values that people write as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.values.units import (
    parse_boolean,
    parse_bytes,
    parse_duration_ms,
    parse_whole_number,
)


def test_values_are_read_in_any_case_and_with_spaces() -> None:
    assert [parse_duration_ms(t, name="x") for t in ("7d", "12 h", "1MIN", "90s", "5ms")] == [
        604_800_000,
        43_200_000,
        60_000,
        90_000,
        5,
    ]
    assert [parse_bytes(t, name="x") for t in ("128mb", "64 KB", "1g", "4096")] == [
        128 << 20,
        64 << 10,
        1 << 30,
        4096,
    ]
    assert [parse_boolean(t, name="x") for t in ("true", " False")] == [True, False]
    assert [parse_whole_number(t, name="x") for t in ("1", " 20 ")] == [1, 20]


def test_what_is_too_much_means_as_much_as_there_can_be() -> None:
    assert parse_duration_ms("9" * 18 + "d", name="x") == 10_000 * 366 * 86_400_000
    assert parse_bytes("9" * 18 + "gb", name="x") == 1 << 60
    assert parse_whole_number("9" * 50, name="x") == (1 << 63) - 1


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (parse_boolean, "yes", "true or false"),
        (parse_boolean, "1", "true or false"),
        (parse_whole_number, "0", "a whole number from 1 on"),
        (parse_whole_number, "1.5", "a whole number from 1 on"),
        (parse_whole_number, "", "a whole number from 1 on"),
        (parse_whole_number, "1_000", "a whole number from 1 on"),
        (parse_whole_number, "+5", "a whole number from 1 on"),
        (parse_whole_number, "--5", "a whole number from 1 on"),
        (parse_whole_number, "9" * 101, "a whole number from 1 on"),
        (parse_bytes, "big", "a size: "),
        (parse_bytes, "0mb", "a size: "),
        (parse_bytes, "1tb", "a size: "),
        (parse_bytes, "-1", "a size: "),
        (parse_duration_ms, "soon", "a duration: "),
        (parse_duration_ms, "0s", "a duration: "),
        # A number alone does not say of what.
        (parse_duration_ms, "90", "a duration: "),
        (parse_duration_ms, "9" * 19 + "s", "a duration: "),
    ],
)
def test_a_bad_value_is_told_with_its_place(
    parse: Callable[..., Any], text: str, wanted: str
) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"^option 'o' = '{re.escape(text[:80])}' must be {wanted}"
    ):
        parse(text, name="option 'o'")


def test_a_number_has_the_bounds_of_its_option() -> None:
    assert parse_whole_number("0", name="x", least=0, most=5) == 0

    with pytest.raises(InvalidRequestError, match="x = '6' must be a whole number from 0 to 5"):
        parse_whole_number("6", name="x", least=0, most=5)
