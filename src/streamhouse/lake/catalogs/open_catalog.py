"""The configured pyiceberg catalog, opened on first use."""

from __future__ import annotations

import threading

from pyiceberg.catalog import Catalog

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import VIA_HEADER, LakeCatalog, is_rest_catalog
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.iceberg_errors import catalog_errors

__all__ = ["OpenCatalog"]


class OpenCatalog:
    """Opens the catalog once; a failed attempt is made anew at the next call. Thread-safe.

    Threads that wait for an attempt fail with the attempt: otherwise a silent catalog would make
    each thread wait for all earlier threads.
    """

    def __init__(
        self, described: LakeCatalog, *, service_id: str, data_directory: str | None = None
    ) -> None:
        self._described = described
        self._service_id = service_id
        self._data_directory = data_directory
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._failures = 0
        self._error: StreamhouseError | None = None

    def get(self) -> Catalog:
        """Return the catalog; raises `UnavailableError` if it cannot be opened."""
        seen = self._failures
        with self._lock:
            if self._catalog is None:
                if self._error is not None and self._failures != seen:
                    raise type(self._error)(self._error.message)
                try:
                    self._catalog = self._opened()
                except StreamhouseError as error:
                    self._failures, self._error = self._failures + 1, error
                    raise
            return self._catalog

    def _opened(self) -> Catalog:
        properties = dict(self._described.properties)
        if is_rest_catalog(properties):
            properties[f"header.{VIA_HEADER}"] = self._service_id
        with catalog_errors(f"open catalog '{self._described.name}'"):
            return open_catalog(
                LakeCatalog(name=self._described.name, properties=properties),
                data_directory=self._data_directory,
            )

    def close(self) -> None:
        """Close the catalog's connections."""
        with self._lock:
            catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()
