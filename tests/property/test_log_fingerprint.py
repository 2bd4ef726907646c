"""Two copies of a log have one fingerprint at an offset exactly if they have the same frames below.

A model hashes the headers of all frames that ever were; histories have rolls, retention, clean and
unclean restarts, torn tails, refused writes, and begin in the format of an earlier release or not.
"""

from __future__ import annotations

import copy
import random
import struct
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segments.segment_format import (
    LogIdentity,
    decode_segment_header,
    encode_segment_header,
)
from tests.support.crash_filesystem import Crash, CrashFilesystem
from tests.support.log_world import DIRECTORY, SettableClock, open_log, store

_IDENTITY = LogIdentity(7, 0)
_OPTIONS = {"segment_bytes_max": 700, "index_interval_bytes": 200}
_HEADER = 64


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


@dataclass
class _Model:
    """Every frame that ever was, by base offset; `start` is where fingerprints begin."""

    start: int = 0
    frames: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def see(self, disk: CrashFilesystem) -> None:
        """Take over what lies in the segment files, whoever wrote it."""
        for name in disk.list_names(DIRECTORY):
            if not name.endswith(".log"):
                continue
            data = disk.read(DIRECTORY / name, bytes_max=1 << 20)
            position = _HEADER
            while position + _HEADER <= len(data):
                header = data[position : position + _HEADER]
                payload_bytes, base, rows = struct.unpack_from("<8xI4xQI", header)
                self.frames[base] = (header, rows)
                position += _HEADER + (payload_bytes + 7 & ~7)

    def fingerprint(self, offset: int) -> str | None:
        """Return what the log must say of an offset that it has."""
        if offset < self.start:
            return None
        known = _hash(struct.pack("<8sQIQ", b"SHLOGFP1", 7, 0, self.start))
        for base in sorted(self.frames):
            header, rows = self.frames[base]
            if base < self.start or base >= offset:
                continue
            before = bytes.fromhex(known)
            if offset < base + rows:
                return _hash(before + header + struct.pack("<Q", offset - base))
            known = _hash(before + header)
        return known


def _as_earlier_release(disk: CrashFilesystem) -> None:
    """Make of all files what the release before fingerprints would have written."""
    for name in disk.list_names(DIRECTORY):
        path = DIRECTORY / name
        if name.endswith(".index"):
            disk.remove(path)
        elif name.endswith(".log"):
            header = decode_segment_header(disk.read(path, bytes_max=64), identity=_IDENTITY)
            old = encode_segment_header(header._replace(fingerprint=None), identity=_IDENTITY)
            file = disk.open(path)
            file.write([old], position=0)
            file.sync()


class _History:
    """One random life of a log."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = CrashFilesystem(seed)
        self.clock = SettableClock()
        self.model = _Model()
        self.log = self._open()

    def _open(self) -> LogTablet:
        return open_log(self.disk, clock_us=self.clock, **_OPTIONS)

    def append(self) -> None:
        self.clock.now_us += self.random.randint(0, 5)
        payloads = [
            self.random.randbytes(self.random.randint(1, 90))
            for _ in range(self.random.randint(1, 3))
        ]
        store(self.log, *payloads, rows=self.random.randint(1, 5))
        self.model.see(self.disk)

    def refuse(self) -> None:
        self.disk.errors[self.disk.steps] = 28
        with pytest.raises(StorageFailedError):
            store(self.log, b"never stored", rows=3)
        self.disk.errors.clear()

    def retain(self) -> None:
        self.log.apply_retention(
            timestamp_us_before=self.clock.now_us - self.random.randint(0, 30),
            offset_max=self.log.high_watermark,
        )

    def restart(self) -> None:
        if self.random.random() < 0.5:
            self.log.close()
        self.disk.restart(self.random.choice([Crash.PROCESS, Crash.POWER]))
        if self.random.random() < 0.5:
            name = max(n for n in self.disk.list_names(DIRECTORY) if n.endswith(".log"))
            path = DIRECTORY / name
            torn = self.random.randbytes(self.random.randint(1, 200))
            self.disk.open(path).write([torn], position=self.disk.size_bytes(path))
        self.log = self._open()

    def upgrade(self) -> None:
        """Close it, let it be of the release before, and open it with this one."""
        self.log.close()
        _as_earlier_release(self.disk)
        self.model.start = self.log.log_end_offset
        self.log = self._open()

    def step(self) -> None:
        self.random.choices(
            [self.append, self.refuse, self.retain, self.restart], weights=[10, 1, 2, 2]
        )[0]()

    def check(self) -> None:
        start = int(min(n for n in self.disk.list_names(DIRECTORY) if n.endswith(".log"))[:20])
        for offset in range(self.log.log_end_offset + 2):
            found = self.log.fingerprint(offset)
            is_known = start <= offset <= self.log.log_end_offset
            wanted = self.model.fingerprint(offset) if is_known else None
            assert (found and found.hex()) == wanted, offset


@pytest.mark.parametrize("seed", range(40))
def test_every_offset_has_the_fingerprint_of_the_frames_below_it(seed: int) -> None:
    history = _History(seed)
    for number in range(25):
        if number == 8 and seed % 2:
            history.upgrade()
        history.step()
    history.check()


@pytest.mark.parametrize("seed", range(10))
def test_copies_agree_as_far_as_their_frames_do(seed: int) -> None:
    one = _History(seed)
    for _ in range(12):
        one.step()
    one.log.close()
    other = copy.copy(one)
    other.disk, other.random = copy.deepcopy(one.disk), random.Random(seed + 1000)
    other.clock, other.model = copy.deepcopy(one.clock), copy.deepcopy(one.model)
    split = one.log.log_end_offset
    for history in (one, other):
        history.restart()
        while history.log.log_end_offset < split + 10:
            history.step()

    start = max(one.log.log_start_offset, other.log.log_start_offset)
    for offset in range(start, split + 10):
        agree = one.log.fingerprint(offset) == other.log.fingerprint(offset)
        assert agree == (offset <= split), offset


def test_an_empty_log_of_an_earlier_release_begins_anew_in_its_place() -> None:
    history = _History(0)
    history.upgrade()

    history.append()

    assert history.log.segment_count == 1
    history.check()


def test_a_segment_of_another_copy_is_damage() -> None:
    """It has the same name, offsets and times, and every checksum is right."""
    disk = CrashFilesystem(0)
    log = open_log(disk, **_OPTIONS)
    store(log, b"a" * 100, b"b" * 100)
    log.close()
    other = copy.deepcopy(disk)
    for copied, letter in ((disk, b"x"), (other, b"y")):
        log = open_log(copied, **_OPTIONS)
        for _ in range(8):
            store(log, letter * 100)
        log.close()
    first, *_ = [n for n in disk.list_names(DIRECTORY) if n.endswith(".log")]
    for name in (first, first.replace(".log", ".index")):
        contents = other.read(DIRECTORY / name, bytes_max=1 << 20)
        disk.cut(DIRECTORY / name, 0)
        disk.open(DIRECTORY / name).write([contents], position=0)

    with pytest.raises(CorruptDataError, match="from another copy of this directory"):
        open_log(disk, **_OPTIONS)


def test_behind_a_damaged_header_a_fingerprint_is_not_known() -> None:
    disk = CrashFilesystem(0)
    log = open_log(disk, **_OPTIONS)
    for _ in range(12):
        store(log, b"x" * 100)
    disk.damage(DIRECTORY / f"{0:020d}.log", 64 + 16)

    assert log.fingerprint(0) is not None
    assert log.fingerprint(1) is None
    assert log.fingerprint(12) is not None


def test_a_full_disk_does_not_keep_an_older_log_closed() -> None:
    """Its fingerprints begin with the next segment that finds room."""
    history = _History(0)
    history.append()
    history.log.close()
    _as_earlier_release(history.disk)
    history.disk.restart(Crash.PROCESS)
    # First the file's own sync, then the index of the segment that is to be sealed.
    history.disk.errors = {1: 28}

    log = history._open()

    assert log.log_end_offset > 0
    assert log.fingerprint(log.log_end_offset) is None
    for _ in range(8):
        store(log, b"x" * 200)
    assert log.fingerprint(log.log_end_offset) is not None
    log.close()
