"""A real process on a real disk, killed in the middle of appending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from tests.support.log_world import open_log, read_all

_OPTIONS = {"segment_bytes_max": 60_000, "index_interval_bytes": 1000}

# Appends for ever; says "<batches>\n" once they are durable.
_WRITER = """
import sys
from pathlib import Path
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from tests.support.log_world import open_log

log = open_log(LocalFilesystem(), directory=Path(sys.argv[1]), **{options})
number = log.high_watermark
while True:
    group = [b"%d;" % (number + n) * (1 + (number + n) % 300) for n in range(1 + number % 7)]
    for payload in group:
        number += 1
        log.append(RoutedBatch(0, 1, payload, 1, writer_id=3, sequence=number))
    log.flush()
    print(number, flush=True)
"""


@pytest.mark.slow
def test_acknowledged_batches_survive_kill_9_again_and_again(tmp_path: Path) -> None:
    """Kill after so many acknowledgements, five times over; each life goes on after the last."""
    directory = tmp_path / "bucket-0"
    acknowledged = 0
    for life in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER.format(options=_OPTIONS), str(directory)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process:
            assert process.stdout is not None
            for _ in range(20 + 37 * life):
                acknowledged = int(process.stdout.readline())
            process.kill()
            # What it managed to say before it died was acknowledged too.
            said = [line for line in process.stdout.readlines() if line.endswith("\n")]
            acknowledged = int(said[-1]) if said else acknowledged

        log = open_log(LocalFilesystem(), directory=directory, **_OPTIONS)
        stored = read_all(log)
        again = log.append(
            RoutedBatch(0, 1, stored[-1].payload, 1, writer_id=3, sequence=len(stored))
        )
        log.close()

        assert len(stored) >= acknowledged
        for number, batch in enumerate(stored):
            assert batch.base_offset == number
            assert batch.payload == b"%d;" % number * (1 + number % 300)
        assert again.is_duplicate
        assert again.base_offset == len(stored) - 1
