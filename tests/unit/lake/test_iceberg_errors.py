"""Errors of the lake's libraries as sentences for people."""

from __future__ import annotations

import re
import socket
import threading

import pytest
import requests

from streamhouse.lake.iceberg_errors import sentence_of


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_lost_connection_names_the_place_and_the_cause_only(host: str) -> None:
    """The HTTP library's own text is the `repr` of three objects."""
    url = f"http://{host}:{_closed_port()}/v1/config"

    with pytest.raises(requests.ConnectionError) as raised:
        requests.get(url, timeout=5, proxies={"http": ""})

    sentence = sentence_of(raised.value)
    assert re.fullmatch(rf"{re.escape(host)}:\d+: [A-Z][a-z -]+", sentence), sentence


def test_a_connection_that_ends_early_names_its_cause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        closing = threading.Thread(target=lambda: listener.accept()[0].close())
        closing.start()
        with pytest.raises(requests.ConnectionError) as raised:
            requests.get(f"http://{place}/", timeout=5, proxies={"http": ""})
        closing.join()

    sentence = sentence_of(raised.value)
    assert sentence.startswith(f"{place}: ")
    assert not set("('") & set(sentence), sentence
