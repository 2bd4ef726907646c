"""This process as a Kafka broker, with an address and a node id."""

from __future__ import annotations

from typing import Any

from streamhouse.storage_service.kafka.topics import node_id_of
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress, BrokerState
from streamhouse.storage_service.kafka_door.broker._group_desk import GroupDesk
from streamhouse.storage_service.kafka_door.broker._other_brokers import OtherBrokers
from streamhouse.storage_service.kafka_door.broker._producers import Producers
from streamhouse.storage_service.kafka_door.broker._together import SharedWork
from streamhouse.storage_service.kafka_door.broker._topic_ids import TopicIds
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status.metrics import RequestCounts

__all__ = ["Broker"]


class Broker:
    """The state shared by all requests."""

    def __init__(self, service: Service, address: BrokerAddress, counts: RequestCounts) -> None:
        self.service = service
        self.counts = counts
        self.producers = Producers()
        shard = None if service.shards is None else service.shards.own
        self.own = BrokerState(shard=shard, node_id=node_id_of(shard), address=address)
        self.cluster_id = service.manager.service_id
        self.decoding: SharedWork[tuple[bytes, int], Any] = SharedWork()
        """Record batches of producers, each with its partition; the key is the table."""
        self.groups = GroupDesk(service)
        self.others = OtherBrokers()
        self.topic_ids = TopicIds(service.manager)

    @property
    def address(self) -> BrokerAddress:
        """The address of this process for clients."""
        return self.own.address

    @property
    def node_id(self) -> int:
        """The node id of this process."""
        return self.own.node_id
