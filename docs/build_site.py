"""Build the documentation site: `make site`.

The site is MkDocs' over the documents of this folder, with an environment of its own. This file
makes what MkDocs reads, and needs nothing but Python:

- the documents, with links that lead out of `docs/` turned into pages of the site;
- the navigation, from the lists of `README.md`, so that a document is listed once; decisions are
  for those who follow a link;
- for each page how much it counts in a search;
- a reference page for each public name, from its docstrings, which are read and not imported.

The site is one folder a version beside `versions.json`, which the version selector reads: build
each version into the same folder. Nothing of the site asks another server for anything.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = [
    "add_version",
    "foreign_assets",
    "navigation",
    "notebook_page",
    "public_names",
    "search_rank",
    "stage",
    "staged_path",
    "tools",
    "with_links_inside",
]

ROOT: Final = Path(__file__).resolve().parents[1]
START: Final = "docs/README.md"
ERRORS: Final = "Errors"
# Classes that programs call; objects of other classes come from calls.
CONSTRUCTED: Final = (
    "AppendWriter",
    "AsyncStreamhouseClient",
    "Producer",
    "StreamhouseClient",
    "Table",
)
# What reads the docstrings; MkDocs looks for it beside its configuration.
CALLS: Final = "awaited_calls.py"
STYLE: Final = "site.css"
# The first document to read, and documents with a part of nearly every subject, which are seldom
# the answer to a question.
RANKS: Final = {
    "getting_started.md": 2.0,
    "README.md": 0.5,
    "architecture.md": 0.4,
    "crash_table.md": 0.4,
    "rooms.md": 0.2,
    "storage_format.md": 0.3,
}
# A section of the start page that the navigation leaves out: its pages are for readers of links.
DECISIONS: Final = "Decisions"
# Public name -> the classes of its results, which have no public name and are on its page.
RESULTS: Final[dict[str, tuple[str, ...]]] = {
    "AsyncStreamhouseClient": (
        "api.async_client.AsyncScan",
        "api.async_client.AsyncSubscription",
        "api.async_client.AsyncTransaction",
    ),
    "StreamhouseClient": (
        "core.model.lake.coverage.LakeDivergence",
        "core.model.lake.facts.LakeCatalog",
        "core.model.offsets.BucketPositions",
        "core.model.table_state.TableSizes",
        "core.model.table_state.TableState",
    ),
    "Table": ("connector.changes._commit.Changes", "connector.changes._merge_clauses.Merge"),
    "TableInfo": ("core.model.properties.TableProperties", "core.model.schema.Schema"),
    "lag": ("reading.follow.stream_lag.StreamLag",),
    "read": ("connector.query.table_read.TableRead",),
}

_FENCE: Final = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_NESTED: Final = re.compile(r"^ {2,3}(?=[-*] |\d+\. )", re.MULTILINE)
_SECTION: Final = re.compile(r"^## (?:For )?(.+)$", re.MULTILINE)
_LISTED: Final = re.compile(r"^- \[(.+?)\]\(([^)#]+)\)", re.MULTILINE)
# What a browser fetches by itself; a link that a reader follows is none.
_ASSET: Final = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"')\s]+)",
    re.IGNORECASE,
)


def tools(root: Path = ROOT) -> list[str]:
    """What the extra `site` asks for."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    return config["options.extras_require"]["site"].split()


def public_names(root: Path = ROOT) -> dict[str, str]:
    """Public name -> what defines it, as `streamhouse` itself says."""
    tree = ast.parse((root / "src/streamhouse/__init__.py").read_text(encoding="utf-8"))
    values, homes = {}, {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            values[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    table, public = values["_HOMES"], values["__all__"]
    assert isinstance(table, ast.Dict), "_HOMES is written out"
    assert public is not None, "__all__ is written out"
    for key, home in zip(table.keys, table.values, strict=True):
        named = values[home.id] if isinstance(home, ast.Name) else home
        assert key is not None, "a name, not another table"
        assert named is not None, "a name without a value"
        homes[ast.literal_eval(key)] = ast.literal_eval(named)
    wanted = [name for name in ast.literal_eval(public) if not name.startswith("__")]
    return {name: _defined(homes[name], name) for name in wanted}


def _defined(home: str, name: str) -> str:
    """Return a name's whole path; a name may also be a module of its own."""
    return home if home.endswith(f".{name}") else f"{home}.{name}"


def version(root: Path = ROOT) -> str:
    text = (root / "src/streamhouse/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__.*"(.+)"', text, re.MULTILINE)
    if found is None:
        raise SystemExit("src/streamhouse/__init__.py has no __version__")
    return found[1]


def staged_path(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    inside = PurePosixPath(path)
    if inside.parts[0] == "docs":
        return str(inside.relative_to("docs"))
    return f"repository/{path}" if inside.suffix == ".md" else f"repository/{path}.md"


def with_links_inside(text: str, path: str, root: Path = ROOT) -> tuple[str, set[str]]:
    """The document at `path` with links between staged files, and the files it links to.

    A folder has no page: a link to one keeps its words. Lists inside lists are indented by four, as
    Python's Markdown wants it.
    """
    linked: set[str] = set()

    def inside(match: re.Match[str]) -> str:
        image, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or ":" in target:
            return match[0]
        name = os.path.normpath(str(PurePosixPath(path).parent / target))
        if (root / name).is_dir():
            return words
        linked.add(name)
        page = staged_path(name)
        return f"{image}[{words}]({os.path.relpath(page, Path(staged_path(path)).parent)}{anchor})"

    parts = _FENCE.split(text)
    for at in range(0, len(parts), 2):  # the odd ones are code
        parts[at] = _NESTED.sub("    ", _LINK.sub(inside, parts[at]))
    return "".join(parts), linked


def notebook_page(text: str) -> str:
    """A notebook as a document: its texts, its code, and what it has shown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            picture = output["data"].get("image/png")
            shown = "".join(output["data"]["text/plain"])
            parts.append(f"```text\n{shown}\n```" if picture is None else _picture(picture))
    return "\n\n".join(parts) + "\n"


def _picture(data: str) -> str:
    return f"![A plot](data:image/png;base64,{data.strip()})"


def navigation(start: str, reference: list[str]) -> list[dict[str, object]]:
    """The lists of the start page, a section each; a document is under the first that names it."""
    nav: list[dict[str, object]] = [{"Start": "README.md"}]
    seen: set[str] = set()
    parts = _SECTION.split(start)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title == DECISIONS:
            continue
        pages = []
        for words, link in _LISTED.findall(body):
            page = staged_path(os.path.normpath(f"docs/{link}"))
            if page not in seen:
                pages.append({words.replace("`", ""): page})
                seen.add(page)
        if pages:
            nav.append({title[:1].upper() + title[1:]: pages})
    nav.append({"Python reference": [{n: f"reference/{n}.md"} for n in reference]})
    return nav


def search_rank(page: str) -> float:
    """How much a page counts in a search, where a document for users counts 1; 0: not at all."""
    folder, _, name = page.rpartition("/")
    if folder == "decisions":
        return 0.02
    if folder == "reference":
        return 0.1 if name == f"{ERRORS}.md" else 0.2
    if folder.startswith("repository"):
        return 0.05 if name in {"CHANGELOG.md", "CONTRIBUTING.md", "RESULTS.md"} else 0
    return RANKS.get(name, 1.0)


def _write_page(pages: Path, page: str, text: str) -> None:
    """Write a page with what MkDocs does with it: its place in a search, and the start's width."""
    rank = search_rank(page)
    meta = {"search": {"boost": rank} if rank else {"exclude": True}}
    meta |= {"hide": ["navigation"]} if page == staged_path(START) else {}
    # JSON is YAML.
    _write(pages / page, f"---\n{json.dumps(meta)}\n---\n{text}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _reference(home: str, **options: object) -> str:
    """Return what mkdocstrings replaces by the documentation of `home`."""
    lines = "".join(f"      {name}: {json.dumps(value)}\n" for name, value in options.items())
    return f"::: {home}\n    options:\n{lines}\n"


def stage(work: Path, root: Path = ROOT) -> None:
    """Write MkDocs' configuration and sources into `work`, from nothing."""
    shutil.rmtree(work, ignore_errors=True)
    pages = work / "docs"
    shutil.copytree(root / "docs/images", pages / "images")
    shutil.copy(root / "docs" / STYLE, pages)
    # A copy has no links: what reads the docstrings does not follow them.
    shutil.copytree(
        root / "src/streamhouse",
        work / "package/streamhouse",
        ignore=shutil.ignore_patterns("__pycache__", "*.js", "*.css", "*.html"),
    )
    waiting = {f"docs/{p.relative_to(root / 'docs')}" for p in (root / "docs").rglob("*.md")}
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        if path.startswith("docs/images/"):
            continue
        text = (root / path).read_text(encoding="utf-8")
        if path.endswith((".md", ".ipynb")):
            text = notebook_page(text) if path.endswith(".ipynb") else text
            text, linked = with_links_inside(text, path, root)
            waiting |= linked - done
        else:
            suffix = PurePosixPath(path).suffix.removeprefix(".") or "text"
            text = f"# {PurePosixPath(path).name}\n\n````{suffix}\n{text}\n````\n"
        _write_page(pages, staged_path(path), text)
    names = public_names(root)
    errors = {name: home for name, home in names.items() if name.endswith("Error")}
    alone = {name: home for name, home in names.items() if name not in errors}
    for name, home in alone.items():
        shown = _reference(home, heading_level=1, merge_init_into_class=name in CONSTRUCTED)
        results = (f"streamhouse.{result}" for result in RESULTS.get(name, ()))
        shown += "".join(_reference(result, merge_init_into_class=False) for result in results)
        _write_page(pages, f"reference/{name}.md", shown)
    shutil.copy(root / "docs" / CALLS, work)
    parts = "".join(_reference(home, members=False, show_bases=True) for home in errors.values())
    _write_page(pages, f"reference/{ERRORS}.md", f"# {ERRORS}\n\n{parts}")
    nav = navigation((root / START).read_text(encoding="utf-8"), [*alone, ERRORS])
    nav_text = json.dumps({"INHERIT": str(root / "mkdocs.yml"), "docs_dir": "docs", "nav": nav})
    _write(work / "mkdocs.yml", nav_text)


def foreign_assets(site: Path) -> list[str]:
    """What pages and styles of a built site fetch from elsewhere: file and address."""
    return [
        f"{file.relative_to(site)}: {next(filter(None, found.groups()))}"
        for file in sorted(site.rglob("*"))
        if file.suffix in {".html", ".css"}
        for found in _ASSET.finditer(file.read_text(encoding="utf-8"))
    ]


def _order(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def add_version(out: Path) -> None:
    """Write the list of versions that lie in `out`, newest first, and the way to the newest."""
    found = sorted((p.parent.name for p in out.glob("*/index.html")), key=_order, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in found]
    _write(out / "versions.json", json.dumps(listed, indent=2) + "\n")
    away = f'<!doctype html><meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n'
    _write(out / "index.html", away)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts/site")
    parser.add_argument("--tools", action="store_true", help="print what to install, and end")
    arguments = parser.parse_args()
    if arguments.tools:
        sys.stdout.write("\n".join(tools()) + "\n")
        return
    work, site = ROOT / ".cache/site/work", arguments.out.resolve() / version()
    stage(work)
    command = [sys.executable, "-m", "mkdocs", "build", "--clean", "--strict", "--quiet"]
    command += ["--config-file", str(work / "mkdocs.yml"), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if code := subprocess.run(command, check=False, env=environment).returncode:
        raise SystemExit(code)
    if foreign := foreign_assets(site):
        raise SystemExit("the site asks other servers for:\n" + "\n".join(foreign))
    add_version(site.parent)
    sys.stdout.write(f"{site.parent}: python -m http.server --directory {site.parent}\n")


if __name__ == "__main__":
    main()
