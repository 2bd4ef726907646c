"""The Python of Spark's workers: they must find this package, as the program does.

Spark starts its workers with `python3` of the PATH. For a program that was started as
`.venv/bin/python program.py`, without activation, that is another Python.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["use_own_python"]

_SETTINGS: Final = ("spark.pyspark.python", "spark.pyspark.driver.python")
_VARIABLES: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_SHIPPED: Final = "spark.submit.pyFiles"
_IMPORT: Final = "import streamhouse"
_CHECK_S: Final = 60.0


def use_own_python(spark: SparkSession) -> None:
    """Let the workers of this machine run the program's own Python, unless somebody chose another.

    Workers on other machines stay as they are: nobody here knows their files. The setting holds for
    Python functions that are made from now on.

    Raises:
        InvalidRequestError: the chosen Python of this machine does not find the package.
    """
    if not has_jvm(spark):
        return
    context: Any = spark.sparkContext
    if not context.master.startswith("local") or _is_own(context.pythonExec):
        return
    settings = context.getConf()
    if settings.get(_SHIPPED) or context.listFiles:
        # The package may be among the files that Spark ships.
        return
    is_chosen = any(settings.contains(key) for key in _SETTINGS)
    if not (is_chosen or any(os.environ.get(name) for name in _VARIABLES)):
        context.pythonExec = sys.executable
    elif not _finds_package(context.pythonExec):
        raise InvalidRequestError(
            f"Spark's workers run '{context.pythonExec}' (PYSPARK_PYTHON or spark.pyspark.python),"
            f" which does not find the package streamhouse; this program runs '{sys.executable}':"
            " leave the setting out, or set it to this path before the session starts"
        )


def _is_own(command: str) -> bool:
    # Not the real path: the interpreter of a virtual environment is a link to its base's.
    path = shutil.which(command)
    return path is not None and Path(path).absolute() == Path(sys.executable).absolute()


@functools.cache
def _finds_package(command: str) -> bool:
    try:
        imported = subprocess.run(
            [command, "-c", _IMPORT], capture_output=True, timeout=_CHECK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return imported.returncode == 0
