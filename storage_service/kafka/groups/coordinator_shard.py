"""The shard that coordinates a consumer group, the same on every shard."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

__all__ = ["coordinator_of"]


def coordinator_of(group_id: str, shards: Collection[str]) -> str:
    """Return the coordinating shard of a group among `shards`, of which at least one is given.

    Each shard has a rank for each group, and the highest rank coordinates (rendezvous hashing). A
    new shard takes groups evenly from all shards, and the groups of a removed shard are spread
    evenly.
    """

    def rank(shard: str) -> tuple[bytes, str]:
        # A NUL is in no shard's name, so that no two pairs have the same text.
        return hashlib.blake2b(f"{shard}\0{group_id}".encode(), digest_size=8).digest(), shard

    return max(shards, key=rank)
