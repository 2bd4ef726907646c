"""What the REST catalog says about one table: its metadata, and how to read its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import IcebergBaseModel

from streamhouse.storage_service.rest_catalog.rest_request import RestAnswer

__all__ = ["FileAccess", "metadata_answer"]

_SECRETS: Final = ("s3.access-key-id", "s3.secret-access-key", "s3.session-token")
_PUBLIC: Final = (
    "s3.endpoint",
    "s3.region",
    "s3.path-style-access",
    "s3.force-virtual-addressing",
    "client.region",
)


class FileAccess:
    """How clients open the files of tables: the catalog's `s3.*` properties.

    Secrets are among them only for clients that ask for credentials, as the protocol has it.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        found = {}
        for key in (*_PUBLIC, *_SECRETS):
            text = properties.get(key, properties.get(key.replace("s3.", "client.", 1)))
            if text is not None:
                found[key] = text
        if "s3.endpoint" in found:
            # A store with an address of its own rarely has one name a bucket.
            found.setdefault("s3.path-style-access", "true")
        if "s3.region" in found:
            found.setdefault("client.region", found["s3.region"])
        self._found = found

    def config(self, *, with_secrets: bool) -> dict[str, str]:
        """Return the configuration that goes with a table."""
        return {k: v for k, v in self._found.items() if with_secrets or k not in _SECRETS}

    def storage_credentials(self, location: str) -> list[dict[str, Any]]:
        """Return the credentials for the bucket that a table lies in; none for local files."""
        if not any(key in self._found for key in _SECRETS):
            return []
        url = urlsplit(location)
        prefix = f"{url.scheme}://{url.netloc}"
        return [{"prefix": prefix, "config": self.config(with_secrets=True)}]


def metadata_answer(
    metadata_location: str | None,
    metadata: TableMetadata,
    *,
    config: Mapping[str, str] | None = None,
    only_referenced: bool = False,
) -> RestAnswer:
    """Answer a table's metadata; `only_referenced` leaves out snapshots without a branch or tag."""
    # The model of format version 3 refuses to be written; the one below it does not.
    text = IcebergBaseModel.model_dump_json(metadata)
    if only_referenced:
        value = json.loads(text)
        wanted = {reference.snapshot_id for reference in metadata.refs.values()}
        value["snapshots"] = [s for s in value["snapshots"] if s["snapshot-id"] in wanted]
        text = json.dumps(value)
    parts = []
    if metadata_location is not None:
        parts.append(f'"metadata-location":{json.dumps(metadata_location)}')
    parts.append(f'"metadata":{text}')
    if config is not None:
        parts.append(f'"config":{json.dumps(dict(config))}')
    return RestAnswer(200, ("{" + ",".join(parts) + "}").encode())
