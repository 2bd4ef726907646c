"""Renewals of a lease over connections that fail."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from streamhouse.storage_service.ownership.journal.lease import LeaseKeeper, renewal_timeout_s
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store


def test_a_connection_that_hangs_costs_one_renewal_not_the_lease() -> None:
    """The first connection is taken and never answered, as behind a firewall that forgot it."""
    with _HangingOnce(("127.0.0.1", 0), _Answering) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = open_store(
            "s3://bucket/prefix",
            properties={
                "s3.endpoint": f"http://127.0.0.1:{server.server_address[1]}",
                "s3.access-key-id": "a",
                "s3.secret-access-key": "b",
            },
            timeout_s=renewal_timeout_s(9_000),
        )
        lapses: list[None] = []
        keeper = LeaseKeeper(
            store,
            ShardNames("0"),
            epoch=lambda: 1,
            is_opening=lambda: False,
            opened_s=time.monotonic(),
            on_lapse=lambda: lapses.append(None),
            endpoint="http://a",
            lease_ms=9_000,
        )

        keeper.start()

        assert server.is_answered.wait(60)
        keeper.close()
        server.shutdown()
        assert not lapses
        for request in server.hung:
            request.close()


class _HangingOnce(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_answered = threading.Event()
        self.hung: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.hung:
            super().process_request(request, client_address)
        else:
            self.hung.append(request)


class _Answering(BaseHTTPRequestHandler):
    server: _HangingOnce

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.server.is_answered.set()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""
