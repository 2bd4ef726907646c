"""The report of a round has one JSON form, which workers and services of other releases read."""

from __future__ import annotations

import json
from dataclasses import replace

from streamhouse.core.model.lake.facts import LakeDebt, SideLakeState
from streamhouse.core.model.table_state import TieringReport

WHOLE = TieringReport(
    table_id=7,
    epoch=3,
    snapshot_id=2**60 + 1,
    table_uuid="u",
    tiered_offsets={0: 10, 1: 20},
    changelog=SideLakeState(snapshot_id=2**61 + 1, table_uuid="c", tiered_offsets={0: 10, 1: 21}),
    batch=SideLakeState(
        snapshot_id=5, table_uuid="b", tiered_offsets={0: 9, 1: 0}, truncated_offsets={0: 4}
    ),
    truncated_offsets={0: 4},
    expired_offsets={1: 2},
    expired_at_us=5,
    fingerprints={0: "0123456789abcdef"},
    debt=LakeDebt(data_files=4, delete_files=1, snapshots=9, maintenance_error="slow"),
    keep_lease=True,
    maintenance_due_us=123,
)


def test_a_report_is_read_as_it_was_written() -> None:
    assert TieringReport.from_json(json.loads(json.dumps(WHOLE.to_json()))) == WHOLE


def test_the_names_on_the_wire_stay() -> None:
    told = WHOLE.to_json()

    assert (told["lake_snapshot_id"], told["lake_table_uuid"]) == (str(2**60 + 1), "u")
    assert set(told) == {
        *("table_id", "epoch", "lake_snapshot_id", "lake_table_uuid", "tiered_offsets"),
        *("changelog", "batch", "keep_lease", "debt", "truncated_offsets", "maintenance_due_us"),
        *("expired_offsets", "expired_at_us", "fingerprints"),
    }


def test_what_a_report_does_not_say_is_as_before() -> None:
    before = LakeDebt(
        data_files=9,
        delete_files=1,
        snapshots=9,
        round_files=7,
        round_rows=70,
        maintained_at_us=5,
    )
    after_maintenance = LakeDebt(data_files=2, delete_files=0, snapshots=3)
    assert after_maintenance.completed_by(before) == replace(
        after_maintenance, round_files=7, round_rows=70, maintained_at_us=5
    )
    after_round = replace(after_maintenance, round_files=3, round_rows=9, maintained_at_us=8)
    assert after_round.completed_by(before) == after_round
    assert after_round.completed_by(None) == after_round


def test_what_an_earlier_worker_does_not_say_is_unknown() -> None:
    told = {
        "table_id": 7,
        "epoch": 3,
        "lake_snapshot_id": "11",
        "lake_table_uuid": "u",
        "tiered_offsets": {"0": 10},
    }

    assert TieringReport.from_json(told) == TieringReport(
        table_id=7, epoch=3, snapshot_id=11, table_uuid="u", tiered_offsets={0: 10}
    )
