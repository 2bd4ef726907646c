"""Prepares the readers and writers for a version of an API, before the first message.

kio creates a reader on first use, which takes as long as a hundred later requests.
"""

from __future__ import annotations

from typing import Any

from kio.serial import entity_reader, entity_writer

from streamhouse.storage_service.kafka.messages.answers import know_fields
from streamhouse.storage_service.kafka.messages.requests import request_class, response_class
from streamhouse.storage_service.kafka.messages.shapes import know_shape

__all__ = ["prepare"]


def prepare(api_key: int, version: int) -> None:
    """Create the reader and writer for a request and an answer. Any thread; once is enough."""
    request: Any = request_class(api_key, version)
    know_shape(request)
    entity_reader(request)
    answer: Any = response_class(api_key, version)
    know_fields(answer)
    entity_writer(answer)
