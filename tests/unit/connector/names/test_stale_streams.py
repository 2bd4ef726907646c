"""Which attached names a stream's plan reads once and for all."""

from __future__ import annotations

import pytest

from streamhouse.connector.names._stale_streams import stale_relations

RELATION = "RelationV2[id#3L, region#4] spark_catalog.default.Users"
STREAM = "~StreamingRelationV2 org.apache.spark.X@1, streamhouse, [path=a.b], [id#0L], name=<U>"


def _joined(*right: str) -> str:
    tree = [f"   {'   ' * depth}+- {node}" for depth, node in enumerate(right)]
    return "\n".join(["~Project [id#0L]", "+- ~Join Cross", f"   :- {STREAM}", *tree])


@pytest.mark.parametrize(
    ("right", "stale"),
    [
        ((RELATION,), ["default.users"]),
        (("Aggregate [max(id#3L) AS m#5L]", "Project [id#3L]", RELATION), ["default.users"]),
        (("Filter isnotnull((id#3L + 1))", RELATION), ["default.users"]),
        (("Filter isnotnull(id#3L)", RELATION), []),
        (("Project [region#4]", "Filter (isnotnull(id#3L) AND (id#3L > 0))", RELATION), []),
        (("RelationV2[id#3L] spark_catalog.default.others",), []),
        (("LocalRelation [id#3L]",), []),
    ],
)
def test_a_relation_without_a_filter_is_stale(right: tuple[str, ...], stale: list[str]) -> None:
    assert stale_relations(_joined(*right), {"default.users"}) == stale
