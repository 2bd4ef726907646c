"""A server with fixed answers by path, for commands that only print answers of a service."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["canned_service"]


@contextlib.contextmanager
def canned_service(answers: Mapping[str, Any]) -> Iterator[str]:
    """Serve the JSON answers at a free port; yields the URL."""

    class Canned(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            unknown = {"error": {"code": "invalid_request", "message": f"no answer: {self.path}"}}
            body = json.dumps(answers.get(self.path, unknown)).encode()
            self.send_response(200 if self.path in answers else 400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
