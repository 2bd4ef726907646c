"""Streamhouse's errors as Spark shows them: one sentence on the last line, without a traceback."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

from streamhouse.storage_service.errors import StreamhouseError

__all__ = ["spark_errors", "spark_iterator_errors"]

# Spark's worker reads it when it reports an exception; it changes nothing else.
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def spark_errors(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method that Spark calls report our errors by their message alone.

    Everything else is a bug and keeps its traceback.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except StreamhouseError as error:
            raise _shown(error) from None

    return wrapped


def spark_iterator_errors(
    method: Callable[_P, Iterator[_T]],
) -> Callable[_P, Iterator[_T]]:
    """Do the same for a method whose iterator Spark consumes later."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        try:
            yield from method(*args, **kwargs)
        except StreamhouseError as error:
            raise _shown(error) from None

    return wrapped


def _shown(error: StreamhouseError) -> StreamhouseError:
    os.environ[_HIDE_TRACEBACK] = "1"
    shown = type(error)(f"[{error.code}] {error.message}")
    return shown.with_traceback(error.__traceback__)
