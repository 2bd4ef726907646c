"""Whatever happens to the bytes of a log, no wrong row is ever returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.durable_mark import MARK_NAME
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.log_world import DIRECTORY, open_log, payloads_of, store

_PAYLOADS = [bytes([65 + n]) * (40 + 13 * n) for n in range(12)]
_OPTIONS = {"segment_bytes_max": 600, "index_interval_bytes": 150}


def _stored() -> CrashFilesystem:
    """Twelve batches of three rows in several segments, one group each."""
    disk = CrashFilesystem(0)
    log = open_log(disk, **_OPTIONS)
    for sequence, payload in enumerate(_PAYLOADS, 1):
        store(log, payload, rows=3, writer_id=5, sequence=sequence)
    log.close()
    return disk


_NAMES = [name for name in _stored().list_names(DIRECTORY) if not name.endswith(".tmp")]


def _all_true_or_refused(disk: CrashFilesystem, *, may_end_early: bool) -> None:
    try:
        log = open_log(disk, **_OPTIONS)
    except CorruptDataError:
        return
    if not may_end_early:
        assert log.high_watermark == 36
    for offset in range(log.log_start_offset, log.high_watermark):
        try:
            batches = log.read(offset, bytes_max=200)
        except CorruptDataError:
            continue
        first = offset // 3
        assert batches[0].base_offset == first * 3
        assert payloads_of(batches) == _PAYLOADS[first : first + len(batches)]


@given(
    name=st.sampled_from(_NAMES),
    where=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
    without_mark=st.booleans(),
)
def test_a_flipped_byte_anywhere(name: str, where: float, mask: int, without_mark: bool) -> None:
    disk = _stored()
    path = DIRECTORY / name
    disk.damage(path, int(where * disk.size_bytes(path)), mask)
    if without_mark and name != MARK_NAME:
        disk.remove(DIRECTORY / MARK_NAME)

    # Without the mark nothing proves that the very last group was acknowledged.
    _all_true_or_refused(disk, may_end_early=without_mark)


@given(name=st.sampled_from(_NAMES), keep=st.floats(0, 1))
def test_a_file_cut_anywhere(name: str, keep: float) -> None:
    disk = _stored()
    path = DIRECTORY / name
    disk.cut(path, int(keep * disk.size_bytes(path)))

    _all_true_or_refused(disk, may_end_early=False)


@given(name=st.sampled_from(_NAMES), garbage=st.binary(min_size=1, max_size=300))
def test_garbage_after_a_file(name: str, garbage: bytes) -> None:
    disk = _stored()
    path = DIRECTORY / name
    disk.open(path).write([garbage], position=disk.size_bytes(path))

    _all_true_or_refused(disk, may_end_early=False)


@given(name=st.sampled_from(_NAMES), contents=st.binary(max_size=200))
def test_a_file_of_other_contents(name: str, contents: bytes) -> None:
    disk = _stored()
    disk.create(DIRECTORY / name).write([contents], position=0)

    _all_true_or_refused(disk, may_end_early=False)


@given(
    first=st.sampled_from(_NAMES),
    second=st.sampled_from(_NAMES),
    change=st.sampled_from([CrashFilesystem.rename, lambda disk, a, b: disk.remove(a)]),
)
def test_a_file_renamed_or_removed(
    first: str, second: str, change: Callable[[CrashFilesystem, Path, Path], None]
) -> None:
    disk = _stored()
    change(disk, DIRECTORY / first, DIRECTORY / second)

    # Two files at once: the newest segment and the mark that would have missed it.
    _all_true_or_refused(disk, may_end_early=MARK_NAME in (first, second))
