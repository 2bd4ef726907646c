"""Texts and binaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.hashing._murmur import hashes_of_bytes
from streamhouse.core.types._json_texts import escaped, hexed, quoted
from streamhouse.core.types.logical_type import (
    NULL_KEY,
    ORDERED,
    LogicalType,
    any_json_text,
    plain_texts,
)
from streamhouse.core.types.python_values import UnfitError, wrong_type

__all__ = ["Binary", "Text", "text_at_least", "text_at_most"]

_SURROGATE_FIRST: Final = 0xD800
_AFTER_SURROGATES: Final = 0xE000
_CHARACTER_LAST: Final = 0x10FFFF
_BYTE_LAST: Final = 0xFF


class Binary(LogicalType):
    """binary."""

    json_types: frozenset[type] = frozenset()
    python_types: frozenset[type] = frozenset((bytes, NoneType))
    iceberg_name = "binary"
    avro = "bytes"
    spark_texts = staticmethod(plain_texts)
    transforms = frozenset(("identity", "bucket", "truncate"))
    aggregates = ORDERED
    day = least = None
    of_footer: Callable[[Any], Any] = bytes
    of_bound: Callable[[bytes], Any] = bytes
    json_text: Callable[[Any], str] = staticmethod(any_json_text)
    of_json: Callable[[Any], Any] | None = bytes.fromhex
    value_of_text: Callable[[str], Any] = bytes.fromhex
    arrow_json_type = pa.string()
    stored_dtype = None
    stored_view: pa.DataType | None = None
    of_stored: Callable[[bytes], Any] | None = None

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return quoted(hexed(column))

    def of_python(self, value: Any) -> Any:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        instead = "; encode it first, as value.encode() does" if isinstance(value, str) else ""
        raise wrong_type(value, self, instead)

    def lower_bound(self, raw: bytes, length: int | None) -> bytes | None:
        return raw[:length]

    def upper_bound(self, raw: bytes, length: int | None) -> bytes | None:
        return _bytes_at_least(raw, length)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        return _unhexed(texts)

    def url_text(self, value: Any) -> str | None:
        return value.hex() if type(value) is bytes else None

    def hashed_bytes(self, value: Any) -> bytes:
        return bytes(memoryview(value))

    def key_bytes(self, value: Any) -> bytes:
        return self.hashed_bytes(value).replace(b"\x00", b"\x00\xff") + b"\x00\x00"

    def stored_key_bytes(self, value: bytes) -> bytes:
        return b"\x01%b\x00\x00" % value.replace(b"\x00", b"\x00\xff")

    def few_keys(self, column: pa.Array) -> list[bytes]:
        return [
            NULL_KEY if v is None else self.stored_key_bytes(v) for v in self.few_hashed(column)
        ]

    def keys(self, column: pa.Array) -> pa.Array:
        # Arrow replaces bytes only in strings typed as binary.
        body = pc.replace_substring(
            column.cast(pa.binary()), pattern=b"\x00", replacement=b"\x00\xff"
        )
        return pc.binary_join_element_wise(b"\x01", body, b"\x00\x00", b"")

    def few_hashed(self, column: pa.Array) -> Sequence[bytes | None]:
        # Strings are not decoded, because a string may be malformed UTF-8.
        return column.view(pa.binary()).to_pylist()  # type: ignore[no-any-return]

    def hashes(self, column: pa.Array) -> npt.NDArray[np.uint32]:
        return hashes_of_bytes(column.view(pa.binary()))


class Text(Binary):
    """string: the UTF-8 bytes are keyed, hashed and stored like a binary."""

    json_types = frozenset((str,))
    python_types = frozenset((str, NoneType))
    iceberg_name = avro = "string"
    aggregates = ORDERED | {"listagg"}
    json_text = staticmethod(encode_basestring_ascii)
    of_json = None
    value_of_text = str
    stored_view = pa.binary()
    of_stored = staticmethod(bytes.decode)

    def of_bound(self, raw: bytes) -> str | None:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # A writer cut the bound inside a character.
            return None

    def of_footer(self, raw: Any) -> str | None:
        return self.of_bound(bytes(raw))

    def lower_bound(self, raw: bytes, length: int | None) -> bytes | None:
        return text_at_most(raw, length)

    def upper_bound(self, raw: bytes, length: int | None) -> bytes | None:
        return text_at_least(raw, length)

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return quoted(escaped(column.cast(pa.large_string())))

    def of_python(self, value: Any) -> Any:
        if isinstance(value, bytes | bytearray):
            raise wrong_type(value, self, "; decode it first, as value.decode() does")
        if not isinstance(value, str):
            raise wrong_type(value, self, "; convert it with str()")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnfitError("a text with half of a surrogate pair is no string") from error
        return str(value)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        return texts.cast(self.arrow)

    def url_text(self, value: Any) -> str | None:
        return value if type(value) is str else None

    def hashed_bytes(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError
        return value.encode()


def _unhexed(texts: pa.Array) -> pa.Array:
    """Return hexadecimal texts as bytes; raises `SchemaMismatchError` for other texts."""
    offset, count = texts.offset, len(texts)
    _, ends, data = texts.buffers()
    if not count or data is None:
        return texts.cast(pa.binary())
    # A null may have bytes, too.
    plain = texts.fill_null("") if texts.null_count else texts
    if plain is not texts:
        offset = plain.offset
        _, ends, data = plain.buffers()
        if data is None:
            return texts.cast(pa.binary())
    places = np.frombuffer(ends, np.int32)[offset : offset + count + 1]
    digits = memoryview(data)[int(places[0]) : int(places[-1])]
    try:
        decoded = bytes.fromhex(bytes(digits).decode("ascii"))
    except ValueError:
        decoded = b""
    # Refused are blanks between bytes, and texts of odd lengths with an even total.
    if 2 * len(decoded) != len(digits) or (places % 2 != places[0] % 2).any():
        raise SchemaMismatchError("a text is no hexadecimal digits")
    starts = ((places - places[0]) // 2).astype(np.int32)
    validity = None
    if texts.null_count:
        validity = pa.array(texts.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [validity, pa.py_buffer(starts.tobytes()), pa.py_buffer(decoded)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def text_at_most(raw: bytes, length: int | None) -> bytes | None:
    """Return the first `length` characters of UTF-8, None for bytes that are none."""
    try:
        return raw if length is None else raw.decode()[:length].encode()
    except UnicodeDecodeError:
        return None


def text_at_least(raw: bytes, length: int | None) -> bytes | None:
    """Return a text of at most `length` characters that is not below `raw`; None without one."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if length is None or len(text) <= length:
        return raw
    for end in range(length, 0, -1):
        following = ord(text[end - 1]) + 1
        if following == _SURROGATE_FIRST:
            # No text has surrogates: UTF-8 has no form for them.
            following = _AFTER_SURROGATES
        if following <= _CHARACTER_LAST:
            return (text[: end - 1] + chr(following)).encode()
    return None


def _bytes_at_least(raw: bytes, length: int | None) -> bytes | None:
    if length is None or len(raw) <= length:
        return raw
    for end in range(length, 0, -1):
        if raw[end - 1] < _BYTE_LAST:
            return raw[: end - 1] + bytes([raw[end - 1] + 1])
    return None
