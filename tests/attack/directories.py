"""Damages one file or folder of a data directory at a time, and judges every table after it."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from streamhouse.api.client import StreamhouseClient
from streamhouse.lake import opened_table
from tests.attack.judge import Verdict, Violation, judge_old_table, judge_table
from tests.attack.mutations import Damage, damage_directory
from tests.attack.world import SERVICE_OPTIONS, AttackedTable, World
from tests.support.command_line import streamhouse
from tests.support.service_process import DiedAtStart, ServiceProcess

__all__ = ["DirectoryReport", "attack_directory"]

# Without these nothing can be served, and a start may be refused.
_NEEDED_BY_ALL: Final = ("service.json",)
_SOUND, _DAMAGED, _NOT_CHECKED = 0, 1, 2


@dataclass
class DirectoryReport:
    """What became of the damages: kind of file, then what was found."""

    cases: int = 0
    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    not_started: Counter[str] = field(default_factory=Counter)
    answers: int = 0

    def lines(self) -> list[str]:
        """Return the report for people, a line a kind of file."""
        kinds = sorted({*self.right, *self.refused, *self.not_started})
        return [
            f"  {kind}: {self.right[kind]} right, {self.refused[kind]} refused,"
            f" {self.not_started[kind]} not started"
            for kind in kinds
        ]


def attack_directory(
    world: World, chance: random.Random, report: DirectoryReport, kinds: set[str] | None = None
) -> None:
    """Put the directory back, damage it, judge it. Raises `Violation`, naming the damage."""
    world.put_back()
    opened_table._catalogs.clear()
    damage = damage_directory(world, chance, kinds=kinds)
    try:
        _judge_damaged(world, chance, damage, report)
    except Violation as violation:
        raise Violation(f"after {damage}: {violation}") from violation
    report.cases += 1


def _judge_damaged(
    world: World, chance: random.Random, damage: Damage, report: DirectoryReport
) -> None:
    tables = copy.deepcopy(dict(world.tables))
    old = _touched(world, damage) if damage.is_old_table else set()
    checked = streamhouse("check", "--data-dir", world.data, "--lake-rows", expect=None)
    if checked.returncode not in (_SOUND, _DAMAGED, _NOT_CHECKED) or _is_traceback(checked.stderr):
        raise Violation(f"check ended with {checked.returncode}: {checked.stderr[-2_000:]}")
    is_written = chance.random() < 0.7
    try:
        verdicts, has_logged = _judge_service(world, tables, old, is_written=is_written)
    except DiedAtStart as refusal:
        text = str(refusal)
        if _is_traceback(text) or "streamhouse: " not in text:
            raise Violation(f"the service did not say why it does not start: {text}") from refusal
        if damage.kind not in _NEEDED_BY_ALL:
            raise Violation(f"one damage stops all tables: {text}") from refusal
        report.not_started[damage.kind] += 1
        return
    if _is_traceback(has_logged):
        raise Violation(f"the service logged a traceback: {has_logged[-3_000:]}")
    refused = {verdict.path: verdict.refusals for verdict in verdicts if verdict.refusals}
    report.answers += sum(verdict.answers for verdict in verdicts)
    for path in refused.keys() - _touched(world, damage):
        step, error = refused[path][0]
        raise Violation(f"{path}, which is not damaged: {step}: {error}")
    if refused and checked.returncode == _SOUND:
        path, ((step, error), *_) = next(iter(refused.items()))
        raise Violation(f"check calls it sound, but {path}: {step}: {error}")
    (report.refused if refused else report.right)[damage.kind] += 1


def _judge_service(
    world: World, tables: dict[str, AttackedTable], old: set[str], *, is_written: bool
) -> tuple[list[Verdict], str]:
    with ServiceProcess(world.data, *SERVICE_OPTIONS) as service:
        with StreamhouseClient(service.endpoint) as client:
            verdicts = [
                judge_old_table(client, table)
                if path in old
                else judge_table(client, table, is_written=is_written)
                for path, table in tables.items()
            ]
            client.status()
        logged = service.log_text()
        service.kill()
    if is_written:
        # What was acknowledged after the damage is there after a crash, too.
        with (
            ServiceProcess(world.data, *SERVICE_OPTIONS) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            verdicts += [
                judge_old_table(client, table)
                if path in old
                else judge_table(client, table, is_written=False)
                for path, table in tables.items()
            ]
            logged += service.log_text()
    return verdicts, logged


def _touched(world: World, damage: Damage) -> set[str]:
    """Return the tables that may refuse calls after a damage."""
    with_lake = {path for path, table in world.tables.items() if table.has_lake}
    if damage.kind.startswith("lake ") or damage.kind in _NEEDED_BY_ALL:
        return with_lake
    paths = list(world.tables)
    return {paths[int(one) - 1] for one in re.findall(r"tables/(\d+)", damage.where)}


def _is_traceback(text: str) -> bool:
    return "Traceback (most recent call last)" in text
