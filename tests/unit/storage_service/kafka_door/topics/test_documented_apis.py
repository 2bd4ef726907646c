"""docs/kafka_limits.md lists the answered APIs, and lists no answered API as not offered."""

from __future__ import annotations

import re
from pathlib import Path

from streamhouse.storage_service.kafka_door._apis import APIS

_DOCUMENT = Path(__file__).resolve().parents[5] / "docs" / "kafka_limits.md"
_VERSIONS = re.compile(r"(\d+)(?: to (\d+))?")


def _section(title: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    text = _DOCUMENT.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows[1:] if not row[0].startswith("---")]


def _documented() -> dict[str, tuple[int, int]]:
    found = {}
    for names, said in _section("Which APIs"):
        versions = said.split("; ")
        for number, name in enumerate(names.split(", ")):
            # What else is said of an API is behind its versions.
            match = _VERSIONS.match(versions[number])
            assert match is not None, (name, said)
            found[name] = int(match[1]), int(match[2] or match[1])
    return found


def _name(of: str) -> str:
    return "".join(word.capitalize() for word in of.split("_"))


def test_every_api_is_documented_with_its_versions() -> None:
    assert _documented() == {_name(api.name): api.versions for api in APIS.values()}


def test_nothing_that_is_offered_is_said_not_to_be() -> None:
    offered = {_name(api.name) for api in APIS.values()} - {"CreatePartitions", "Fetch"}
    named = {word for row in _section("What is not offered") for word in re.findall(r"\w+", row[0])}
    assert {"DeleteRecords", "DescribeTopicPartitions"} <= named
    assert not offered & named
