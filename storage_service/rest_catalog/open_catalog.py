"""The configured pyiceberg catalog, opened when it is first asked for."""

from __future__ import annotations

import threading
from typing import Final

from pyiceberg.catalog import Catalog

from streamhouse.storage_service.model.lake import LakeCatalog
from streamhouse.storage_service.rest_catalog.catalog_errors import catalog_errors
from streamhouse.storage_service.rest_catalog.lake_sql_catalog import open_catalog

__all__ = ["VIA_HEADER", "OpenCatalog"]

VIA_HEADER: Final = "x-streamhouse-via"
"""What a catalog behind this one is told: a service that meets its own id would ask itself."""


class OpenCatalog:
    """Opens the catalog once; a failed attempt is made anew at the next call. Thread-safe."""

    def __init__(self, described: LakeCatalog, *, service_id: str) -> None:
        self._described = described
        self._service_id = service_id
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None

    def get(self) -> Catalog:
        """Return the catalog; raises `UnavailableError` if it cannot be opened."""
        with self._lock:
            if self._catalog is None:
                properties = dict(self._described.properties)
                if properties.get("type") == "rest":
                    properties[f"header.{VIA_HEADER}"] = self._service_id
                with catalog_errors(f"open catalog '{self._described.name}'"):
                    described = LakeCatalog(name=self._described.name, properties=properties)
                    self._catalog = open_catalog(described)
            return self._catalog

    def close(self) -> None:
        """Close the catalog's connections."""
        with self._lock:
            catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()
