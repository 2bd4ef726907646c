"""The repository's Python files, parsed once for the tests of this folder."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

__all__ = ["LIBRARY_FOLDERS", "ROOT", "SourceFile", "library_files", "source_files"]

ROOT: Final = Path(__file__).resolve().parents[2]
LIBRARY_FOLDERS: Final = ("connector", "storage_service", "tiering", "src")
_OTHER_FOLDERS: Final = ("tests", "integration", "examples", "benchmarks")


@dataclass(frozen=True)
class SourceFile:
    """One Python file, by its path from the repository's root."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """The dotted name it is imported by; of a package, the package's."""
        parts = self.path.with_suffix("").parts
        parts = parts[1:] if parts[0] == "src" else ("streamhouse", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> frozenset[str]:
        """Every module or member that an import statement names, anywhere in the file."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        return frozenset(names)


@cache
def source_files() -> tuple[SourceFile, ...]:
    """Every Python file of the repository, each once: the links of src/ are not followed."""
    return tuple(
        SourceFile(path.relative_to(ROOT))
        for folder in (*LIBRARY_FOLDERS, *_OTHER_FOLDERS)
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    )


def library_files() -> tuple[SourceFile, ...]:
    """The files that users install."""
    return tuple(file for file in source_files() if file.path.parts[0] in LIBRARY_FOLDERS)
