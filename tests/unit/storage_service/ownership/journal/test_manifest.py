"""A manifest is read as it was written, and never otherwise."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import (
    KeyFile,
    KeyRows,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.tree import JournalTree, Packed, TreeFile

PACK = "00000001-000000000003"
LOG = "tables/1/bucket-0/00000000000000000000.log"


def a_manifest() -> Manifest:
    tree = JournalTree()
    tree.add_directory("tables/2.dropped")
    tree.add_file(TreeFile(LOG, 30, 7, [Packed(PACK, 0, 10, 1), Packed(PACK, 20, 20, 2)]))
    tree.add_file(TreeFile("tables/1/lake.json", is_left_out=True))
    key = KeyFile("000012.sst", 5, 9, (Packed(PACK, 40, 5, 9),))
    return Manifest(
        service_id="s",
        shard="0",
        place=Place(1, 5),
        applied=3,
        stored_until=Place(1, 9),
        next_pack="00000001-000000000004",
        tree=tree,
        packs={PACK: 45},
        key_rows=(KeyRows("tables/1/bucket-0", 17, (key,)),),
    )


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = a_manifest()

    found = decode_manifest(encode_manifest(manifest), where="here")

    assert list(map(dataclasses.asdict, found.tree)) == list(map(dataclasses.asdict, manifest.tree))
    assert found.tree.directories == manifest.tree.directories
    assert dataclasses.replace(found, tree=manifest.tree) == manifest


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 2_000])
def test_a_manifest_has_all_files_however_many_there_are(count: int) -> None:
    manifest = dataclasses.replace(a_manifest(), tree=JournalTree(), key_rows=())
    for number in range(count):
        manifest.tree.add_file(
            TreeFile(f"tables/{number}/lake.json", 5, number, [Packed(PACK, 0, 5, 1)])
        )

    found = decode_manifest(encode_manifest(manifest), where="here")

    assert list(map(dataclasses.asdict, found.tree)) == list(map(dataclasses.asdict, manifest.tree))
    assert dataclasses.replace(found, tree=manifest.tree) == manifest


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"packs": [], "directories": [], "files": [["service.json", Infinity, 1, []]]}',
    ],
)
def test_json_that_no_checkpoint_writes_is_refused_as_damage(text: bytes) -> None:
    """It came out as RecursionError and OverflowError: no older checkpoint was tried."""
    body = zlib.compress(text)
    header = struct.pack("<4sHHIQ", b"SHJM", 1, 0, crc32c(body), len(text))

    with pytest.raises(CorruptDataError, match="here is damaged"):
        decode_manifest(header + body, where="here")


@given(st.data())
def test_a_damaged_manifest_is_refused(data: st.DataObject) -> None:
    whole = encode_manifest(a_manifest())
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    # Two bytes of the header are not used.
    damaged[6:8] = whole[6:8]

    if damaged != whole:
        # The version is not in the checksum: a damaged one looks like another release's.
        is_other = damaged[:4] == whole[:4] and damaged[4:6] != whole[4:6] and len(damaged) >= 20
        what = "has format" if is_other else "is damaged"
        with pytest.raises(CorruptDataError, match=f"here {what}"):
            decode_manifest(bytes(damaged), where="here")


@pytest.mark.parametrize(
    "pieces",
    [
        [Packed(PACK, 40, 6, 1)],
        [Packed("00000001-000000000009", 0, 6, 1)],
    ],
)
def test_bytes_that_no_pack_has_are_refused(pieces: list[Packed]) -> None:
    manifest = a_manifest()
    manifest.tree.add_file(TreeFile("service.json", 6, 1, list(pieces)))

    with pytest.raises(CorruptDataError):
        encode_manifest(manifest)
