"""The door for what catalogs raise: pyiceberg, SQLAlchemy, HTTP and cloud clients share no root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamhouse.storage_service.errors import StreamhouseError, UnavailableError, UnsupportedError
from streamhouse.storage_service.rest_catalog.catalog_errors import sentence_of

__all__ = ["catalog_errors"]


@contextlib.contextmanager
def catalog_errors(doing: str) -> Iterator[None]:
    """Raise what pyiceberg and its catalogs raise inside the block as an error of ours."""
    try:
        yield
    except StreamhouseError:
        raise
    except (NotImplementedError, ValueError, ImportError) as error:
        raise UnsupportedError(f"cannot {doing}: {error}") from error
    except Exception as error:
        # Each catalog has its own errors, without a common root.
        raise UnavailableError(
            f"cannot {doing}: {type(error).__name__}: {sentence_of(error)}"
        ) from error
