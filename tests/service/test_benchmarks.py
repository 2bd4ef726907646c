"""A benchmark runs: with few rows, once through, its figures thrown away."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import RESULT_PREFIX
from tests.support.python_process import run_python

pytestmark = pytest.mark.slow


def test_small_calls_are_measured_without_a_peer() -> None:
    lines = ["lookup", "upsert_1", "append_to_subscriber"]

    ran = run_python(["-m", "benchmarks.bench_small_calls", "--tiny", *lines])

    assert ran.returncode == 0, ran.stderr
    results = [
        json.loads(line.removeprefix(RESULT_PREFIX))
        for line in ran.stdout.splitlines()
        if line.startswith(RESULT_PREFIX)
    ]
    assert [result["name"].partition(",")[0] for result in results] == [
        "lookup of one key",
        "processor of the client",
        "upsert of 1 row",
        "processor of the client",
        "append of 1 row to a subscriber",
    ]


@pytest.mark.long
def test_a_journal_is_measured_and_its_standby_reaches_the_end() -> None:
    """It waited for the standby by a metric's name that the service does not have."""
    ran = run_python(["-m", "benchmarks.bench_journal", "--tiny", "--stores", "file"])

    assert ran.returncode == 0, ran.stderr
    names = [
        json.loads(line.removeprefix(RESULT_PREFIX))["name"].partition(",")[0]
        for line in ran.stdout.splitlines()
        if line.startswith(RESULT_PREFIX)
    ]
    assert names == [
        *["append"] * 4,
        *["upsert"] * 2,
        *["p50 of one append of 100 rows"] * 2,
        "takeover by a warm standby",
    ]
