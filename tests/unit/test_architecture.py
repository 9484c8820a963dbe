"""The architecture, read from the source.

Rules:
- imports go one way, from `rlhf_cli` down to `rlhf_core.errors` (`LAYERS`), and packages do not import each
  other in a circle; the same holds for the rooms of `rlhf_core.ppo` (`ROOMS`);
- prefect, vllm, deepspeed, ray and mlflow each have their home and are imported nowhere else;
- configuration, types and algorithms start without any of them;
- every shipped configuration loads;
- nothing unpickles by itself: DeepSpeed does, forced to an allow-list;
- no package has more lines of code than its budget, functions stay small, and the library does not print.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rlhf_core.config.load import load_config
from tests.structure import code_lines
from tests.support.source_tree import Module, cycles, product

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    ("rlhf_core.errors", "rlhf_core.pipeline", "rlhf_core.system"),
    ("rlhf_core.config", "rlhf_core.types", "rlhf_core.seeds", "rlhf_core.logs"),
    ("rlhf_core.algo",),
    ("rlhf_core.models", "rlhf_core.data", "rlhf_core.storage"),
    ("rlhf_core.engines", "rlhf_core.planning", "rlhf_core.record", "rlhf_core.rewards"),
    ("rlhf_core.cluster",),
    ("rlhf_core.ppo",),
    ("rlhf_core.evaluation",),
    ("rlhf_core.tracking",),
    ("rlhf_core.stages",),
    ("rlhf_core.executors",),
    ("rlhf_core.preflight",),
    ("rlhf_core.run",),
    ("rlhf_core.ops", "rlhf_core.testing"),
    ("flows",),
    ("rlhf_cli",),
)
"""From the bottom up; an import goes down or stays level."""

ROOMS = ("training", "fleet", "sampling", "watching")
"""The rooms of `rlhf_core.ppo` from the bottom up, below the modules of the package itself."""

HOMES = {
    "prefect": ("flows",),
    "vllm": (
        "rlhf_core.engines.vllm",
        "rlhf_core.engines.sync.receiver",
        "rlhf_core.engines.sync.sender",
    ),
    "deepspeed": ("rlhf_core.engines",),
    "ray": ("rlhf_core.cluster", "rlhf_core.ppo", "rlhf_core.executors.ray_job"),
    "mlflow": ("rlhf_core.tracking", "flows.application"),
}

# A bound against what cannot be read in one go; code is not folded to meet it.
MAX_FUNCTION_LINES = 85


def sources() -> list[Path]:
    return [file for top in ("rlhf_core", "flows", "rlhf_cli") for file in sorted((ROOT / top).rglob("*.py"))]


def sources_and_tests() -> list[Path]:
    return [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    name = module_name(file)
    return product().modules.get(name, Module(name, file)).nodes


@cache
def imports(file: Path) -> list[tuple[str, int]]:
    """(full module name, line) of every import of a file, those inside functions included."""
    return list(_imports(file))


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    here = module_name(file).split(".")
    package = here if file.name == "__init__.py" else here[:-1]
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, node.lineno
            # `from rlhf_core import errors` names a module of its own.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def part_of(module: str) -> str | None:
    """The entry of LAYERS that a module belongs to."""
    for layer in LAYERS:
        for part in layer:
            if module == part or module.startswith(f"{part}."):
                return part
    return None


def height(part: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_there_are_sources_and_every_one_belongs_to_a_layer() -> None:
    files = sources()
    assert len(files) > 20
    strays = [str(file.relative_to(ROOT)) for file in files if part_of(module_name(file)) is None]
    assert strays == ["rlhf_core/__init__.py"]


def test_no_module_imports_from_a_layer_above_its_own() -> None:
    wrong = []
    for file in sources():
        own = part_of(module_name(file))
        for module, line in imports(file):
            other = part_of(module)
            if own and other and height(other) > height(own):
                wrong.append(f"{place(file, line)}: {own} imports {module}")
    assert wrong == []


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for file in sources():
        own = part_of(module_name(file))
        for module, _ in imports(file):
            other = part_of(module)
            if own and other and own != other:
                arrows.setdefault(own, set()).add(other)

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        for step in arrows.get(start, set()) - seen:
            seen.add(step)
            if step == goal or reaches(step, goal, seen):
                return True
        return False

    assert [part for part in arrows if reaches(part, part, set())] == []


def test_no_room_of_ppo_imports_from_one_above_it() -> None:
    def floor(module: str) -> int:
        room = module.removeprefix("rlhf_core.ppo.").split(".")[0]
        return ROOMS.index(room) if room in ROOMS else len(ROOMS)

    wrong = []
    tree = product()
    for name, module in tree.modules.items():
        if name.startswith("rlhf_core.ppo."):
            for entry in tree.imports(module):
                if entry.target.startswith("rlhf_core.ppo.") and floor(entry.target) > floor(name):
                    wrong.append(f"{name}:{entry.line} imports {entry.target}")
    assert wrong == []


def test_modules_have_no_import_cycles() -> None:
    """Imports inside functions and `if TYPE_CHECKING` count too: they hide a cycle, they do not remove it."""
    assert cycles(product().import_graph(only_at_import=False)) == []


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_is_imported_only_in_its_home(library: str) -> None:
    wrong = [
        f"{place(file, line)}: imports {module}"
        for file in sources()
        for module, line in imports(file)
        if module.split(".")[0] == library
        and not {part_of(module_name(file)), module_name(file)}.intersection(HOMES[library])
    ]
    assert sorted(set(wrong)) == []


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True
    )
    return set(done.stdout.split())


def test_configuration_types_and_seeds_start_without_anything_heavy() -> None:
    loaded = modules_after(
        "import rlhf_core.config.load, rlhf_core.preflight, rlhf_core.config.keys, rlhf_core.types,"
        " rlhf_core.seeds"
    )
    assert "pydantic" in loaded
    heavy = {
        "torch",
        "numpy",
        "pandas",
        "ray",
        "vllm",
        "deepspeed",
        "mlflow",
        "transformers",
        "datasets",
        "prefect",
        "fsspec",
    }
    assert loaded & heavy == set()


def test_algorithms_start_with_torch_alone() -> None:
    names = [module_name(file) for file in sources() if module_name(file).startswith("rlhf_core.algo.")]
    loaded = modules_after("import " + ", ".join(names))
    assert "torch" in loaded
    assert loaded & {"ray", "vllm", "deepspeed", "mlflow", "transformers", "datasets", "prefect"} == set()


def test_the_command_line_starts_without_the_parser_of_packages_metadata() -> None:
    """It is a sixth of its import, and only `rlhf --version` needs it."""
    loaded = modules_after("import rlhf_cli.main")
    assert "cyclopts" in loaded and "email" not in loaded


SHIPPED = sorted((ROOT / "deployments" / "configs").glob("*.y*ml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_a_shipped_configuration_loads(file: Path) -> None:
    assert load_config(file).run.name


def test_a_configuration_is_shipped() -> None:
    assert SHIPPED


def test_no_package_has_more_code_than_its_budget() -> None:
    """`.ci/budget.toml` says how a budget is raised."""
    budget = tomllib.loads((ROOT / ".ci/budget.toml").read_text(encoding="utf-8"))
    lines: Counter[str] = Counter()
    for module in product().modules.values():
        lines[".".join(module.package.split(".")[:2])] += code_lines(module)
    assert {name: count for name, count in lines.items() if count > budget.get(name, 0)} == {}


def test_no_function_is_too_long() -> None:
    long = []
    for file in sources_and_tests():
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{place(file, node.lineno)}: {node.name} has {lines} lines")
    assert long == []


def test_nothing_unpickles_by_itself() -> None:
    """What is stored is JSON, Parquet and safetensors; DeepSpeed's files are loaded under
    the allow-list of `engines.distributed.join`.
    """
    wrong = [
        place(file, node.lineno)
        for file in sources()
        for node in nodes_of(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("load", "loads", "Unpickler", "read_pickle")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("pickle", "cloudpickle", "dill", "joblib", "torch", "pandas", "pd")
    ]
    assert wrong == []


def test_the_library_never_prints() -> None:
    wrong = [
        place(file, node.lineno)
        for file in sources()
        if module_name(file).startswith("rlhf_core")
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []


def test_test_files_have_distinct_names() -> None:
    """pytest imports test files by their base name. `make test-slow` collects all of them in one process."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
