"""Opening an object store by its URL, and probing the store before first use."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.threads import Pool
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.journal.store._s3_store import S3ObjectStore
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    StoreUnavailableError,
)

__all__ = ["open_store", "probe", "refuse_within"]

_RIVALS: Final = 4


def open_store(
    url: str, *, properties: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> ObjectStore:
    """Open `s3://bucket/prefix` or `file:///directory`, without a request.

    `properties` are named like the lake's: `s3.endpoint`, `s3.region`, `s3.access-key-id` and more.
    Missing properties come from the environment (`AWS_*`). With `timeout_s` each request is
    limited, and not retried; no connection is shared with other stores. Raises
    `InvalidRequestError`.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidRequestError("--journal takes s3://bucket/prefix or file:///directory only")
    if parts.scheme == "s3" and parts.netloc:
        prefix = parts.path.strip("/")
        return S3ObjectStore(parts.netloc, prefix, properties or {}, timeout_s=timeout_s)
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return FileObjectStore(Path(unquote(parts.path)))
    raise InvalidRequestError(
        f"--journal '{url}' must be s3://bucket/prefix or file:///absolute/directory"
    )


def refuse_within(url: str, data_dir: Path) -> None:
    """Raise `InvalidRequestError` if a `file://` journal and a data directory contain each other.

    Losing or clearing the directory would take the journal along, or the other way round.
    """
    parts = urlsplit(url)
    if parts.scheme != "file":
        return
    journal, data = Path(unquote(parts.path)).resolve(), data_dir.resolve()
    if journal.is_relative_to(data) or data.is_relative_to(journal):
        raise InvalidRequestError(
            f"--journal {url} and --data-dir {data_dir} lie in one another, so one would be lost"
            " with the other: use a directory beside it, best on another machine's disk"
        )


def probe(store: ObjectStore) -> None:
    """Raise `InvalidRequestError` if the store breaks the journal's assumptions.

    Of several concurrent creators of one key exactly one must succeed, later ones must fail, and
    all must read and list the winner's bytes. Raises `StoreUnavailableError` for a store
    unavailable or full now, because this proves nothing about its guarantees.
    """
    key = f"probe/{secrets.token_hex(16)}"
    bodies = [secrets.token_bytes(64) for _ in range(_RIVALS)]

    def attempt(body: bytes) -> bool:
        try:
            store.create(key, [body])
        except ObjectExistsError:
            return False
        return True

    try:
        with Pool("journal-probe", _RIVALS) as rivals:
            won = list(rivals.map(attempt, bodies))
        won.append(attempt(b"late"))
        data = bytes(store.get(key, bytes_max=1 << 10))
        listed = [entry.key for entry in store.list_objects("probe/")]
        store.delete([key])
    except ObjectNotFoundError as error:
        raise InvalidRequestError(
            f"the journal's store {store.url} does not answer what was just stored: {error}"
        ) from error
    except StoreUnavailableError:
        raise
    except ObjectStoreError as error:
        raise InvalidRequestError(
            f"the journal's store {store.url} cannot be used: {error}"
        ) from error
    if won.count(True) != 1 or data != bodies[won.index(True)]:
        raise InvalidRequestError(
            f"the journal's store {store.url} let {won.count(True)} of {len(won)} create one object"
            " (If-None-Match: * must let exactly one); two services could own the same data"
        )
    if len(listed) < LIST_COUNT_MAX and key not in listed:
        raise InvalidRequestError(
            f"the journal's store {store.url} does not list an object that was just stored"
        )
