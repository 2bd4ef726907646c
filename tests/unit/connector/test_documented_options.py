"""docs/spark.md says what the code does: every option, every part of a table."""

from __future__ import annotations

import re
from pathlib import Path

from streamhouse.reading.options import connection
from streamhouse.reading.options.options import OPTIONS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "spark.md").read_text(encoding="utf-8")


def test_every_option_is_documented_as_it_is() -> None:
    section = TEXT[TEXT.index("## Options") :]

    documented = re.findall(r"^\| `(\S+)` \| `?(.*?)`? \| ([a-z, ]+) \| (.*) \|$", section, re.M)

    assert documented == [
        (option.key, option.default, ", ".join(option.uses), option.meaning) for option in OPTIONS
    ]


def test_every_part_of_a_table_is_documented() -> None:
    documented = set(re.findall(r"db\.table\$(\w+)", TEXT))

    own = {connection.LAKE, connection.LOG, connection.CHANGELOG, connection.ICEBERG}
    own |= {connection.REJECTED, connection.CHANGES}
    assert documented == {*connection.METADATA_PARTS, *own}
