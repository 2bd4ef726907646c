"""Valid names of consumers: readers which report their position, and Kafka's consumer groups."""

from __future__ import annotations

import re
from typing import Final

from streamhouse.core.errors import InvalidRequestError

__all__ = ["CONSUMER_NAME_RULE", "check_consumer_name", "is_consumer_name"]

CONSUMER_NAME_RULE: Final = "1 to 200 letters, digits, '.', '_', ':', '@' and '-'"
_NAME: Final = re.compile(r"[A-Za-z0-9._:@-]{1,200}")


def is_consumer_name(name: str) -> bool:
    """Whether the name follows the rule."""
    return _NAME.fullmatch(name) is not None


def check_consumer_name(name: str, *, table: str) -> None:
    """Raise `InvalidRequestError` for a consumer's name that does not follow the rule."""
    if not is_consumer_name(name):
        raise InvalidRequestError(
            f"table '{table}': a consumer is named by {CONSUMER_NAME_RULE}, not {name[:80]!r}"
        )
