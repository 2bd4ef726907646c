"""Many shards of which a zone fails, or whose store is away: a seeded world of requests.

The product's own watcher and protocol decide; `benchmarks/scale/takeovers.py` plays the rest, and
docs/scale.md has the same for a thousand shards.
"""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scale.takeovers import PRODUCT, Scenario, simulate

SHARDS = 60


@pytest.mark.parametrize("standbys", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_zone_that_fails_is_taken_over_in_time_and_without_a_herd(
    seed: int, standbys: int
) -> None:
    scenario = Scenario(shards=SHARDS, seed=seed, zone_fails=True, standbys=standbys)

    outcome = simulate(scenario, PRODUCT)

    # One owner more for each that failed, whoever else tried.
    assert (outcome.takeovers, outcome.needless_takeovers) == (SHARDS // 3, 0)
    assert outcome.ownerless == 0
    assert outcome.longest_wait_s < PRODUCT.lease_ms / 1e3 + 5
    assert outcome.peak_per_s < 2.5 * outcome.at_rest_per_s


@pytest.mark.parametrize("away_s", [5, 30])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_was_away_makes_no_takeovers(seed: int, away_s: float) -> None:
    scenario = Scenario(shards=SHARDS, seed=seed, store_away_s=away_s, seconds=75)

    outcome = simulate(scenario, PRODUCT)

    assert outcome.takeovers == 0
    assert outcome.peak_per_s < 2.5 * outcome.at_rest_per_s


def test_a_world_can_be_repeated_exactly() -> None:
    scenario = Scenario(shards=SHARDS, zone_fails=True, standbys=2)

    assert simulate(scenario, PRODUCT) == simulate(scenario, PRODUCT)
    assert simulate(dataclasses.replace(scenario, seed=1), PRODUCT) != simulate(scenario, PRODUCT)
