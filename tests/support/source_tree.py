"""The source files of `rlhf_core`, `rlhf_cli` and `flows`: modules, imports between them, import cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGES = ("rlhf_core", "flows", "rlhf_cli")


@dataclass(frozen=True)
class Import:
    """One import of another module of the tree."""

    target: str
    """Full name of the imported module."""
    line: int
    at_import: bool
    """True if it runs when the file is imported. False inside functions and `if TYPE_CHECKING`."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Full name, for example `rlhf_core.ppo.fleet.fleet`. A package has the name of its folder."""
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """`rlhf_core.ppo` for `rlhf_core.ppo.fleet.fleet`, and for that package itself."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module in `from ... import`, also for a relative import."""
        if not node.level:
            return node.module or ""
        parents = self.package.split(".")
        base = parents[: len(parents) - node.level + 1]
        if node.module:
            base.append(node.module)
        return ".".join(base)


class SourceTree:
    """All modules below a repository's root.

    Args:
        root: Folder that contains the packages.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                parts = list(path.relative_to(root).with_suffix("").parts)
                if parts[-1] == "__init__":
                    parts.pop()
                module = Module(".".join(parts), path)
                self.modules[module.name] = module

    def imports(self, module: Module) -> list[Import]:
        """Return the imports of modules of this tree, without those of a parent package that Python adds."""
        found: list[Import] = []
        self._collect_imports(module, module.tree, True, found)
        return found

    def _collect_imports(self, module: Module, node: ast.AST, at_import: bool, found: list[Import]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = module.absolute(child)
                targets = []
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    # `from rlhf_core import errors` imports a module, `from rlhf_core.errors import X` a
                    # name.
                    targets.append(full if full in self.modules else base)
            else:
                runs_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                    runs_later = True
                self._collect_imports(module, child, at_import and not runs_later, found)
                continue
            for target in targets:
                if target in self.modules and target != module.name:
                    found.append(Import(target, child.lineno, at_import))

    def import_graph(self, *, only_at_import: bool) -> dict[str, set[str]]:
        """Return the modules that each module imports.

        Args:
            only_at_import: Leave out imports inside functions and `if TYPE_CHECKING`.
        """
        graph: dict[str, set[str]] = {}
        for module in self.modules.values():
            targets = set()
            for entry in self.imports(module):
                if entry.at_import or not only_at_import:
                    targets.add(entry.target)
            graph[module.name] = targets
        return graph


@cache
def product() -> SourceTree:
    """Return the sources of this repository, which the tests of a process read once."""
    return SourceTree(Path(__file__).resolve().parents[2])


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    A group is a strongly connected component with at least two modules.
    """
    reachable = {start: _reachable(graph, start) for start in graph}
    groups = []
    grouped: set[str] = set()
    for start in sorted(graph):
        if start in grouped or start not in reachable[start]:
            continue
        group = [other for other in sorted(reachable[start]) if start in reachable[other]]
        grouped.update(group)
        groups.append(group)
    return groups


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return all modules that `start` imports directly or indirectly.

    It contains `start` if there is a cycle.
    """
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen
