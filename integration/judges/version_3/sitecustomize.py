"""Makes 3 the default format version of lake tables, in each Python with this folder on its path.

A test's own processes get it as the test does: PYTHONPATH is inherited.
"""

from __future__ import annotations

from typing import Final

from streamhouse.core.model import properties

_PROPERTY: Final = "table.datalake.format-version"

_attribute, _, _parse, _help = properties._PROPERTIES[_PROPERTY]
properties._PROPERTIES[_PROPERTY] = (_attribute, "3", _parse, _help)
