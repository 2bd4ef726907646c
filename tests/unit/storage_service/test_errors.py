"""What errors carry from one process to another."""

from __future__ import annotations

import pickle

import pytest

from streamhouse.storage_service.errors import NotOwnerError, error_for_code
from streamhouse.storage_service.server.http.http_exchange import error_to_json


@pytest.mark.parametrize("owner", ["http://b:1", None])
def test_who_the_owner_is_crosses_the_wire_and_processes(owner: str | None) -> None:
    error = NotOwnerError("go elsewhere", owner=owner)

    detail = error_to_json(error, request_id="r1")["error"]
    read = error_for_code(detail["code"], detail["message"], owner=detail["owner"])

    assert detail["retriable"] is True
    for copy in (read, pickle.loads(pickle.dumps(error))):
        assert isinstance(copy, NotOwnerError)
        assert (copy.message, copy.owner) == ("go elsewhere", owner)
