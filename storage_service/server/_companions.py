"""Tables of rejected rows, opened or created in the shard of their table."""

from __future__ import annotations

import contextlib

from streamhouse.core.errors import (
    TableExistsError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.rows.companion import (
    check_companion,
    companion_descriptor,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.other_shards import Shards

__all__ = ["ensure_companion"]


async def ensure_companion(service: Service, path: str) -> OpenTable:
    """Return the table of a table's rejected rows, created in the same shard if missing."""
    descriptor = companion_descriptor(service.table(path).info)
    try:
        # Not `readable`: a table that leaves this shard can be read, and takes no rows.
        companion = service.table(str(descriptor.path))
    except TableNotFoundError:
        if service.shards is not None:
            await _check_nowhere_else(service.shards, path, descriptor.path)
            await service.shards.claim(descriptor.path)
        with contextlib.suppress(TableExistsError):
            await service.manager.create_table(descriptor)
        companion = service.table(str(descriptor.path))
    check_companion(companion.info)
    return companion


async def _check_nowhere_else(shards: Shards, path: str, companion: TablePath) -> None:
    """Raise `UnavailableError` if another shard has the rejected rows, as during a move."""
    elsewhere = await shards.elsewhere(companion)
    if elsewhere is not None:
        raise UnavailableError(
            f"{elsewhere.message}, and rejected rows are kept in the shard of their table: try"
            f" again, or bring them with 'streamhouse shards move {path} --to' that shard, or"
            f" '{companion}' to shard '{shards.own}'"
        )
