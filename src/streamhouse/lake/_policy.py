"""The policy for a lake table's properties, names and paths, for writers and readers.

Guarantees:
- a property that chooses code, a place, an endpoint, a credential, a signer or a catalog is refused
  by name on writing, and dropped on reading; no spelling of a name gets around it
- no spelling of a name for a folder leaves the parent folder
- a path counts as below a place only if every library reads the path so

Pure, without the lake library. Enforced in `guarded_catalog.py` and `table_files.py`.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from streamhouse.core.errors import ForbiddenError, InvalidNameError, InvalidRequestError
from streamhouse.core.model.lake.facts import (
    CATALOG_TIMEOUT_PROPERTY,
    LAKE_PATHS_PROPERTY,
)

__all__ = [
    "KEPT_PROPERTIES",
    "REFUSED_PROPERTIES",
    "Bounds",
    "Place",
    "Warehouse",
    "bounds_of",
    "check_lake_name",
    "check_properties",
    "kept_properties",
    "location_of",
    "place_of",
    "places_of",
    "why_refused",
]

# -- properties --------------------------------------------------------------------------------

_CODE: Final = "it chooses code"
_PLACE: Final = "it moves files out of the table's location"
_STORE: Final = "it says how a store is reached, which is the catalog's to say"
_CATALOG: Final = "it is a setting of a catalog, not of a table"
_CREDENTIAL: Final = "it is a credential"

KEPT_PROPERTIES: Final = frozenset(
    {
        "EXTERNAL",
        "comment",
        "commit.manifest-merge.enabled",
        "commit.manifest.min-count-to-merge",
        "commit.manifest.target-size-bytes",
        "commit.retry.max-wait-ms",
        "commit.retry.min-wait-ms",
        "commit.retry.num-retries",
        "commit.retry.total-timeout-ms",
        "format-version",
        "gc.enabled",
        "history.expire.max-snapshot-age-ms",
        "history.expire.min-snapshots-to-keep",
        "owner",
        # Spark's own word for the format: a label.
        "provider",
        "read.split.target-size",
        "schema.name-mapping.default",
        "table_type",
        "write.avro.compression-codec",
        "write.delete.isolation-level",
        "write.delete.mode",
        "write.format.default",
        "write.metadata.delete-after-commit.enabled",
        "write.metadata.metrics.column",
        "write.metadata.metrics.default",
        "write.metadata.previous-versions-max",
        "write.object-storage.enabled",
        "write.object-storage.partitioned-paths",
        "write.parquet.bloom-filter-enabled.column",
        "write.parquet.bloom-filter-max-bytes",
        "write.parquet.compression-codec",
        "write.parquet.compression-level",
        "write.parquet.dict-size-bytes",
        "write.parquet.page-row-limit",
        "write.parquet.page-size-bytes",
        "write.parquet.row-group-limit",
        "write.parquet.row-group-size-bytes",
        "write.summary.partition-limit",
        "write.target-file-size-bytes",
        "write.update.isolation-level",
    }
)
"""Known names that tune a table, whatever they are made of."""

# Behind these stands a name of the user's: of a column, or of an option of a writer.
_KEPT_PREFIXES: Final = (
    "write.metadata.metrics.column.",
    "write.parquet.bloom-filter-enabled.column.",
    "write.parquet.bloom-filter-fpp.column.",
    "write.parquet.bloom-filter-ndv.column.",
    "write.parquet.stats-enabled.column.",
    "option.",
)
# Ours, which `_commit_guard.py` looks after; settings of the catalog are no table's.
_OURS: Final = "streamhouse."
_OURS_OF_CATALOGS: Final = (LAKE_PATHS_PROPERTY, CATALOG_TIMEOUT_PROPERTY)

REFUSED_PROPERTIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "catalog-impl",
            "io-impl",
            "lock-impl",
            "py-catalog-impl",
            "py-io-impl",
            "write.location-provider.impl",
            "write.py-location-provider.impl",
        ),
        _CODE,
    ),
    **dict.fromkeys(
        (
            "location",
            "write.data.path",
            "write.folder-storage.path",
            "write.metadata.path",
            "write.object-storage.path",
        ),
        _PLACE,
    ),
    **dict.fromkeys(
        (
            "audience",
            "auth",
            "botocore_session",
            "buffer-size",
            "cabundle",
            "cert",
            "client",
            "client_credentials",
            "client_id",
            "client_secret",
            "downcast-ns-timestamp-to-us-on-write",
            "echo",
            "grant_type",
            "init_catalog_tables",
            "key",
            "lock-check-max-wait-time",
            "lock-check-min-wait-time",
            "lock-check-retries",
            "metadata_location",
            "namespace-separator",
            "oauth2-server-uri",
            "pool_pre_ping",
            "prefix",
            "previous_metadata_location",
            "resource",
            "rest-page-size",
            "scan-planning-mode",
            "schema_version",
            "scope",
            "snapshot-loading-mode",
            "ssl",
            "table-name",
            "token",
            "credential",
            "type",
            "ugi",
            "uri",
            "view-endpoints-supported",
            "warehouse",
        ),
        _CATALOG,
    ),
}
"""Known names that say something else than how to tune a table, and what."""

# First parts of names: libraries read everything below them as how to reach a store or a catalog.
_ROOMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("s3", "s3a", "s3n", "gcs", "gs", "adls", "adl", "abfs", "abfss", "wasb", "wasbs"),
            *("hdfs", "hf", "oss", "cos", "obs", "fs", "hadoop", "dfs", "client", "aws", "azure"),
            *("gcp", "google", "minio", "ssl", "http", "https", "proxy", "signer", "encryption"),
            *("kms", "session", "apache-client", "urlconnection"),
        ),
        _STORE,
    ),
    **dict.fromkeys(
        (
            *("hive", "glue", "dynamodb", "rest", "header", "auth", "oauth2", "jdbc", "sql"),
            *("catalog", "io", "py", "cache", "lakeformation", "bigquery", "java", "javax"),
        ),
        _CATALOG,
    ),
}
# Parts of names that a library of tomorrow may go by.
_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("impl", "class", "classname", "module", "factory", "provider", "plugin", "jar", "jars"),
        _CODE,
    ),
    **dict.fromkeys(("path", "paths", "location", "locations", "dir", "directory"), _PLACE),
    **dict.fromkeys(
        ("endpoint", "endpoints", "uri", "uris", "url", "urls", "host", "hosts", "port", "proxy"),
        _STORE,
    ),
    **dict.fromkeys(("signer", "signers", "sigv4"), _STORE),
    **dict.fromkeys(("catalog", "catalogs", "warehouse"), _CATALOG),
    **dict.fromkeys(
        ("credential", "credentials", "secret", "secrets", "token", "tokens", "password"),
        _CREDENTIAL,
    ),
}
_PROPERTY_NAME_MAX: Final = 1_000
_OWNERS_OF_KEYS: Final = frozenset(
    {"access", "account", "api", "encryption", "kms", "private", "sas", "secret", "shared"}
)


def why_refused(name: str) -> str | None:
    """Return why no table may have a property with this name, None if a table may.

    Unknown names are the users' own: the property is kept unless part of its name says code, place,
    store, catalog or credential.
    """
    if len(name) > _PROPERTY_NAME_MAX:
        return f"its name has more than {_PROPERTY_NAME_MAX} characters"
    return _why_refused(name)


@functools.lru_cache(maxsize=4096)
def _why_refused(name: str) -> str | None:
    if name in KEPT_PROPERTIES:
        return None
    if name in REFUSED_PROPERTIES:
        return REFUSED_PROPERTIES[name]
    if name.startswith(_OURS):
        return _CATALOG if name in _OURS_OF_CATALOGS else None
    if name.startswith(_KEPT_PREFIXES):
        return None
    lowered = name.lower()
    room = lowered.partition(".")[0].strip()
    if lowered in REFUSED_PROPERTIES:
        return REFUSED_PROPERTIES[lowered]
    if room in _ROOMS and room != lowered:
        return _ROOMS[room]
    # Both `pathPrefix` and `path-prefix` say path.
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower())
    for word in words:
        if word in _WORDS:
            return _WORDS[word]
    if ("key" in words or "keys" in words) and not _OWNERS_OF_KEYS.isdisjoint(words):
        return _CREDENTIAL
    return None


_NUMBER: Final = (re.compile(r"\s*-?[0-9]{1,18}\s*"), "a whole number")
_TRUTH: Final = (re.compile(r"true|false", re.IGNORECASE), "true or false")
_METRICS: Final = (
    re.compile(r"\s*(none|counts|full|truncate\(0*[1-9][0-9]{0,8}\))\s*", re.IGNORECASE),
    "none, counts, full or truncate(N)",
)
# Properties that the library reads on every commit to a table: an unreadable value would stop the
# table's commits, and rounds, for good.
_VALUES: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    **dict.fromkeys(
        (
            "commit.manifest.min-count-to-merge",
            "commit.manifest.target-size-bytes",
            "commit.retry.max-wait-ms",
            "commit.retry.min-wait-ms",
            "commit.retry.num-retries",
            "commit.retry.total-timeout-ms",
            "write.metadata.previous-versions-max",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        (
            "commit.manifest-merge.enabled",
            "write.metadata.delete-after-commit.enabled",
            "write.object-storage.enabled",
            "write.object-storage.partitioned-paths",
        ),
        _TRUTH,
    ),
    "write.metadata.metrics.default": _METRICS,
}
_METRICS_PREFIX: Final = "write.metadata.metrics.column."


def _bad_value(name: str, value: str) -> str | None:
    """Return the form that the property must have, None if `value` has the form."""
    form = _METRICS if name.startswith(_METRICS_PREFIX) else _VALUES.get(name)
    return None if form is None or form[0].fullmatch(value) else form[1]


def check_properties(where: str, properties: Mapping[str, str]) -> None:
    """Refuse forbidden properties, and unreadable values.

    Raises `ForbiddenError` or `InvalidRequestError` for the first.
    """
    for name, value in properties.items():
        why = why_refused(name)
        if why is not None:
            raise ForbiddenError(
                f"{where}: property '{name[:200]}' must not be set, because {why}; leave it out, or"
                " if it is a label of your own give it another name"
            )
        form = _bad_value(name, str(value))
        if form is not None:
            raise InvalidRequestError(f"{where}: property '{name[:200]}' must be {form}")


def kept_properties(properties: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the properties of a table to keep, and the names of the dropped properties, sorted."""
    dropped = [
        name
        for name, value in properties.items()
        if why_refused(name) is not None or _bad_value(name, value) is not None
    ]
    if not dropped:
        return dict(properties), ()
    return {k: v for k, v in properties.items() if k not in dropped}, tuple(sorted(dropped))


# -- names ---------------------------------------------------------------------------------------

_NAME_BYTES_MAX: Final = 255
_NO_NAME: Final = re.compile(r"[\x00-\x1f\x7f/\\%?#]")


def check_lake_name(name: str, *, what: str = "table") -> None:
    """Refuse a new name unless it means a single folder directly below its parent.

    Raises `InvalidNameError`.
    """
    match = _NO_NAME.search(name)
    why = ""
    if match is not None:
        why = f"a name must not have {match[0]!r} in it, because it becomes a folder"
    elif name != name.strip() or not name.strip("."):
        why = "a name must not be empty, only dots, or begin or end with a space"
    elif len(name.encode("utf-8", "replace")) > _NAME_BYTES_MAX:
        why = f"a name has at most {_NAME_BYTES_MAX} bytes"
    if why:
        raise InvalidNameError(f"{what} name {name[:100]!r}: {why}")


# -- paths ---------------------------------------------------------------------------------------

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_SAME_STORE: Final = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
FILE: Final = "file"
# In these URIs a bucket follows `//`, not a host.
_BUCKET_STORES: Final = ("s3", "gs", "oss")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Behind these libraries cut a path off; those of a new location some would read differently.
_CUT_OFF: Final = re.compile(r"[?#]")
_READ_DIFFERENTLY: Final = re.compile(r"[%?#\\]")
_DECODINGS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder of a store, the same for every way in which it is written."""

    store: str
    authority: str
    segments: tuple[str, ...]

    def contains(self, other: Place) -> bool:
        """Whether `other` is this place or below it."""
        return (
            self.store == other.store
            and self.authority == other.authority
            and other.segments[: len(self.segments)] == self.segments
        )

    def overlaps(self, other: Place) -> bool:
        """Whether either place is equal to, or below, the other."""
        return self.contains(other) or other.contains(self)

    @property
    def parent(self) -> Place:
        """The folder it is in."""
        return Place(self.store, self.authority, self.segments[:-1])

    @property
    def local_path(self) -> str:
        """Its path on this machine."""
        return "/" + "/".join(self.segments)

    def real(self) -> Place:
        """Return it with symbolic links followed; of an object store, as it is."""
        if self.store != FILE:
            return self
        real_path = os.path.realpath(self.local_path)
        return Place(FILE, "", tuple(part for part in real_path.split("/") if part))

    def really_contains(self, other: Place) -> bool:
        """Whether `other` is this place or below, also when symbolic links are followed."""
        return self.store == other.store and self.real().contains(other.real())

    def may_overlap(self, other: Place) -> bool:
        """Whether the two overlap, as they are written or with symbolic links followed."""
        if self.store != other.store:
            return False
        return self.overlaps(other) or self.real().overlaps(other.real())


def place_of(uri: str) -> Place:
    """Return where a URI or local path leads.

    Raises `ForbiddenError` for a spelling with a possible way elsewhere.
    """
    store, authority, segments = _parts(uri)
    for part in segments:
        if _is_dots(part):
            raise ForbiddenError(
                f"path '{uri[:300]}' has '{part}' in it, by which it can lead elsewhere"
            )
    return Place(store, authority, segments)


def _parts(uri: str) -> tuple[str, str, tuple[str, ...]]:
    shown = f"path '{uri[:300]}'"
    if any(character < " " or character == "\x7f" for character in uri):
        raise ForbiddenError(f"path {uri[:300]!r} has control characters in it")
    match = _SCHEME.fullmatch(uri)
    scheme, path = (match[1], match[2]) if match else ("", str(Path.cwd() / uri))
    if scheme != scheme.lower():
        raise ForbiddenError(f"{shown} must write its scheme as '{scheme.lower()}'")
    store = _SAME_STORE.get(scheme, scheme or FILE)
    authority = ""
    if scheme and path.startswith("//"):
        authority, _, path = path[2:].partition("/")
    elif scheme and (scheme != FILE or not path.startswith("/")):
        raise ForbiddenError(f"{shown} must go on with '//' after its scheme")
    if store == FILE:
        if authority not in ("", "localhost"):
            raise ForbiddenError(f"{shown} names a host")
        authority = ""
    elif not authority or (store in _BUCKET_STORES and not _BUCKET.fullmatch(authority)):
        raise ForbiddenError(f"{shown} names no bucket")
    return store, authority, tuple(part for part in path.split("/") if part)


def _is_dots(part: str) -> bool:
    for _ in range(_DECODINGS_MAX):
        if part in (".", ".."):
            return True
        decoded = unquote(part)
        if decoded == part:
            return False
        part = decoded
    return part in (".", "..")


def places_of(text: str) -> tuple[Place, ...]:
    """Read `LAKE_PATHS_PROPERTY`."""
    return tuple(place_of(part.strip()) for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class Warehouse:
    """The folder of all tables; `text` is the operator's spelling, which may be any.

    A location that begins with `text` is therefore judged by the part after `text`.
    """

    text: str
    place: Place

    @classmethod
    def parse(cls, text: str | None) -> Warehouse | None:
        """Return the warehouse of a catalog, None for a mere name known to the catalog."""
        if text is None or not ("/" in text or ":" in text):
            return None
        try:
            store, authority, segments = _parts(text)
        except ForbiddenError:
            return None
        normal = posixpath.normpath("/" + "/".join(segments))
        place = Place(store, authority, tuple(part for part in normal.split("/") if part))
        return cls(text.rstrip("/"), place)


def location_of(location: str, warehouse: Warehouse | None, *, is_new: bool) -> Place:
    """Return where a table with that location lies; raises `ForbiddenError` as `place_of`.

    Of a new location is also refused what libraries read in different ways.
    """
    head = ""
    if warehouse is not None and location.startswith(warehouse.text + "/"):
        head = warehouse.text
    tail = location[len(head) :]
    match = (_READ_DIFFERENTLY if is_new else _CUT_OFF).search(tail)
    if match is not None:
        raise ForbiddenError(f"path '{location[:300]}' must not have '{match[0]}' in it")
    if not head or warehouse is None:
        return place_of(location)
    below = place_of("file://" + tail)
    base = warehouse.place
    return Place(base.store, base.authority, base.segments + below.segments)


class Bounds:
    """Where the files of one table may lie: strictly below one of `roots`.

    The first is the table's own `location`, unless that `is_believed` to be none. `has` takes a
    fifth of a microsecond for a path that is written as the location is.
    """

    def __init__(self, location: str, roots: Sequence[Place], *, is_believed: bool) -> None:
        self.location = location
        self._roots = tuple(roots)
        self._prefixes = _spellings(location, self._roots[0]) if is_believed else ()

    def has(self, uri: str) -> bool:
        """Whether a file at `uri` may belong to the table."""
        for prefix in self._prefixes:
            if uri.startswith(prefix):
                tail = uri[len(prefix) :]
                is_plain = tail and "/." not in tail and "%" not in tail and tail[0] not in "./"
                if is_plain and tail.isprintable():
                    return True
                break
        try:
            place = self.place(uri)
        except ForbiddenError:
            return False
        return any(root != place and root.contains(place) for root in self._roots)

    def place(self, uri: str) -> Place:
        """Return where a file of the table is; raises `ForbiddenError` as `place_of`."""
        for prefix in self._prefixes:
            if uri.startswith(prefix):
                root, below = self._roots[0], place_of("file:///" + uri[len(prefix) :])
                return Place(root.store, root.authority, root.segments + below.segments)
        return place_of(uri)

    def really_has(self, uri: str, *, folders: dict[Place, bool]) -> bool:
        """Like `has`, with symbolic links followed; `folders` remembers those looked at."""
        if not self.has(uri):
            return False
        place = self.place(uri)
        if place.store != FILE:
            return True
        if Path(place.local_path).is_symlink():
            return False
        folder = place.parent
        if folder not in folders:
            folders[folder] = any(root.really_contains(folder) for root in self._roots)
        return folders[folder]

    def check(self, where: str, uri: str) -> None:
        """Raise `ForbiddenError` unless a file at `uri` may be one of the table's."""
        if not self.has(uri):
            raise ForbiddenError(
                f"{where}: file '{uri[:500]}' does not lie below the table's location"
                f" '{self.location[:500]}', so it is not believed to be the table's; if it is, the"
                f" operator can name its folder: --catalog-property {LAKE_PATHS_PROPERTY}=..."
            )


def _spellings(location: str, place: Place) -> tuple[str, ...]:
    """Return the beginnings of the paths of a table's files, in the spellings of all engines."""
    path = "/".join(place.segments)
    if place.store == FILE:
        prefixes = [f"file:///{path}/", f"file:/{path}/", f"/{path}/"]
    else:
        same = [scheme for scheme, store in _SAME_STORE.items() if store == place.store]
        prefixes = [f"{scheme}://{place.authority}/{path}/" for scheme in (place.store, *same)]
    return tuple(dict.fromkeys((location.rstrip("/") + "/", *prefixes)))


def bounds_of(
    location: str, *, warehouse: Warehouse | None, extra_places: Sequence[Place]
) -> Bounds:
    """Return where the files of a table at `location` may lie.

    A location with a host counts only if the warehouse or one of `extra_places` has the host.
    """
    try:
        table_place = location_of(location, warehouse, is_new=False)
    except ForbiddenError:
        return Bounds(location, extra_places, is_believed=False)
    named = [*extra_places] if warehouse is None else [warehouse.place, *extra_places]
    is_named = (table_place.store, table_place.authority) in [(p.store, p.authority) for p in named]
    if table_place.segments and (table_place.store in (FILE, *_BUCKET_STORES) or is_named):
        return Bounds(location, [table_place, *extra_places], is_believed=True)
    return Bounds(location, extra_places, is_believed=False)
