"""Objects of an S3 bucket, through obstore; only this module uses obstore.

A create is `PUT` with `If-None-Match: *`. obstore retries failed requests, so `ObjectExistsError`
may mean an earlier attempt of this process; a conflict answer (409) looks the same.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStoreError,
    ObjectTooLargeError,
    StoreRefusedError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    # obstore has these names for type checkers only.
    from obstore.store import ClientConfig, RetryConfig, S3Config

__all__ = ["S3ObjectStore"]

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CONNECT_TIMEOUT_S: Final = 3.0
# The time of a request with its body: 8 MiB at 300 KiB/s.
_REQUEST_TIMEOUT_S: Final = 30.0
# Callers retry for as long as necessary.
_RETRIES: Final[RetryConfig] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
_LOOPBACK: Final = {"127.0.0.1", "::1", "localhost"}
_DELETED_AT_ONCE: Final = 1_000
# The answer to a range behind an object's end; a retry changes nothing.
_OUTSIDE: Final = "status code: 416"
_SENTENCE_CHARACTERS_MAX: Final = 300
_ANSWERED: Final = re.compile(r"non-2xx status code: ([0-9]{3}) ?([A-Za-z -]{0,40})")
# obstore accepts these for requests of one object, not for lists.
_REFUSALS: Final = ("401", "403")
_SAID: Final = (
    re.compile(r"<Code>([A-Za-z0-9._-]{1,80})</Code>"),
    re.compile(r"<Message>([^<]{1,200})"),
)
_WHY: Final = (
    re.compile(r'(?:message|error): "([^"]{1,200})"'),
    re.compile(r"kind: (Timeout)"),
)


class S3ObjectStore:
    """`ObjectStore` of `s3://bucket/prefix`."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        properties: Mapping[str, str],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """With `timeout_s` each request is limited to this time, and not retried."""
        self._url = f"s3://{bucket}/{prefix}"
        self._prefix = f"{prefix}/" if prefix else ""
        config, options = _settings(properties, timeout_s or float("inf"))
        retries: RetryConfig = _RETRIES if timeout_s is None else {"max_retries": 0}
        with self._errors(""):
            self._store = S3Store(
                bucket, config=config, client_options=options, retry_config=retries
            )

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._url

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        with self._errors(key, missing=self._no_bucket()):
            obstore.put(self._store, self._prefix + key, data, mode="create", use_multipart=False)

    def replace(self, key: str, data: Buffer) -> None:
        """See `ObjectStore.replace`."""
        # A copy: an attempt that was given up may still be sent when the caller has its answer.
        data = bytes(data)
        with self._errors(key, missing=self._no_bucket()):
            obstore.put(self._store, self._prefix + key, data, use_multipart=False)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """See `ObjectStore.get`."""
        with self._errors(key):
            result = obstore.get(self._store, self._prefix + key)
            if (size := result.meta["size"]) > bytes_max:
                raise ObjectTooLargeError(f"{key} has {size} bytes, more than {bytes_max}")
            return memoryview(result.bytes())

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """See `ObjectStore.get_range`."""
        if length == 0:
            return memoryview(b"")
        with self._errors(key):
            result = obstore.get(
                self._store, self._prefix + key, options={"range": (start, start + length)}
            )
            data = memoryview(result.bytes())
        if len(data) != length:
            raise ObjectNotFoundError(f"{key} has no bytes {start} to {start + length}")
        return data

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """See `ObjectStore.list_objects`."""
        entries: list[ObjectEntry] = []
        with self._errors(folder):
            pages = obstore.list(
                self._store,
                self._prefix + folder.rstrip("/"),
                offset=self._prefix + start_after if start_after else None,
                chunk_size=min(count_max, LIST_COUNT_MAX),
            )
            for page in pages:
                for entry in page:
                    key = entry["path"].removeprefix(self._prefix)
                    entries.append(ObjectEntry(key, entry["size"]))
                if len(entries) >= count_max:
                    break
        keys = [start_after, *(entry.key for entry in entries)]
        if any(key >= next_key for key, next_key in itertools.pairwise(keys)):
            raise StoreRefusedError(f"{self._url} does not list its objects in order")
        return entries[:count_max]

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            names = [self._prefix + key for key in keys[first : first + _DELETED_AT_ONCE]]
            with self._errors(names[0]):
                obstore.delete(self._store, names)

    def _no_bucket(self) -> ObjectStoreError:
        return StoreRefusedError(f"{self._url}: there is no such bucket")

    @contextmanager
    def _errors(self, key: str, *, missing: ObjectStoreError | None = None) -> Iterator[None]:
        """Translate obstore's errors; only the first line of their texts is short."""
        try:
            yield
        except exceptions.AlreadyExistsError as error:
            raise ObjectExistsError(f"{key} exists") from error
        except FileNotFoundError as error:
            raise missing or ObjectNotFoundError(f"{key} is not there") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StoreRefusedError(f"{self._url} refuses {key}: {_sentence(error)}") from error
        except exceptions.BaseError as error:
            if _OUTSIDE in str(error):
                raise ObjectNotFoundError(f"{key} has not so many bytes") from error
            if (answered := _ANSWERED.search(str(error))) and answered[1] in _REFUSALS:
                raise StoreRefusedError(f"{self._url} refuses {key}: {_sentence(error)}") from error
            raise StoreUnavailableError(f"{self._url}: {key}: {_sentence(error)}") from error


def _settings(properties: Mapping[str, str], timeout_s_max: float) -> tuple[S3Config, ClientConfig]:
    """Return what the lake's property names mean to obstore; it reads `AWS_*` by itself."""
    config: S3Config = {}
    if (text := properties.get("s3.access-key-id")) is not None:
        config["access_key_id"] = text
    if (text := properties.get("s3.secret-access-key")) is not None:
        config["secret_access_key"] = text
    if (text := properties.get("s3.session-token")) is not None:
        config["session_token"] = text
    if region := properties.get("s3.region") or _variable(_REGION_VARIABLES):
        config["region"] = region
    endpoint = properties.get("s3.endpoint") or _variable(_ENDPOINT_VARIABLES)
    if endpoint:
        config["endpoint"] = _checked_endpoint(endpoint)
    # Half of what a PUT costs us is the checksum of its body for the signature. TLS keeps the body
    # whole on its way, and every object has a checksum of its own.
    config["unsigned_payload"] = _is_private(endpoint)
    timeouts = {
        name: timedelta(seconds=min(_seconds(properties, f"s3.{name}", default), timeout_s_max))
        for name, default in (
            ("connect-timeout", _CONNECT_TIMEOUT_S),
            ("request-timeout", _REQUEST_TIMEOUT_S),
        )
    }
    options: ClientConfig = {
        "allow_http": (endpoint or "").startswith("http://"),
        "connect_timeout": timeouts["connect-timeout"],
        "timeout": timeouts["request-timeout"],
    }
    return config, options


def _is_private(endpoint: str | None) -> bool:
    """Whether nobody on the network path can change a request; AWS's own endpoint uses TLS."""
    url = urlsplit(endpoint or "https:")
    return url.scheme == "https" or url.hostname in _LOOPBACK


def _checked_endpoint(text: str) -> str:
    """Return the store's address; obstore would panic at an invalid address."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.username is not None:
        shown = f"'{text:.200}'" if "@" not in text else "with a user or password"
        raise InvalidRequestError(
            f"the endpoint {shown} of the journal's store (s3.endpoint or AWS_ENDPOINT_URL) must be"
            " a URL like https://host:port"
        )
    return text


def _variable(names: Sequence[str]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _seconds(properties: Mapping[str, str], key: str, default: float) -> float:
    try:
        seconds = float(properties.get(key, default))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3_600:
        raise InvalidRequestError(f"{key} of the journal must be a number of seconds, at most 3600")
    return seconds


def _sentence(error: exceptions.BaseError) -> str:
    """Return the store's answer, else the cause; the error's text has both behind a long URL."""
    text = str(error)
    answered = _ANSWERED.search(text)
    if answered is not None:
        parts = [f"it answers {answered[1]} {answered[2]}".rstrip()]
        parts += [match[1] for pattern in _SAID if (match := pattern.search(text))]
    else:
        first, _, details = text.partition("\n")
        why = [match[1] for pattern in _WHY if (match := pattern.search(details))]
        parts = [first.rpartition(" - ")[2], *why[:1]]
    return " ".join(": ".join(parts).split())[:_SENTENCE_CHARACTERS_MAX]
