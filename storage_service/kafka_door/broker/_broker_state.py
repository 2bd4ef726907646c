"""A broker, as clients see one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BrokerAddress", "BrokerState"]


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """An address that clients connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """One broker, as this process knows it; `shard` is None in a service without shards."""

    shard: str | None
    node_id: int
    address: BrokerAddress
