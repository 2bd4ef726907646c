"""What this package asks of a service beside an application's calls, over the same client."""

from __future__ import annotations

import pytest

from streamhouse import InvalidRequestError, StreamhouseClient
from streamhouse.client import StorageClient


def test_an_applications_client_and_the_packages_view_of_it_are_one_client() -> None:
    client = StreamhouseClient("http://127.0.0.1:9")
    seen = StorageClient.of(client)

    assert seen.endpoint == client.endpoint
    assert seen.transport is StorageClient.of(client).transport
    assert StorageClient.of(seen) is seen

    client.close()
    with pytest.raises(InvalidRequestError, match="is closed"):
        seen.claim_tiering("worker")
