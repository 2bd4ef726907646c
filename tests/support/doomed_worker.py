"""A tiering worker that kills itself -9 after a given step of its first round. Run as a program:

python -m tests.support.doomed_worker ENDPOINT STEP
"""

from __future__ import annotations

import os
import signal
import sys


def main(endpoint: str, deadly_step: str) -> None:
    from streamhouse.client import StorageClient
    from streamhouse.lake.lake_tables import IcebergLake
    from streamhouse.tiering.worker._service import TieringService
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    def die(step: str) -> None:
        if step == deadly_step:
            os.kill(os.getpid(), signal.SIGKILL)

    with StorageClient(endpoint) as client:
        TieringService(
            client=client,
            lake=IcebergLake(client.lake_catalog()),
            runner=ThreadRunner(2),
            checkpoint=die,
        ).run_once()


if __name__ == "__main__":
    main(*sys.argv[1:])
