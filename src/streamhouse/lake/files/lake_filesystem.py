"""Lake files by URI, with nothing but pyarrow: tiering writes them, the connector reads them.

A URI is used byte for byte as in Iceberg's metadata, so writers and readers mean the same file.
Local files (`file:/...`, or a plain path) are opened without any file system object; `s3:`, `s3a:`
and `s3n:` go through pyarrow's S3 client, configured by the catalog's `s3.*` and `client.*`
properties, the names that pyiceberg uses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa

from streamhouse.core.errors import (
    CorruptDataError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    import pyarrow.parquet as pq
from streamhouse.core.secret_sources import WITHHELD_PROPERTY, why_withheld

__all__ = [
    "LakeFilesystem",
    "ListedFile",
    "file_identity",
    "file_name_metadata",
    "lake_file_properties",
]

_LOCAL_SCHEMES: Final = ("", "file")
_S3_SCHEMES: Final = ("s3", "s3a", "s3n")
_PROPERTY_PREFIXES: Final = ("s3.", "client.")
# What decoding damaged bytes raises, from the footer to a value.
_UNDECODABLE: Final = (pa.ArrowException, ValueError, KeyError, IndexError, OverflowError)
_FILE_NAME_KEY: Final = "streamhouse.file-name"
# A name is never longer than 255 bytes.
_NAME_TAIL_BYTES: Final = 512
_NAME_IN_JSON: Final = re.compile(rb'"(%b)": "([^"]*)"' % re.escape(_FILE_NAME_KEY).encode())
_STORE_ERROR: Final = "AWS Error"
_SAID_CHARACTERS_MAX: Final = 500
# Catalog property -> argument of pyarrow.fs.S3FileSystem, and how to read its text.
_S3_ARGUMENTS: Final[dict[str, tuple[str, Any]]] = {
    "endpoint": ("endpoint_override", str),
    "access-key-id": ("access_key", str),
    "secret-access-key": ("secret_key", str),
    "session-token": ("session_token", str),
    "region": ("region", str),
    "role-arn": ("role_arn", str),
    "role-session-name": ("session_name", str),
    "proxy-uri": ("proxy_options", str),
    "connect-timeout": ("connect_timeout", float),
    "request-timeout": ("request_timeout", float),
    "force-virtual-addressing": ("force_virtual_addressing", lambda text: text == "true"),
    "anonymous": ("anonymous", lambda text: text == "true"),
}


def lake_file_properties(catalog_properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that opening files needs; all others stay where they are."""
    return {
        k: v
        for k, v in catalog_properties.items()
        if k.startswith(_PROPERTY_PREFIXES) or k == WITHHELD_PROPERTY
    }


class ListedFile(NamedTuple):
    """A file as a listing has it; `modified_ms` is 0 where the store does not say."""

    uri: str
    size_bytes: int
    modified_ms: int


class LakeFilesystem:
    """Opens, lists and deletes lake files. Thread-safe and picklable.

    Every method raises `UnsupportedError` for a URI scheme it does not know, `StorageFailedError`
    (a file is missing or unwritable) or `UnavailableError` (the object store cannot be reached).
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = lake_file_properties(properties)
        self._s3: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_properties": self._properties, "_s3": None}

    def __repr__(self) -> str:
        return f"LakeFilesystem(<{len(self._properties)} properties hidden>)"

    def open_input(self, uri: str) -> pa.NativeFile:
        """Open a file for random reads; local files are memory-mapped."""
        with self.errors("read", uri):
            if (path := _local_path(uri)) is not None:
                return pa.memory_map(str(path), "r")
            return self._remote().open_input_file(_key(uri))

    def open_output(self, uri: str) -> pa.NativeFile:
        """Create or replace a file, and its folders.

        Before `close` a partial file exists on a disk, and no file on an object store.
        """
        with self.errors("write", uri):
            if (path := _local_path(uri)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                return pa.OSFile(str(path), "wb")
            return self._remote().open_output_stream(_key(uri))

    @contextlib.contextmanager
    def open_parquet(self, uri: str, *, file_bytes: int | None = None) -> Iterator[pq.ParquetFile]:
        """Open a Parquet file for reading; the checksum of each page is verified on reading.

        Undecodable content inside the block is `CorruptDataError`, as is a file with another size
        than `file_bytes` of the table's metadata, or a file with the name of another file inside.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415 - loaded with the first file

        with self._open_pieces(uri) as source, self._damage(uri):
            _check_size(uri, source, file_bytes)
            # A row group's columns come together, as an object store wants it.
            file = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
            _check_name(uri, file.metadata.metadata or {})
            yield file

    def read_ranges(
        self, uri: str, ranges: Iterable[tuple[int, int]], *, file_bytes: int | None
    ) -> list[bytes]:
        """Return pieces of a file, each of a (start, size).

        Damage is `CorruptDataError` as for `open_parquet`, as is a piece behind the file's end. No
        piece is larger than its file: a size in damaged metadata allocates nothing. The name
        of the file is looked for in JSON at its end: `file_name_metadata` as the last of a footer.
        """
        with self._open_pieces(uri) as source, self._damage(uri):
            _check_size(uri, source, file_bytes)
            tail_bytes = min(_NAME_TAIL_BYTES, source.size())
            tail = bytes(source.read_at(tail_bytes, source.size() - tail_bytes))
            _check_name(uri, dict(_NAME_IN_JSON.findall(tail)))
            return [_piece(uri, source, start, size) for start, size in ranges]

    def _open_pieces(self, uri: str) -> pa.NativeFile:
        """Open a file for reading in pieces, in order.

        A mapped file would stay in the process's memory, and a file cut short under a mapping kills
        the process.
        """
        if (path := _local_path(uri)) is None:
            return self.open_input(uri)
        with self.errors("read", uri):
            return pa.OSFile(str(path), "rb")

    @contextlib.contextmanager
    def _damage(self, uri: str) -> Iterator[None]:
        try:
            yield
        except StreamhouseError:
            raise
        except (*_UNDECODABLE, OSError) as error:
            reason = " ".join(str(error).split())[:_SAID_CHARACTERS_MAX]
            if isinstance(error, OSError) and (error.errno or _STORE_ERROR in reason):
                with self.errors("read", uri):
                    raise
            raise CorruptDataError(
                f"lake file '{uri}' is damaged ({reason}); restore it from a copy"
            ) from error

    def size(self, uri: str) -> int:
        """Return the file's size in bytes."""
        with self.errors("read", uri):
            if (path := _local_path(uri)) is not None:
                return path.stat().st_size
            size = self._remote().get_file_info([_key(uri)])[0].size
            if size is None:
                raise FileNotFoundError(uri)
            return int(size)

    def delete(self, uri: str) -> None:
        """Delete a file; one that is not there is fine."""
        with self.errors("delete", uri), contextlib.suppress(FileNotFoundError):
            if (path := _local_path(uri)) is not None:
                path.unlink()
            else:
                self._remote().delete_file(_key(uri))

    def list_folder(self, uri: str) -> list[str]:
        """Return the URIs of the files directly in a folder; none when there is no such folder."""
        with self.errors("list", uri):
            if (path := _local_path(uri)) is not None:
                names = [p.name for p in path.iterdir() if p.is_file()] if path.is_dir() else []
            else:
                from pyarrow import fs  # noqa: PLC0415 - loaded with the first file

                selector = fs.FileSelector(_key(uri), allow_not_found=True)
                infos = self._remote().get_file_info(selector)
                names = [info.base_name for info in infos if info.type == fs.FileType.File]
            return [f"{uri.rstrip('/')}/{name}" for name in sorted(names)]

    def list_subfolders(self, uri: str) -> list[str]:
        """Return the URIs of the folders directly in a folder, without links to folders."""
        with self.errors("list", uri):
            if (path := _local_path(uri)) is not None:
                entries = path.iterdir() if path.is_dir() else ()
                names = [p.name for p in entries if p.is_dir() and not p.is_symlink()]
            else:
                from pyarrow import fs  # noqa: PLC0415 - loaded with the first file

                selector = fs.FileSelector(_key(uri), allow_not_found=True)
                infos = self._remote().get_file_info(selector)
                names = [info.base_name for info in infos if info.type == fs.FileType.Directory]
            return [f"{uri.rstrip('/')}/{name}" for name in sorted(names)]

    def walk(self, uri: str) -> Iterator[ListedFile]:
        """Yield every file below a folder, in no order; none when there is no such folder."""
        with self.errors("list", uri):
            if (path := _local_path(uri)) is not None:
                for folder, _, names in os.walk(path):
                    prefix = uri.rstrip("/") + folder[len(str(path)) :]
                    for name in names:
                        # A file may be deleted while the folder is listed.
                        with contextlib.suppress(FileNotFoundError):
                            stat = Path(folder, name).stat()
                            modified_ms = stat.st_mtime_ns // 1_000_000
                            yield ListedFile(f"{prefix}/{name}", stat.st_size, modified_ms)
                return
            from pyarrow import fs  # noqa: PLC0415 - loaded with the first file

            base = _key(uri).rstrip("/")
            selector = fs.FileSelector(base, recursive=True, allow_not_found=True)
            for info in self._remote().get_file_info(selector):
                if info.type == fs.FileType.File:
                    uri_of_file = uri.rstrip("/") + info.path[len(base) :]
                    modified_ms = (info.mtime_ns or 0) // 1_000_000
                    yield ListedFile(uri_of_file, info.size or 0, modified_ms)

    def delete_folder(self, uri: str) -> None:
        """Delete the files directly in a folder, and the folder itself on a disk."""
        for file in self.list_folder(uri):
            self.delete(file)
        path = _local_path(uri)
        if path is not None:
            # A straggling task may just have written a file to the folder: the folder stays.
            with contextlib.suppress(OSError):
                path.rmdir()

    def delete_tree(self, uri: str) -> None:
        """Delete a folder with everything in it; a folder that is not there is fine."""
        with self.errors("delete", uri), contextlib.suppress(FileNotFoundError):
            if (path := _local_path(uri)) is not None:
                shutil.rmtree(path)
            else:
                # Deleting its last file would leave the folder behind, as an empty object.
                self._remote().delete_dir(_key(uri))

    @contextlib.contextmanager
    def attempt_in(self, folder: str) -> Iterator[None]:
        """Within the block files are written to `folder` and committed; if that fails they go.

        Files of a perhaps landed commit stay (`UnknownOutcomeError`).
        """
        try:
            yield
        except UnknownOutcomeError:
            raise
        except StreamhouseError:
            with contextlib.suppress(StreamhouseError):
                self.delete_folder(folder)
            raise

    def delete_leftovers(self, folder: str, *, kept: Collection[str]) -> None:
        """Delete the files in `folder` besides `kept`, as far as possible.

        Leftovers come from attempts that lost: retries, speculation.
        """
        with contextlib.suppress(StreamhouseError):
            for path in self.list_folder(folder):
                if path not in kept:
                    self.delete(path)

    def _remote(self) -> Any:
        if self._s3 is None:
            from pyarrow import fs  # noqa: PLC0415 - loaded with the first file

            self._s3 = fs.S3FileSystem(**s3_arguments(self._properties))
        return self._s3

    @contextlib.contextmanager
    def errors(self, verb: str, uri: str) -> Iterator[None]:
        """Raise pyarrow's errors inside the block as Streamhouse errors that name the file."""
        try:
            yield
        except StreamhouseError:
            raise
        except FileNotFoundError as error:
            raise StorageFailedError(f"cannot {verb} lake file '{uri}': it is missing") from error
        except OSError as error:
            if _local_path(uri) is None:
                why = why_withheld(self._properties)
                raise UnavailableError(f"cannot {verb} lake file '{uri}': {error}{why}") from error
            raise StorageFailedError(f"cannot {verb} lake file '{uri}': {error}") from error


def file_name_metadata(uri: str) -> dict[str, str]:
    """Return metadata with the file's own name, by which an exchanged file shows."""
    return {_FILE_NAME_KEY: uri.rsplit("/", 1)[-1]}


def _piece(uri: str, source: pa.NativeFile, start: int, size: int) -> bytes:
    if start < 0 or size < 0 or start + size > source.size():
        raise CorruptDataError(
            f"lake file '{uri}' has {source.size()} bytes, and its table's metadata name"
            f" {size} bytes from byte {start} on; restore it from a copy"
        )
    return bytes(source.read_at(size, start))


def _check_size(uri: str, source: pa.NativeFile, file_bytes: int | None) -> None:
    if file_bytes is not None and source.size() != file_bytes:
        raise CorruptDataError(
            f"lake file '{uri}' has {source.size()} bytes, not the {file_bytes} of its"
            " table's metadata; restore it from a copy"
        )


def _check_name(uri: str, metadata: Mapping[bytes, bytes]) -> None:
    stored_name = metadata.get(_FILE_NAME_KEY.encode())
    name = uri.rsplit("/", 1)[-1]
    # Other engines say nothing.
    if stored_name is not None and stored_name != name.encode():
        raise CorruptDataError(
            f"lake file '{uri}' is another one: it was written as"
            f" '{stored_name.decode('utf-8', 'replace')[:_SAID_CHARACTERS_MAX]}';"
            " restore it from a copy"
        )


def file_identity(uri: str) -> str:
    """Return the same text for all URIs of a file: engines differ in their spelling."""
    path = _local_path(uri)
    return f"s3:{_key(uri)}" if path is None else f"file:{path}"


def s3_arguments(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of pyarrow's S3FileSystem for `s3.*` and `client.*` properties.

    `s3.*` wins over `client.*`, as in pyiceberg. Unknown keys are other engines' and are skipped.
    """
    arguments: dict[str, Any] = {}
    for prefix in ("client.", "s3."):
        for key, (argument, read) in _S3_ARGUMENTS.items():
            if (text := properties.get(prefix + key)) is not None:
                arguments[argument] = read(text)
    return arguments


@functools.lru_cache(maxsize=1024)
def _scheme(uri: str) -> str:
    # A Windows drive or a name with a colon is not a scheme we could open anyway.
    scheme = urlsplit(uri).scheme.lower()
    if scheme not in _LOCAL_SCHEMES and scheme not in _S3_SCHEMES:
        raise UnsupportedError(
            f"lake file '{uri}': scheme '{scheme}' is not supported; use file or s3"
        )
    return scheme


def _local_path(uri: str) -> Path | None:
    """Return the local path of `uri`, or None when it lies in an object store."""
    if _scheme(uri) not in _LOCAL_SCHEMES:
        return None
    # Not unquoted: Iceberg's writers do not quote the path.
    path = uri.removeprefix("file:")
    if path.startswith("//"):
        path = "/" + path[2:].partition("/")[2]
    return Path(path)


def _key(uri: str) -> str:
    """Return `bucket/key` of an object store URI."""
    return uri.partition("://")[2]
