"""A tiering worker that works for ever, or is killed or stopped at a step. Run as a program:

python -m tests.torture.tiering_worker ENDPOINT STEP COUNT [SIGNAL]

SIGNAL is what it sends itself: SIGKILL, or SIGSTOP, from which somebody wakes it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys


def main(endpoint: str, deadly_step: str, count: str, sent: str = "SIGKILL") -> None:
    from streamhouse.client import StorageClient
    from streamhouse.lake.lake_tables import IcebergLake
    from streamhouse.tiering.worker._service import TieringService
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    reached = itertools.count(1)

    def die(step: str) -> None:
        if step == deadly_step and next(reached) == int(count):
            os.kill(os.getpid(), signal.Signals[sent])

    with StorageClient(endpoint, timeout_s=120) as client:
        TieringService(
            client=client,
            lake=IcebergLake(client.lake_catalog()),
            runner=ThreadRunner(1),
            checkpoint=die,
        ).run_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
