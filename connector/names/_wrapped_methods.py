"""Wrappers around methods of Spark's Python classes, and the sessions of the wrapped objects.

Spark does not tell a Python source about statements on names, nor the session and purpose of a
load. Where PySpark has no hook, a method is wrapped; all such wrapping is done here. The exception
is `_partition_reader.py`, which wraps a function in Spark's worker, a process without this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Method", "has_jvm", "original_method", "session_of", "wrap_method"]

Method = Callable[..., Any]


def wrap_method(owner: Any, name: str, wrapper: Method, *, mark: str) -> None:
    """Replace a method by `wrapper`; a second call with the same mark changes nothing.

    `wrapper` is called with the object, the original method and the arguments.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, mark):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        return wrapper(self, original, *arguments, **options)

    setattr(wrapped, mark, original)
    setattr(owner, name, wrapped)


def original_method(owner: Any, name: str, *, mark: str) -> Any:
    """Return the method that `wrap_method` with this mark has wrapped."""
    method = getattr(owner, name)
    return getattr(method, mark, method)


def session_of(holder: Any) -> Any:
    """Return the session of a reader, a writer or a catalog, or a session itself."""
    # Spark Connect's readers and stream writer call their session a client or a session.
    for attribute in ("_sparkSession", "_spark", "_session", "_client"):
        session = getattr(holder, attribute, None)
        if session is not None and hasattr(session, "catalog"):
            return session
    return holder


def has_jvm(spark: Any) -> bool:
    """Whether the session's JVM is within reach: in the driver itself, not behind Spark Connect."""
    return getattr(spark, "_jsparkSession", None) is not None
