"""Format version 3 of Iceberg, for catalogs that apply updates and write metadata themselves.

pyiceberg reads tables of version 3, commits to tables of version 3, and neither creates such tables
nor writes their metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.io import OutputFile
from pyiceberg.serializers import Compressor, ToOutputFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, TableMetadataV3
from pyiceberg.table.update import (
    TableUpdate,
    UpgradeFormatVersionUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
)
from pyiceberg.typedef import IcebergBaseModel

from streamhouse.core.model.lake.facts import VERSION_3

__all__ = ["applicable", "metadata_text", "write_metadata"]


def applicable(updates: Sequence[TableUpdate]) -> tuple[TableUpdate, ...]:
    """Return the updates as pyiceberg can apply them, an upgrade to version 3 included."""
    return tuple(
        _UpgradeToVersion3.model_validate({"format-version": VERSION_3})
        if isinstance(update, UpgradeFormatVersionUpdate) and update.format_version == VERSION_3
        else update
        for update in updates
    )


def metadata_text(metadata: TableMetadata) -> str:
    """Return the metadata as JSON."""
    if isinstance(metadata, TableMetadataV3) and metadata.next_row_id is None:
        # pyiceberg's own new tables, whose readers need it.
        metadata = metadata.model_copy(update={"next_row_id": 0})
    # The model of version 3 refuses to be written; the one below it does not.
    return IcebergBaseModel.model_dump_json(metadata)


def write_metadata(metadata: TableMetadata, output: OutputFile) -> None:
    """Write a metadata file of any version."""
    if metadata.format_version < VERSION_3:
        ToOutputFile.table_metadata(metadata, output)
        return
    compressed = Compressor.get_compressor(output.location).bytes_compressor()
    with output.create() as stream:
        stream.write(compressed(metadata_text(metadata).encode()))


class _UpgradeToVersion3(UpgradeFormatVersionUpdate):
    """An upgrade that pyiceberg applies by the function below, and not by its own."""


@_apply_table_update.register(_UpgradeToVersion3)
def _(
    update: _UpgradeToVersion3, base: TableMetadata, context: _TableMetadataUpdateContext
) -> TableMetadata:
    if base.format_version == VERSION_3:
        return base
    context.add_update(update)
    upgraded = TableMetadataUtil._construct_without_validation(
        base.model_copy(update={"format_version": VERSION_3})
    )
    return upgraded.model_copy(update={"next_row_id": 0})
