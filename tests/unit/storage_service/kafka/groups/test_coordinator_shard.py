"""Which shard coordinates a group: the same for all who ask, and evenly."""

from __future__ import annotations

from collections import Counter

from streamhouse.storage_service.kafka.groups.coordinator_shard import coordinator_of

GROUPS = [f"group-{i}" for i in range(3_000)]
SHARDS = ["a", "b", "c"]


def test_every_shard_coordinates_its_part_and_a_new_one_moves_only_what_it_takes() -> None:
    before = {group: coordinator_of(group, SHARDS) for group in GROUPS}
    assert before == {group: coordinator_of(group, SHARDS[::-1]) for group in GROUPS}
    assert all(count > 900 for count in Counter(before.values()).values())

    after = {group: coordinator_of(group, [*SHARDS, "d"]) for group in GROUPS}
    moved = {group for group in GROUPS if after[group] != before[group]}
    assert {after[group] for group in moved} == {"d"}
    assert 600 < len(moved) < 900
    assert {coordinator_of(group, ["a"]) for group in GROUPS} == {"a"}
