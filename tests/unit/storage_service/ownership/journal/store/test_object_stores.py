"""Every object store keeps the contract of `ObjectStore`: directories here, S3 in a slow test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectTooLargeError,
    StoreRefusedError,
    StoreUnavailableError,
)
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store, probe
from tests.support import object_store as s3

_S3 = pytest.param("s3", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def server() -> Iterator[s3.ObjectStore]:
    with s3.ObjectStore() as started:
        yield started


def _s3_properties(server: s3.ObjectStore, **changes: str) -> dict[str, str]:
    return {
        "s3.endpoint": server.endpoint,
        "s3.region": s3.REGION,
        "s3.access-key-id": s3.ACCESS_KEY,
        "s3.secret-access-key": s3.SECRET_KEY,
        **changes,
    }


@pytest.fixture(params=["file", _S3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_store(f"file://{tmp_path}/store")
    server = request.getfixturevalue("server")
    return open_store(f"s3://{s3.BUCKET}/{tmp_path.name}", properties=_s3_properties(server))


def test_of_all_who_create_a_key_one_succeeds(store: ObjectStore) -> None:
    def attempt(text: bytes) -> bool:
        try:
            store.create("a/key", [text, memoryview(text)])
        except ObjectExistsError:
            return False
        return True

    texts = [b"%d" % number for number in range(8)]
    with ThreadPoolExecutor(8) as rivals:
        won = list(rivals.map(attempt, texts))

    assert won.count(True) == 1
    assert store.get("a/key", bytes_max=100) == 2 * texts[won.index(True)]


def test_an_object_is_read_within_bounds(store: ObjectStore) -> None:
    store.replace("a/key", b"former")
    store.replace("a/key", b"0123456789")

    assert store.get("a/key", bytes_max=10) == b"0123456789"
    assert store.get_range("a/key", start=2, length=3) == b"234"
    assert store.get_range("a/key", start=2, length=0) == b""
    with pytest.raises(ObjectTooLargeError):
        store.get("a/key", bytes_max=9)
    for start in (8, 10, 50):
        with pytest.raises(ObjectNotFoundError):
            store.get_range("a/key", start=start, length=3)
    with pytest.raises(ObjectNotFoundError):
        store.get("a/other", bytes_max=9)


def test_keys_are_listed_in_order_and_in_pages(store: ObjectStore) -> None:
    keys = sorted(["a/b", "a/b-c", "a/b.d", "a/c/1", "a/c/2", "a/c/d/1", "a/c1", "ab/1"])
    for key in reversed(keys):
        store.create(key, [b"12"])
    below = [key for key in keys if key.startswith("a/")]

    assert [entry.key for entry in store.list_objects("a/")] == below
    assert {entry.size_bytes for entry in store.list_objects("a/")} == {2}
    assert [entry.key for entry in store.list_objects("a/c/")] == ["a/c/1", "a/c/2", "a/c/d/1"]
    for number, key in enumerate(below):
        found = store.list_objects("a/", start_after=key, count_max=2)
        assert [entry.key for entry in found] == below[number + 1 : number + 3]
    assert [e.key for e in store.list_objects("a/", start_after="a/c/0")] == below[3:]
    assert store.list_objects("nothing/") == []


def test_deleted_keys_are_gone_and_may_be_deleted_again(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "a/3"):
        store.create(key, [b"x"])

    store.delete(["a/1", "a/3", "a/none"])
    store.delete(["a/1"])
    store.delete([])

    assert [entry.key for entry in store.list_objects("a/")] == ["a/2"]


def test_a_good_store_passes_the_probe_and_nothing_is_left(store: ObjectStore) -> None:
    probe(store)

    assert store.list_objects("probe/") == []


def test_a_store_that_overwrites_fails_the_probe(tmp_path: Path) -> None:
    from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore

    class Overwriting(FileObjectStore):
        def create(self, key: str, buffers: object) -> None:
            assert isinstance(buffers, list)
            self.replace(key, b"".join(buffers))

    with pytest.raises(InvalidRequestError, match="let 5 of 5 create one object"):
        probe(Overwriting(tmp_path))


@pytest.mark.slow
def test_wrong_keys_are_said_without_the_secret(server: s3.ObjectStore) -> None:
    wrong = _s3_properties(server, **{"s3.secret-access-key": "not-the-secret"})
    store = open_store(f"s3://{s3.BUCKET}/wrong", properties=wrong)

    with pytest.raises(StoreRefusedError, match="refuses a/key") as raised:
        store.create("a/key", [b"x"])

    assert "not-the-secret" not in str(raised.value)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        probe(store)


class _WithoutBucket(BaseHTTPRequestHandler):
    """A store that has no bucket at all; it knows how the last request was signed."""

    signed: ClassVar[str] = ""

    def do_PUT(self) -> None:
        type(self).signed = self.headers["x-amz-content-sha256"]
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b"<Error><Code>NoSuchBucket</Code><Message>nothing of this name</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


def test_a_bucket_that_is_not_there_is_said_so() -> None:
    with HTTPServer(("127.0.0.1", 0), _WithoutBucket) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = open_store(
            "s3://nowhere/prefix",
            properties={
                "s3.endpoint": f"http://127.0.0.1:{server.server_port}",
                "s3.access-key-id": "a",
                "s3.secret-access-key": "b",
            },
        )

        with pytest.raises(InvalidRequestError, match="there is no such bucket"):
            probe(store)
        server.shutdown()


@pytest.mark.parametrize(("host", "is_signed"), [("127.0.0.1", False), ("127.0.0.2", True)])
def test_bodies_are_signed_where_somebody_could_change_them_on_their_way(
    host: str, is_signed: bool
) -> None:
    with HTTPServer((host, 0), _WithoutBucket) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = open_store(
            "s3://bucket/prefix",
            properties={
                "s3.endpoint": f"http://{host}:{server.server_port}",
                "s3.access-key-id": "a",
                "s3.secret-access-key": "b",
            },
        )

        with pytest.raises(StoreRefusedError):
            store.create("a/key", [b"text"])
        server.shutdown()

    assert (_WithoutBucket.signed != "UNSIGNED-PAYLOAD") == is_signed


def test_a_store_that_is_away_is_said_so() -> None:
    store = open_store(
        "s3://bucket/prefix",
        properties={
            "s3.endpoint": "http://127.0.0.1:1",
            "s3.access-key-id": "a",
            "s3.secret-access-key": "b",
        },
    )

    with pytest.raises(StoreUnavailableError, match="s3://bucket/prefix"):
        store.get("a/key", bytes_max=1)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (403, StoreRefusedError, "403 Forbidden: ExpiredToken: The token has expired."),
        (503, StoreUnavailableError, "503 Service Unavailable: ExpiredToken"),
    ],
)
def test_what_the_store_answered_is_said_whatever_was_asked(
    status: int, kind: type[Exception], said: str
) -> None:
    """The cause came after a URL, and was cut off; a list that was refused counted as away."""
    body = b"<Error><Code>ExpiredToken</Code><Message>The token\nhas expired.</Message></Error>"

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        properties = {
            "s3.endpoint": f"http://127.0.0.1:{server.server_address[1]}",
            "s3.access-key-id": "a",
            "s3.secret-access-key": "b",
            "s3.region": "eu-central-1",
        }
        store = open_store(f"s3://bucket/{'a-long-prefix/' * 9}", properties=properties)
        key = "shards/0/journal/00000001/000000000129"
        try:
            for ask in (
                lambda: store.create(key, [b"x"]),
                lambda: store.get(key, bytes_max=1),
                lambda: store.list_objects("shards/0/journal/"),
            ):
                with pytest.raises(kind, match=said):
                    ask()
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "url", ["", "/dir", "file://", "file:///", "file://host/dir", "s3://", "gs://b/p", "s3://b/p?x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="--journal"):
        open_store(url)


def test_a_directory_of_objects_is_its_owners_alone(tmp_path: Path) -> None:
    """It has every row, and was readable for everybody on the machine."""
    store = open_store(f"file://{tmp_path}/new/store")

    store.create("a/key", [b"row"])
    store.replace("a/lease", b"endpoint")

    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert {path.name: path.stat().st_mode & 0o777 for path in made} == {
        **dict.fromkeys(("new", "store", "a"), 0o700),
        **dict.fromkeys(("key", "lease"), 0o600),
    }


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:8333", "s3.internal", "ftp://s3", "http://", "https://u:secret@s3"]
)
def test_an_endpoint_that_is_no_url_is_refused_with_a_sentence(endpoint: str) -> None:
    """It ended in a panic of the library, which is no exception that anybody handles."""
    with pytest.raises(InvalidRequestError, match="must be a URL like https") as refused:
        open_store("s3://bucket/prefix", properties={"s3.endpoint": endpoint})
    assert "secret" not in refused.value.message
