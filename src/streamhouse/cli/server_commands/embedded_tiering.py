"""A tiering worker inside the process of a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamhouse.core.model.table_state import EMBEDDED_WORKER_ID

if TYPE_CHECKING:
    from streamhouse.storage_service.config import ServiceConfig

__all__ = ["start_tiering"]


def start_tiering(endpoint: str, config: ServiceConfig) -> Callable[[], None]:
    """Start a worker for the service at `endpoint`; return the function that stops the worker."""
    from streamhouse.client.http.own_certificate import OWN_CERTIFICATE  # noqa: PLC0415 - a wrong option fails before the service loads
    from streamhouse.tiering.worker.embedded import EmbeddedTieringWorker  # noqa: PLC0415 - a wrong option fails before the service loads

    if config.tls_certificate_file is not None:
        # The certificate need not name the address that this process uses for itself.
        endpoint += f"#sha256={OWN_CERTIFICATE}"
    worker = EmbeddedTieringWorker(
        endpoint=endpoint, token=config.token, worker_id=EMBEDDED_WORKER_ID
    )
    worker.start()
    return worker.stop
