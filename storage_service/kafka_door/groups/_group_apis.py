"""The APIs of consumer groups, with versions and handlers.

The protocol of KIP-848, in which the coordinator assigns partitions, is not offered: clients fall
back to the classic protocol. Offered versions end before topics are named by id.
"""

from __future__ import annotations

from typing import Final

from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door.groups._members import (
    answer_delete_groups,
    answer_describe_groups,
    answer_heartbeat,
    answer_join_group,
    answer_leave_group,
    answer_list_groups,
    answer_sync_group,
    refuse_delete_groups,
    refuse_describe_groups,
    refuse_member,
)
from streamhouse.storage_service.kafka_door.groups._offsets import (
    answer_offset_commit,
    answer_offset_delete,
    answer_offset_fetch,
    refuse_offset_commit,
    refuse_offset_fetch,
)

__all__ = ["GROUP_APIS"]

GROUP_APIS: Final = (
    Api(
        key=8,
        name="offset_commit",
        versions=(2, 8),
        answer=answer_offset_commit,
        refuse=refuse_offset_commit,
    ),
    Api(
        key=9,
        name="offset_fetch",
        versions=(1, 8),
        answer=answer_offset_fetch,
        refuse=refuse_offset_fetch,
        is_read=True,
    ),
    Api(
        key=11,
        name="join_group",
        versions=(0, 9),
        answer=answer_join_group,
        refuse=refuse_member,
        is_read=True,
    ),
    Api(
        key=12,
        name="heartbeat",
        versions=(0, 4),
        answer=answer_heartbeat,
        refuse=refuse_member,
        is_read=True,
    ),
    Api(
        key=13,
        name="leave_group",
        versions=(0, 5),
        answer=answer_leave_group,
        refuse=refuse_member,
    ),
    Api(
        key=14,
        name="sync_group",
        versions=(0, 5),
        answer=answer_sync_group,
        refuse=refuse_member,
        is_read=True,
    ),
    Api(
        key=15,
        name="describe_groups",
        versions=(0, 5),
        answer=answer_describe_groups,
        refuse=refuse_describe_groups,
        is_read=True,
    ),
    Api(
        key=16,
        name="list_groups",
        versions=(0, 5),
        answer=answer_list_groups,
        refuse=refuse_member,
        is_read=True,
    ),
    Api(
        key=42,
        name="delete_groups",
        versions=(0, 2),
        answer=answer_delete_groups,
        refuse=refuse_delete_groups,
        is_read=True,
    ),
    Api(
        key=47,
        name="offset_delete",
        versions=(0, 0),
        answer=answer_offset_delete,
        refuse=refuse_member,
    ),
)
