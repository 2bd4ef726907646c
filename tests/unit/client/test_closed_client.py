"""A closed client refuses what is asked of it, without asking the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from streamhouse import InvalidRequestError, StreamhouseClient

Call = Callable[[StreamhouseClient], object]

CALLS: Final[dict[str, Call]] = {
    "append": lambda client: client.append("events", {"id": 2}),
    "create_table": lambda client: client.create_table("t", "id INT", if_not_exists=True),
    "drop_table": lambda client: client.drop_table("events", if_exists=True),
    "read": lambda client: client.read("events"),
    "scan": lambda client: client.scan("events"),
    "count": lambda client: client.count("events"),
    "lookup_one": lambda client: client.lookup_one("events", id=1),
    "subscribe": lambda client: client.subscribe("events"),
    "begin_transaction": lambda client: client.begin_transaction("events"),
    "with": lambda client: client.__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_client_refuses_every_call_in_one_sentence(call: Call) -> None:
    client = StreamhouseClient("http://127.0.0.1:9")
    client.close()
    client.close()

    with pytest.raises(InvalidRequestError, match=r"the client of http.* is closed; make another"):
        call(client)
