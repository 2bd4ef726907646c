"""The store that misbehaves: what it passes on arrives whole, and what it does happens as named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from tests.support.faulty_store import CALM, FaultPlan, FaultyStore
from tests.support.object_store import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, ObjectStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


@pytest.fixture
def faulty(real: ObjectStore) -> Iterator[FaultyStore]:
    with FaultyStore(real.port, seed=1) as store:
        yield store


def opened(endpoint: str) -> S3Store:
    """Open the bucket so that each call is one request."""
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region=REGION,
        client_options={"allow_http": True, "timeout": "10s"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=10)},
    )


def test_a_calm_store_passes_everything_on(faulty: FaultyStore) -> None:
    store = opened(faulty.endpoint)

    obstore.put(store, "calm/a b", b"x" * 3_000_000, mode="create", use_multipart=False)

    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "calm/a b", b"other", mode="create", use_multipart=False)
    assert bytes(obstore.get(store, "calm/a b").bytes()) == b"x" * 3_000_000
    assert bytes(obstore.get_range(store, "calm/a b", start=5, end=9)) == b"xxxx"
    assert obstore.head(store, "calm/a b")["size"] == 3_000_000
    assert [m["path"] for m in obstore.list(store, "calm").collect()] == ["calm/a b"]
    obstore.delete(store, "calm/a b")
    assert obstore.list(store, "calm").collect() == []
    assert not faulty.met


@pytest.mark.parametrize("fault", ["answer lost", "done but 503"])
def test_what_was_done_is_not_told(faulty: FaultyStore, real: ObjectStore, fault: str) -> None:
    faulty.plan = FaultPlan(share=1.0, faults=(fault,))  # type: ignore[arg-type]
    key = fault.replace(" ", "-")

    with pytest.raises(BaseError):
        obstore.put(opened(faulty.endpoint), key, b"1", mode="create", use_multipart=False)

    assert bytes(obstore.get(opened(real.endpoint), key).bytes()) == b"1"
    assert faulty.met[fault] >= 1


@pytest.mark.parametrize("fault", ["refused", "conflict"])
def test_what_is_refused_is_not_done(faulty: FaultyStore, real: ObjectStore, fault: str) -> None:
    faulty.plan = FaultPlan(share=1.0, faults=(fault,))  # type: ignore[arg-type]

    with pytest.raises((BaseError, FileExistsError)):
        obstore.put(opened(faulty.endpoint), fault, b"1", mode="create", use_multipart=False)

    with pytest.raises(FileNotFoundError):
        obstore.head(opened(real.endpoint), fault)


def test_a_request_is_done_after_its_caller_was_cut_off(
    faulty: FaultyStore, real: ObjectStore
) -> None:
    faulty.plan = FaultPlan(share=1.0, faults=("done late",), delay_ms_max=1)

    with pytest.raises(BaseError):
        obstore.put(opened(faulty.endpoint), "late/1", b"1", mode="create", use_multipart=False)

    store = opened(real.endpoint)
    pause = threading.Event()
    for _ in range(1_000):
        if obstore.list(store, "late").collect():
            break
        pause.wait(0.01)
    assert bytes(obstore.get(store, "late/1").bytes()) == b"1"


def test_a_store_that_is_away_does_nothing_and_comes_back(
    faulty: FaultyStore, real: ObjectStore
) -> None:
    store = opened(faulty.endpoint)
    faulty.go_away(3_600)

    with pytest.raises(BaseError):
        obstore.put(store, "away", b"1", mode="create", use_multipart=False)

    with pytest.raises(FileNotFoundError):
        obstore.head(opened(real.endpoint), "away")
    faulty.come_back()
    obstore.put(store, "away", b"1", mode="create", use_multipart=False)


def test_a_share_of_the_requests_meets_faults_and_the_rest_is_right(faulty: FaultyStore) -> None:
    store = opened(faulty.endpoint)
    faulty.plan = FaultPlan(share=0.5, delay_ms_max=2)
    stored = set()
    for number in range(60):
        try:
            obstore.put(store, f"share/{number:02d}", b"1", mode="create", use_multipart=False)
            stored.add(f"share/{number:02d}")
        except (BaseError, FileExistsError):
            continue
    faulty.plan = CALM

    found = {meta["path"] for meta in obstore.list(store, "share").collect()}
    assert stored <= found
    assert stored
    assert len(faulty.met) >= 4
