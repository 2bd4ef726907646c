"""A client of the REST catalog that has a namespace."""

from __future__ import annotations

import pytest
from pyiceberg.catalog.rest import RestCatalog

from tests.support.rest_world import RestWorld


@pytest.fixture
def client(rest: RestWorld) -> RestCatalog:
    opened = rest.client()
    opened.create_namespace("db")
    return opened
