"""A broker as clients are told of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BrokerAddress", "BrokerState"]


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where clients connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """One broker as this process knows it; `shard` is None of a service that is alone."""

    shard: str | None
    node_id: int
    address: BrokerAddress
