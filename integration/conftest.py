"""What several files that ask Spark need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import streamhouse
from integration.spark_world import spark_session


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session of the file's own that knows the data source."""
    with spark_session() as session:
        streamhouse.register(session)
        yield session
