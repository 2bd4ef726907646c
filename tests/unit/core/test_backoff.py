"""How long to wait before something that failed is tried again."""

from __future__ import annotations

from streamhouse.core.backoff import Backoff


def test_waits_double_with_each_failure_up_to_their_bound() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)

    assert [backoff.after(n) for n in range(7)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.after(10_000) == 1.0


def test_jitter_shortens_a_wait_by_half_at_most() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)

    waits = [backoff.jittered_after(3) for _ in range(100)]

    assert all(0.2 <= wait <= 0.4 for wait in waits)
    assert len(set(waits)) > 1
