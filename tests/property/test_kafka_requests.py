"""Whatever bytes a Kafka client sends, they are read or refused: kio never meets absurd lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import types
import typing
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kio.schema.index import api_key_map, schema_name_map
from kio.static.constants import EntityType

from streamhouse.storage_service.kafka.messages import answers
from streamhouse.storage_service.kafka.messages.requests import (
    ELEMENTS_MAX,
    RequestHeader,
    parse_header,
    parse_request,
    request_class,
)
from streamhouse.storage_service.kafka.messages.shapes import MalformedRequestError
from streamhouse.storage_service.kafka_door._apis import APIS

OFFERED: Final = [
    (api.key, version)
    for api in APIS.values()
    for version in range(api.versions[0], api.versions[1] + 1)
]
"""API and version of every request that a client may send."""
NULLS: Final = (b"\xff" * 4, b"\0" * 4)
"""An array that is null and one that is empty, before lengths were varints."""
LENGTHS: Final = (b"\xff\xff\xff\xff\x07", b"\x7f\xff\xff\xff", b"\xff" * 9, b"\x80")


def _empty(api_key: int, version: int) -> bytes:
    """Return a request of defaults, behind its header."""
    return answers.entity_bytes(answers._entity(request_class(api_key, version), {}))


def _parsed(api_key: int, version: int, body: bytes) -> Any:
    flexible = b"\0" if request_class(api_key, version).__flexible__ else b""
    data = memoryview(struct.pack(">hhih", api_key, version, 1, -1) + flexible + body)
    return parse_request(parse_header(data), data)


@given(
    asked=st.sampled_from(OFFERED),
    changes=st.lists(
        st.tuples(
            st.integers(0, 60),
            st.integers(0, 4),
            st.one_of(
                st.binary(max_size=12),
                st.sampled_from(LENGTHS),
            ),
        ),
        max_size=5,
    ),
)
@example(asked=(3, 12), changes=[(0, 1, b"\xff\xff\xff\xff\x07")])
@example(asked=(3, 1), changes=[(0, 4, b"\x7f\xff\xff\xff")])
@example(asked=(18, 3), changes=[(0, 4, b"")])
def test_damaged_requests_are_read_or_refused(
    asked: tuple[int, int], changes: list[tuple[int, int, bytes]]
) -> None:
    body = bytearray(_empty(*asked))
    for at, count, new in changes:
        body[at : at + count] = new

    with contextlib.suppress(MalformedRequestError):
        _parsed(*asked, bytes(body))


def test_few_bytes_never_make_many_elements() -> None:
    for count in (ELEMENTS_MAX + 1, 1_000_000):
        body = struct.pack(">i", count) + bytes(2 * count) + b"\0" * 8
        with pytest.raises(MalformedRequestError, match="array"):
            _parsed(3, 4, body)


def test_the_header_may_be_anything() -> None:
    for size in range(10):
        data = memoryview(bytes([0xFF] * size))
        with pytest.raises(MalformedRequestError):
            parse_header(data)
    with pytest.raises(MalformedRequestError):
        parse_header(memoryview(struct.pack(">hhih", 3, 12, 1, 30_000)))
    flexible = memoryview(struct.pack(">hhih", 3, 12, 1, -1) + b"\xff\xff\xff\xff\x0f")
    with pytest.raises(MalformedRequestError):
        parse_request(RequestHeader(3, 12, 1, "", 10), flexible)


def test_every_request_of_the_protocol_is_walked_as_kio_writes_it() -> None:
    walked = 0
    for api_key, name in api_key_map.items():
        for version, kinds in schema_name_map[name].items():
            # Its nested entity has no default.
            if EntityType.request not in kinds or name == "update_raft_voter":
                continue
            parse = _parsed(api_key, int(version), _empty(api_key, int(version)))
            assert type(parse) is request_class(api_key, int(version))
            walked += 1
    assert walked > 250


def test_an_array_that_must_be_there_is_never_null() -> None:
    for api_key, version in OFFERED:
        empty = _empty(api_key, version)
        null, none = (b"\0", b"\x01") if request_class(api_key, version).__flexible__ else NULLS
        for at in range(len(empty)):
            if not empty.startswith(none, at):
                continue
            body = empty[:at] + null + empty[at + len(none) :]
            with contextlib.suppress(MalformedRequestError):
                found = _parsed(api_key, version, body)
                hints = typing.get_type_hints(type(found))
                assert all(
                    types.NoneType in typing.get_args(hints[field.name])
                    for field in dataclasses.fields(found)
                    if getattr(found, field.name) is None
                ), (api_key, version)
