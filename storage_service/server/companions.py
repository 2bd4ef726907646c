"""Tables of rejected rows, each beside its table: found, or made where its table is."""

from __future__ import annotations

import contextlib

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import TableExistsError, TableNotFoundError
from streamhouse.storage_service.model.rejected.companion import (
    check_companion,
    companion_descriptor,
)
from streamhouse.storage_service.server.service import Service

__all__ = ["kept_companion"]


async def kept_companion(service: Service, path: str) -> OpenTable:
    """Return the table of a table's rejected rows; it is made where the table is."""
    descriptor = companion_descriptor(service.table(path).info)
    try:
        found = service.readable(str(descriptor.path))
    except TableNotFoundError:
        if service.shards is not None:
            await service.shards.claim(descriptor.path)
        with contextlib.suppress(TableExistsError):
            await service.manager.create_table(descriptor)
        found = service.readable(str(descriptor.path))
    check_companion(found.info)
    return found
