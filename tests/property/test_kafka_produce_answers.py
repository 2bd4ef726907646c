"""The answer to a Produce that is laid out by hand has the bytes that kio writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamhouse.storage_service.kafka.messages.answers import answer_entity, entity_bytes
from streamhouse.storage_service.kafka.messages.produce_answer import (
    PRODUCE_VERSIONS,
    StoredPartition,
    produce_answer,
)

PRODUCE = 0
OFFSETS = st.integers(-1, (1 << 63) - 1)
PARTITIONS = st.lists(
    st.builds(StoredPartition, st.integers(0, (1 << 31) - 1), OFFSETS, OFFSETS), max_size=150
)
TOPICS = st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=300), PARTITIONS))


@given(version=st.integers(*PRODUCE_VERSIONS), topics=TOPICS)
def test_answer_has_the_bytes_that_kio_writes(
    version: int, topics: list[tuple[str, list[StoredPartition]]]
) -> None:
    values = {
        "responses": [
            {
                "name": name,
                "partition_responses": [
                    {
                        "index": stored.partition,
                        "base_offset": stored.base_offset,
                        "log_start_offset": stored.log_start_offset,
                    }
                    for stored in partitions
                ],
            }
            for name, partitions in topics
        ]
    }

    own = produce_answer(version, topics)

    assert own == entity_bytes(answer_entity(PRODUCE, version, values))
