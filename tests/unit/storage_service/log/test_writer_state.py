"""Which repetitions a bucket recognises, and that the snapshot keeps them."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import FencedError, OutOfOrderSequenceError
from streamhouse.core.model.records.record_sequence import (
    EPOCH_MAX,
    RECORDS_MAX,
    SEQUENCE_COUNT,
    Continuity,
    RecordSequence,
)
from streamhouse.storage_service.log.segments.segment_format import LogIdentity, MalformedError
from streamhouse.storage_service.log.writer_state import (
    RememberedBatch,
    WriterStates,
    decode_writers,
    encode_writers,
)

_IDENTITY = LogIdentity(3, 1)


def _states(*, window: int = 5, writers_max: int = 100) -> WriterStates:
    return WriterStates(window=window, writers_max=writers_max)


def _fill(states: WriterStates, writer_id: int, count: int, *, timestamp_us: int = 0) -> None:
    for sequence in range(1, count + 1):
        batch = RememberedBatch(sequence, sequence * 10, sequence * 10 + 10, timestamp_us)
        states.record(writer_id, batch)


def test_the_next_sequence_is_new_and_remembered_ones_are_repetitions() -> None:
    states = _states()
    _fill(states, 7, 8)

    assert states.find(7, sequence=9, row_count=1) is None
    for sequence in range(4, 9):
        found = states.find(7, sequence=sequence, row_count=10)
        assert found == RememberedBatch(sequence, sequence * 10, sequence * 10 + 10, 0)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (10, "sent sequence 10; expected 9, or a repetition of 4 to 8"),
        (3, "sent sequence 3; expected 9, or a repetition of 4 to 8"),
    ],
)
def test_gaps_and_forgotten_sequences_are_refused(sequence: int, message: str) -> None:
    states = _states()
    _fill(states, 7, 8)

    with pytest.raises(OutOfOrderSequenceError, match=message):
        states.find(7, sequence=sequence, row_count=10)


def test_an_unknown_writer_has_to_begin_at_the_beginning() -> None:
    states = _states()

    assert states.find(7, sequence=1, row_count=1) is None
    for sequence in (0, 2, 99):
        with pytest.raises(OutOfOrderSequenceError, match="begin with a new writer id"):
            states.find(7, sequence=sequence, row_count=1)


def test_a_repetition_with_other_rows_is_refused() -> None:
    states = _states()
    _fill(states, 7, 2)

    with pytest.raises(OutOfOrderSequenceError, match="with 11 rows; it had 10"):
        states.find(7, sequence=2, row_count=11)


def _counted(states: WriterStates, *sequences: RecordSequence) -> None:
    offset = 0
    for sequence in sequences:
        end = offset + sequence.record_count
        states.record(7, RememberedBatch(sequence.packed(), offset, end, 0))
        offset = end


@pytest.mark.parametrize(
    "sequence",
    [
        RecordSequence(0, 0, 1),
        RecordSequence(EPOCH_MAX, SEQUENCE_COUNT - 1, RECORDS_MAX),
        RecordSequence(3, 70_000, 131_000),
    ],
)
def test_what_counts_records_is_one_number_that_no_other_writer_has(
    sequence: RecordSequence,
) -> None:
    packed = sequence.packed()

    assert 1 << 63 <= packed < 1 << 64
    assert RecordSequence.unpacked(packed) == sequence


def test_records_go_on_where_the_last_batch_ends_and_begin_again_after_the_last_sequence() -> None:
    states = _states()
    last = RecordSequence(2, SEQUENCE_COUNT - 2, 4)
    _counted(states, RecordSequence(2, SEQUENCE_COUNT - 5, 3), last)

    assert states.find(7, sequence=RecordSequence(2, 2, 9).packed(), row_count=9) is None
    again = states.find(7, sequence=last.packed(), row_count=4)
    assert again is not None
    assert again[1:3] == (3, 7)


@pytest.mark.parametrize(
    ("epoch", "base", "count", "expected"),
    [(2, 8, 1, 7), (2, 5, 2, 7), (2, 4, 2, 7), (2, 4, 4, 7), (3, 7, 1, 0)],
)
def test_records_that_do_not_follow_are_refused(
    epoch: int, base: int, count: int, expected: int
) -> None:
    states = _states()
    _counted(states, RecordSequence(2, 0, 4), RecordSequence(2, 4, 3))

    with pytest.raises(OutOfOrderSequenceError, match=f"expected {expected}, or a rep") as refused:
        states.find(7, sequence=RecordSequence(epoch, base, count).packed(), row_count=count)
    assert not refused.value.is_unknown_writer


def test_a_higher_epoch_begins_anew_and_ends_the_one_before() -> None:
    states = _states()
    _counted(states, RecordSequence(2, 0, 4))

    assert states.find(7, sequence=RecordSequence(3, 0, 1).packed(), row_count=1) is None
    _counted(states, RecordSequence(3, 0, 1))
    with pytest.raises(FencedError, match="has epoch 3 by now, not 2"):
        states.find(7, sequence=RecordSequence(2, 0, 4).packed(), row_count=4)


def test_an_unknown_producer_has_to_begin_at_the_beginning() -> None:
    states = _states()

    assert states.find(7, sequence=RecordSequence(9, 0, 4).packed(), row_count=4) is None
    with pytest.raises(OutOfOrderSequenceError, match="not known here") as refused:
        states.find(7, sequence=RecordSequence(9, 4, 4).packed(), row_count=4)
    assert refused.value.is_unknown_writer


def test_a_writer_counts_batches_or_records() -> None:
    states = _states()
    _fill(states, 7, 2)

    with pytest.raises(OutOfOrderSequenceError, match="counts batches here, not records"):
        states.find(7, sequence=RecordSequence(0, 0, 1).packed(), row_count=1)
    _counted(states, RecordSequence(0, 0, 1))
    with pytest.raises(OutOfOrderSequenceError):
        states.find(7, sequence=3, row_count=1)


def test_what_left_nothing_in_a_bucket_is_no_repetition_of_what_came_long_before() -> None:
    """A bucket is left out while the sequences go round: only who saw the order can tell."""
    states = _states()
    _counted(states, RecordSequence(2, 1_000_000, 10))
    behind = RecordSequence(2, 1_000_000 - 50, 10).packed()

    assert states.find(7, sequence=behind, row_count=10, continuity=Continuity.ORDERED) is None
    nothing = states.find(7, sequence=behind, continuity=Continuity.UNKNOWN)
    assert nothing == RememberedBatch(behind, 0, 0, 0)
    # A log has every row: what has some would be remembered.
    with pytest.raises(OutOfOrderSequenceError, match="with 10 rows; it had 0"):
        states.find(7, sequence=behind, row_count=10, continuity=Continuity.UNKNOWN)
    later = RecordSequence(2, 3_000_000, 10).packed()
    assert states.find(7, sequence=later, row_count=10, continuity=Continuity.UNKNOWN) is None


def test_put_back_undoes_records_in_reverse() -> None:
    states = _states()
    _fill(states, 7, 3)
    known = states.windows()
    first = states.record(7, RememberedBatch(4, 40, 50, 0))
    second = states.record(8, RememberedBatch(1, 50, 60, 0))

    states.put_back(8, second)
    states.put_back(7, first)

    assert states.windows() == known


def test_expire_forgets_idle_writers_only() -> None:
    states = _states()
    _fill(states, 1, 1, timestamp_us=100)
    _fill(states, 2, 1, timestamp_us=200)
    states.record(1, RememberedBatch(2, 0, 1, 300))

    states.expire(250)

    assert list(states.windows()) == [1]


def test_the_longest_idle_writer_makes_room() -> None:
    states = _states(writers_max=2)
    _fill(states, 1, 1)
    _fill(states, 2, 1)
    states.record(1, RememberedBatch(2, 0, 1, 0))

    _fill(states, 3, 1)

    assert set(states.windows()) == {1, 3}


def test_snapshot_round_trip_keeps_order_and_windows() -> None:
    states = _states()
    _fill(states, 1 << 63, 9)
    _fill(states, 5, 2)

    contents = encode_writers(states, identity=_IDENTITY, offset=77)
    read = decode_writers(contents, identity=_IDENTITY, offset=77, window=5, writers_max=100)

    assert list(read.windows().items()) == list(states.windows().items())


def test_snapshot_read_with_smaller_limits_keeps_the_latest() -> None:
    states = _states()
    _fill(states, 1, 5)
    _fill(states, 2, 5)

    contents = encode_writers(states, identity=_IDENTITY, offset=77)
    read = decode_writers(contents, identity=_IDENTITY, offset=77, window=2, writers_max=1)

    assert {w: [b.sequence for b in batches] for w, batches in read.windows().items()} == {
        2: [4, 5]
    }


def test_a_damaged_snapshot_is_noticed() -> None:
    states = _states()
    _fill(states, 1, 3)
    contents = encode_writers(states, identity=_IDENTITY, offset=77)

    for position in range(len(contents)):
        damaged = bytearray(contents)
        damaged[position] ^= 0x04
        with pytest.raises(MalformedError):
            decode_writers(bytes(damaged), identity=_IDENTITY, offset=77, window=5, writers_max=9)
    with pytest.raises(MalformedError):
        decode_writers(contents[:-1], identity=_IDENTITY, offset=77, window=5, writers_max=9)
    with pytest.raises(MalformedError):
        decode_writers(contents, identity=_IDENTITY, offset=78, window=5, writers_max=9)


def test_ten_thousand_writers_cost_little_memory() -> None:
    states = _states(writers_max=10_000)
    for writer_id in range(10_000):
        _fill(states, writer_id, 5)

    assert sum(map(len, states.packed())) <= 10_000 * (16 + 5 * 32)
