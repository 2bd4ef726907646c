"""Conditions that say nothing but that keys are equal are known as such."""

from __future__ import annotations

import pytest

from streamhouse.connector.changes._expressions import key_equalities


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t.id = s.user", {"id": "user"}),
        ("s.user=t.id", {"id": "user"}),
        ("T.`id` == S.user AND t.day = s.day", {"id": "user", "day": "day"}),
        ("t.id = s.user OR t.day = s.day", None),
        ("t.id = s.user AND t.day > s.day", None),
        ("t.id = t.user", None),
        ("t.id = s.user AND t.id = s.other", None),
        ("id = user", None),
        ("t.id = s.user + 1", None),
        ("other.id = s.user", None),
        ("NOT t.id = s.user", None),
    ],
)
def test_equal_keys_are_found(text: str, expected: dict[str, str] | None) -> None:
    assert key_equalities(text, target_alias="t", source_alias="s") == expected
