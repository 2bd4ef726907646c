"""A normal install holds real files, and Spark finds the format in it without being told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.source_files import library_files

ROOT: Final = Path(__file__).resolve().parents[1]

_DISCOVER: Final = """
import json
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    spark.read.format("streamhouse").option("endpoint", "http://127.0.0.1:9").load("db.t")
    said = "nothing"
except Exception as error:
    said = str(error)
import streamhouse
print(json.dumps([streamhouse.__file__, said]))
spark.stop()
"""


def _run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    # Whoever runs the tests with another tree on the path must not meet it here.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _installed_paths() -> set[str]:
    """Where each library file must be in a wheel."""
    return {
        "/".join(
            file.path.parts[1:]
            if file.path.parts[0] == "src"
            else ("streamhouse", *file.path.parts)
        )
        for file in library_files()
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that both are shown to be whole."""
    dist = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", str(dist), ".")
    (built,) = dist.glob("pyspark_streamhouse-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert sorted(name for name in names if name.endswith(".py")) == sorted(_installed_paths())
    assert "streamhouse/py.typed" in names
    for name in ("docs.html", "docs.js", "swagger-ui.css", "swagger-ui-bundle.js", "LICENSE"):
        assert f"streamhouse/storage_service/server/control/swagger/{name}" in names


@pytest.mark.slow
def test_spark_finds_the_format_after_a_normal_install(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own that borrows only the dependencies of ours."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    site_packages = Path(
        _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    _run(*pip, "--no-deps", "--no-index", str(wheel))
    # A .pth file is not followed from a folder that a .pth file names: our editable install of
    # Streamhouse stays invisible.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = tmp_path / "discover.py"
    program.write_text(_DISCOVER)

    output = _run(str(python), str(program), cwd=tmp_path, PYSPARK_PYTHON=str(python))

    package, said = json.loads(output.splitlines()[-1])
    assert Path(package).is_relative_to(site_packages)
    assert "DATA_SOURCE_NOT_FOUND" not in said
    assert "http://127.0.0.1:9" in said
