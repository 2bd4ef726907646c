"""An HTTP server that takes every request and answers few of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["SilentServer"]


class SilentServer:
    """Answers `GET` of the paths `answers` with JSON; nothing else, until it is left.

    `requests` are those that have arrived, as `GET /path`, each with its headers in lower case.
    """

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        given = dict(answers or {})
        requests, ended = self.requests, threading.Event()
        self._ended = ended

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                headers = {key.lower(): value for key, value in self.headers.items()}
                requests.append((f"{self.command} {path}", headers))
                if self.command != "GET" or path not in given:
                    ended.wait()
                    self.close_connection = True
                    return
                body = json.dumps(given[path]).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_HEAD = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        """The URL to give to a client."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SilentServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
