"""Methods of Spark's Python classes that ask us first, and the sessions that they belong to.

Spark tells a Python source neither of statements on its names, nor in which session, and for what,
it is loaded. Where PySpark has no hook, a method is put around Spark's own; it is done here alone.
(`scan/spark_reader.py` changes a function of Spark's worker, a process that loads none of this.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Around", "has_jvm", "own_method", "put_around", "session_of"]

Around = Callable[..., Any]
"""What is called in a method's place: with the object, Spark's own method and the arguments."""


def put_around(owner: Any, name: str, around: Around, *, mark: str) -> None:
    """Let `around` be called in place of a method; again with the same mark changes nothing."""
    own = getattr(owner, name, None)
    if own is None or hasattr(own, mark):
        return

    @functools.wraps(own)
    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        return around(self, own, *arguments, **options)

    setattr(changed, mark, own)
    setattr(owner, name, changed)


def own_method(owner: Any, name: str, *, mark: str) -> Any:
    """Return a method as it was before `put_around` with this mark."""
    method = getattr(owner, name)
    return getattr(method, mark, method)


def session_of(holder: Any) -> Any:
    """Return the session of a reader, a writer, a catalog, or a session itself."""
    # Spark Connect's readers call their session a client, and its stream writer calls it so.
    for attribute in ("_sparkSession", "_spark", "_session", "_client"):
        found = getattr(holder, attribute, None)
        if found is not None and hasattr(found, "catalog"):
            return found
    return holder


def has_jvm(spark: Any) -> bool:
    """Whether a session's JVM can be asked: it is the driver's own, not behind Spark Connect."""
    return getattr(spark, "_jsparkSession", None) is not None
