"""Which shard coordinates a consumer group: the same one, whoever is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

__all__ = ["coordinator_of"]


def coordinator_of(group_id: str, shards: Collection[str]) -> str:
    """Return the name of the shard among `shards`, at least one, that coordinates the group.

    Each shard has a rank for each group, and the highest has it (rendezvous hashing): one that
    comes takes groups from all others evenly, one that goes gives each of its own to some other.
    """

    def rank(shard: str) -> tuple[bytes, str]:
        # A NUL is in no shard's name: no two pairs read the same.
        return hashlib.blake2b(f"{shard}\0{group_id}".encode(), digest_size=8).digest(), shard

    return max(shards, key=rank)
