"""Objects of the journal come back as they were written, and damage is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import (
    ObjectKind,
    checksum_of,
    decode_object,
    encode_facts,
    encode_operations,
    encoded_bytes,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
)

_JOURNAL = journal_identity("service", "0")
_NONCE = bytes(range(16))
_PLACE = Place(3, 7)
_LOG = "tables/1/bucket-0/00000000000000000000.log"
_OPERATIONS: tuple[Operation, ...] = (
    Append(_LOG, 4096, b"frames"),
    Replace("service.json", b"{}"),
    Replace("tables/1/table.json", b""),
    Remove("tables/1/lake.json"),
    MakeDirectory("tables/1/bucket-0"),
    Move("tables/1", "tables/1.dropped"),
    RemoveTree("tables/1.dropped"),
)


def _encoded(operations: tuple[Operation, ...] = _OPERATIONS) -> bytes:
    buffers = encode_operations(
        operations, place=_PLACE, journal=_JOURNAL, nonce=_NONCE, previous_checksum=9
    )
    return b"".join(buffers)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(_OPERATIONS),
            st.builds(Append, st.just(_LOG), st.integers(0, 2**60), st.binary(max_size=300)),
            st.builds(Replace, st.just("service.json"), st.binary(max_size=300)),
        )
    )
)
def test_operations_come_back(operations: list[Operation]) -> None:
    data = _encoded(tuple(operations))

    found = decode_object(data, key="k", place=_PLACE, journal=_JOURNAL)

    assert found.operations == tuple(operations)
    assert (found.kind, found.nonce, found.place) == (ObjectKind.OPERATIONS, _NONCE, _PLACE)
    assert found.previous_checksum == 9
    assert len(data) == 88 + sum(map(encoded_bytes, operations))


def test_facts_come_back_and_the_checksum_is_known_to_the_writer() -> None:
    buffers = encode_facts(
        ObjectKind.OPEN,
        {"endpoint": "http://a"},
        place=_PLACE,
        journal=_JOURNAL,
        nonce=_NONCE,
        previous_checksum=0,
    )

    found = decode_object(b"".join(buffers), key="k", place=_PLACE)

    assert found.facts == {"endpoint": "http://a"}
    assert (found.checksum, found.journal) == (checksum_of(buffers), _JOURNAL)


@given(st.data())
def test_any_changed_bit_is_noticed(data: st.DataObject) -> None:
    encoded = bytearray(_encoded())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(CorruptDataError, match="object k of the journal"):
        decode_object(bytes(encoded), key="k", place=_PLACE, journal=_JOURNAL)


@given(st.integers(0, len(_encoded()) - 1))
def test_a_shorter_object_is_noticed(length: int) -> None:
    with pytest.raises(CorruptDataError, match="object k of the journal"):
        decode_object(_encoded()[:length], key="k", place=_PLACE, journal=_JOURNAL)


def test_an_object_of_another_journal_or_place_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="another service or shard"):
        decode_object(_encoded(), key="k", place=_PLACE, journal=journal_identity("service", "1"))
    with pytest.raises(CorruptDataError, match="another place"):
        decode_object(_encoded(), key="k", place=_PLACE.following, journal=_JOURNAL)


def test_a_path_outside_the_data_directory_is_refused_by_both_sides() -> None:
    with pytest.raises(CorruptDataError, match="path that cannot be"):
        _encoded((Replace("../service.json", b""),))
