"""Values that people write as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.units import (
    duration_as_option,
    parse_boolean,
    parse_bytes,
    parse_duration_ms,
    parse_whole_number,
    size_as_option,
)


def test_values_are_read_in_any_case_and_with_spaces() -> None:
    assert [parse_duration_ms(t, name="x") for t in ("7d", "12 h", "1MIN", "90s", "5ms")] == [
        604_800_000,
        43_200_000,
        60_000,
        90_000,
        5,
    ]
    assert [parse_bytes(t, name="x") for t in ("128mb", "64 KB", "1g", "4096", "2TiB")] == [
        128 << 20,
        64 << 10,
        1 << 30,
        4096,
        2 << 40,
    ]
    assert [parse_boolean(t, name="x") for t in ("true", " False")] == [True, False]
    assert [parse_whole_number(t, name="x") for t in ("1", " 20 ")] == [1, 20]


@pytest.mark.parametrize("unit", ["K", "M", "G", "T"])
def test_every_spelling_of_a_size_means_the_same(unit: str) -> None:
    texts = [f"3{unit}", f"3{unit}B", f"3{unit}iB", f"3 {unit.lower()}ib", f"3{unit.lower()}b"]

    assert len({parse_bytes(text, name="x") for text in texts}) == 1


@given(st.integers(1, 1 << 50) | st.integers(0, 50).map(lambda bits: 3 << bits))
def test_what_is_written_as_an_option_is_read_as_the_same(number: int) -> None:
    assert parse_bytes(size_as_option(number), name="x") == number
    ms = min(number, 10_000 * 366 * 86_400_000)
    assert parse_duration_ms(duration_as_option(ms), name="x") == ms


def test_a_value_is_written_in_its_largest_unit() -> None:
    sizes = (512 << 20, 3 << 40, 1536, 1000, 0)
    assert [size_as_option(size) for size in sizes] == ["512MiB", "3TiB", "1536B", "1000B", "0B"]
    durations = (300_000, 90_000, 86_400_000, 7_200_000, 1, 0)
    assert [duration_as_option(duration) for duration in durations] == [
        *("5m", "90s", "1d", "2h", "1ms", "0ms")
    ]


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
        (parse_bytes, "1xb", "a size: "),
        (parse_bytes, "1.5MiB", "a size: "),
        (parse_bytes, "1ib", "a size: "),
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
