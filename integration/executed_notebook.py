"""Runs a notebook's cells in order, and saves what they show.

    python -m integration.executed_notebook examples/notebook.ipynb

The cells are plain Python, so no Jupyter is needed: its packages and Matplotlib would make the
environment for development 186 MB larger. A cell with a picture is left as it is where Matplotlib
is not installed.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any, Final

_PICTURE: Final = "image/png"


def execute(path: Path) -> None:
    """Run all code cells in one namespace; raises what a cell raises."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        saved_data = [output.get("data", {}) for output in cell["outputs"]]
        if any(_PICTURE in data for data in saved_data) and not has_matplotlib:
            continue
        result = _run("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = _pictures() or _shown(result, number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run(source: str, names: dict[str, Any]) -> object:
    """Run a cell; return the value of its last line if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    value: object = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return None if source.endswith(";") else value


def _shown(result: object, number: int) -> list[dict[str, Any]]:
    if result is None:
        return []
    data = {"text/plain": repr(result).splitlines(keepends=True)}
    if (html := getattr(result, "_repr_html_", None)) is not None:
        data["text/html"] = html().splitlines(keepends=True)
    output = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
    return [output | {"data": data}]


def _pictures() -> list[dict[str, Any]]:
    """Return the open figures of Matplotlib, and close them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    pyplot = sys.modules["matplotlib.pyplot"]
    outputs = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        figure = pyplot.figure(number)
        figure.savefig(picture, format="png", bbox_inches="tight")
        data = {
            "text/plain": [repr(figure)],
            _PICTURE: base64.b64encode(picture.getvalue()).decode(),
        }
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return outputs


if __name__ == "__main__":
    execute(Path(sys.argv[1]).resolve())
