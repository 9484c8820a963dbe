"""Measures of the structure of `rlhf_core`, `rlhf_cli` and `flows`, as a Markdown table.

    python -m tests.structure                        the files on disk
    python -m tests.structure 6afda42 db5b93e .      commits of this repository, one column each, and the disk

Definitions:

- *lines* are all lines of the `.py` files, *code lines* those that are not blank and have more than a comment
  or a docstring. A function's lines include its decorators, signature and
  docstring.
- *import cycles* are groups of modules that import each other, also inside a package. The first number counts
  imports that run when a module is imported, the second also imports inside functions and `TYPE_CHECKING`.
- *a PPO step crosses* the files that contain a function or class that the step methods of `PPOController` may
  reach. References are followed by name: functions and classes that a file imports or defines, methods and
  properties of classes in its own and its imported modules, and method names in strings, which older commits
  passed to Ray actors. This is an upper bound, because a name can belong to several classes. Packages are
  those of the second level: the rooms of `rlhf_core.ppo` are one package.
- *files that name a stage* have the stage's name as a string. They have to be read, and often changed, when a
  stage is added or renamed. `register` is the best indicator, because its name has no other use. Not counted
  are keys of `update=` in a copied configuration, which are sections, names of seeds in `derive_seed`, and
  the words in `_OTHER_WORDS`, which are names of something else.
- *configuration leaves* are the fields of the configuration that have no fields themselves. A list counts as
  one, and so does a map of values. The sections in a map count once, and so does a section in one that
  inherits the fields that it leaves out.
- *comments* are lines with a comment, without directives (`type:`, `noqa`, `fmt:`, `pragma`).
- *comprehensions* include generator expressions.
- *the path* of the docs are the pages that `docs/README.md` lists before its section "Reference".
- *patches* in tests are the calls `setattr`, `setitem` and `delattr` of `monkeypatch` and of its contexts,
  and those of `mock.patch`. Variables of the environment and the working folder do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.source_tree import PACKAGES, Module, SourceTree, cycles

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("data", "sft", "reward", "ppo", "evaluate", "register")
STEP_METHODS = {"iterate", "step", "sync"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Measures = dict[str, str]


def measure(root: Path) -> Measures:
    """Return the rows of the table for the version of the code in `root`."""
    tree = SourceTree(root)
    modules = list(tree.modules.values())
    lines = sum(len(module.lines) for module in modules)
    file_lines = [len(module.lines) for module in modules]
    functions = [function for module in modules for function in module.functions()]
    function_lines = [_length(function) for function in functions]
    nodes = [node for module in modules for node in module.nodes]
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    at_import = cycles(tree.import_graph(only_at_import=True))
    everywhere = cycles(tree.import_graph(only_at_import=False))
    step_files = files_of_ppo_step(tree)
    widths = [len(line) for module in modules for line in module.lines]
    return {
        "lines, code lines": f"{lines}, {sum(map(code_lines, modules))}",
        "files": str(len(modules)),
        "lines of a file: median, longest": f"{statistics.median(file_lines):.0f}, {max(file_lines)}",
        "functions": str(len(functions)),
        "lines of a function: median, longest": (
            f"{statistics.median(function_lines):.0f}, {max(function_lines)}"
        ),
        "import cycles: at import, with lazy imports": f"{len(at_import)}, {len(everywhere)}",
        "a PPO step crosses: files, packages": (
            f"{len(step_files)}, {len({_second_level(module) for module in step_files})}"
        ),
        "files that name the stage `register`": str(files_naming(tree, "register")),
        "files that name a stage: median of the six": (
            f"{statistics.median(files_naming(tree, stage) for stage in STAGES):.0f}"
        ),
        "configuration leaves": configuration_leaves(root),
        "comments per 100 lines": f"{100 * sum(map(comment_lines, modules)) / lines:.1f}",
        "public functions without `Args` (more than 4 parameters)": str(sum(map(lacks_args, functions))),
        "ternaries per 1,000 lines": f"{1000 * sum(isinstance(n, ast.IfExp) for n in nodes) / lines:.1f}",
        "comprehensions per 1,000 lines": (
            f"{1000 * sum(isinstance(n, comprehensions) for n in nodes) / lines:.1f}"
        ),
        "lines above 100, above 110 characters": (
            f"{sum(width > 100 for width in widths)}, {sum(width > 110 for width in widths)}"
        ),
        "tests: functions, patches": f"{count_in_tests(root, _TEST)}, {count_in_tests(root, _PATCH)}",
        "docs: kB of the path, decisions": f"{_kilobytes_of_path(root)}, {len(_decisions(root))}",
    }


def _kilobytes_of_path(root: Path) -> str:
    """Return the size of the pages that `docs/README.md` names before its section "Reference"."""
    index = root / "docs/README.md"
    text = index.read_text(encoding="utf-8") if index.exists() else ""
    path, heading, _ = text.partition("\n## Reference\n")
    if not heading:
        return "-"  # an older commit has no path
    pages = [index.parent / target for target in re.findall(r"\]\(([^)#]+\.md)\)", path)]
    return f"{sum(page.stat().st_size for page in pages) / 1000:.0f}"


def _decisions(root: Path) -> list[Path]:
    return sorted((root / "docs/decisions").glob("[0-9]*.md"))


_TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)
_PATCH = re.compile(r"\b(?:monkeypatch|patch|patched)\.(?:setattr|setitem|delattr)\(|\bmock\.patch\b")


def count_in_tests(root: Path, pattern: re.Pattern[str]) -> int:
    """Return how often a pattern occurs in the files of `tests`, without this one."""
    files = (file for file in (root / "tests").rglob("*.py") if file.name != Path(__file__).name)
    return sum(len(pattern.findall(file.read_text(encoding="utf-8"))) for file in files)


def _length(function: Function) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return (function.end_lineno or function.lineno) - first + 1


def lacks_args(function: Function) -> bool:
    """Return whether a public function with more than four parameters has no `Args` section."""
    arguments = function.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    if names and names[0] in ("self", "cls"):
        names.pop(0)
    if function.name.startswith("_") or len(names) <= 4:
        return False
    return "Args:" not in (ast.get_docstring(function) or "")


def comment_lines(module: Module) -> int:
    """Return the number of lines with a comment that is not a directive for a tool."""
    directive = re.compile(r"#\s*(type:|noqa|fmt:|pragma|!)")
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and not directive.match(token.string):
            count += 1
    return count


def code_lines(module: Module) -> int:
    """Return the number of lines that are not blank, and not only a comment or a docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)  # fmt: skip


_SET, _ROLE, _SECTION = {"sft"}, {"reward"}, {"data", "ppo", "evaluate"}
_OTHER_WORDS: dict[str, set[str]] = {
    # Paths of fields in a YAML file or in a configuration that was stored.
    "rlhf_core.config.load": _SECTION,
    "rlhf_core.config.messages": {"ppo", "reward"},
    "rlhf_core.config.pipeline": {"data"},  # `object.__setattr__`
    "rlhf_core.evaluation.prompts": {"reward"},
    "rlhf_core.storage.artifacts": {"data", "ppo"},
    "rlhf_core.storage.versions": {"data", "ppo"},  # folders of the source code
    # The set `data.sft`.
    "rlhf_core.config.data": _SET | {"reward"},  # `labelled_by: reward`
    "rlhf_core.data.card": _SET,
    "rlhf_core.data.dataset": _SET,
    "rlhf_core.data.examples": _SET,
    "rlhf_core.data.prepare": _SET,
    "rlhf_core.data.synthetic": _SET,
    "rlhf_core.ops.drift_measures": _SET,
    "rlhf_core.ops.plan.rows": _SET,
    "rlhf_core.testing.data": _SET,
    # The role of a process in PPO, and places of the KL penalty and of a label.
    "rlhf_core.config.consistency": _ROLE,
    "rlhf_core.config.placement": _ROLE,
    "rlhf_core.config.ppo_sections": _ROLE,
    "rlhf_core.evaluation.regression": _ROLE,  # a field of a result
    "rlhf_core.ops.plan.speed": _ROLE,
    "rlhf_core.planning.search": _ROLE,
    "rlhf_core.planning.loads": _ROLE,
    "rlhf_core.ppo": _ROLE,
    # The algorithm `ppo`.
    "rlhf_core.config.ppo": {"ppo"},
    # What `rlhf blame` and `rlhf replay` measure of a step, and a kind of facts about a run.
    "rlhf_cli.look": _ROLE,
    "rlhf_core.ops.blame": _ROLE,
    "rlhf_core.ops.compare": {"data"},
    # A field of MLflow's tables.
    "rlhf_core.tracking.stage_run": {"data"},
    # What a check is about, in messages.
    "rlhf_core.preflight": {"data", "evaluate"},
}
"""Words that are no name of a stage, by the modules or packages where they are something else only."""


def files_naming(tree: SourceTree, stage: str) -> int:
    """Return the number of files with the name of a stage as a string, see the module's docstring."""
    count = 0
    for name, module in tree.modules.items():
        if stage in _other_words(name):
            continue
        ignored = {id(node) for each in module.nodes for node in _no_stage_names(each)}
        count += any(
            isinstance(node, ast.Constant) and node.value == stage and id(node) not in ignored
            for node in module.nodes
        )
    return count


def _other_words(name: str) -> set[str]:
    found = (words for part, words in _OTHER_WORDS.items() if name == part or name.startswith(f"{part}."))
    return set().union(*found)


def _no_stage_names(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the sections that `model_copy(update={...})` replaces, and the names in `derive_seed(...)`."""
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg == "update" and isinstance(keyword.value, ast.Dict):
            yield from (key for key in keyword.value.keys if key is not None)
    if isinstance(node.func, ast.Name) and node.func.id == "derive_seed":
        yield from node.args


_SCHEMA = """
import json
from rlhf_core.config.pipeline import PipelineConfig
print(json.dumps(PipelineConfig.model_json_schema()))
"""


def configuration_leaves(root: Path) -> str:
    """Return the number of configuration leaves of a version of the code; `-` if it cannot be imported."""
    done = subprocess.run([sys.executable, "-c", _SCHEMA], cwd=root, capture_output=True, timeout=60)
    if done.returncode:
        return "-"
    schema = json.loads(done.stdout)
    return str(count_leaves(schema, schema["$defs"]))


def count_leaves(schema: dict[str, Any], definitions: dict[str, Any]) -> int:
    """Return the number of leaves of a field or section, as the module's docstring defines them."""
    options = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        return count_leaves({**schema, "anyOf": [], **options[0]}, definitions)
    if "$ref" in schema:
        section = definitions[schema["$ref"].rpartition("/")[2]]
        return count_leaves({**section, "inherits": schema.get("inherits")}, definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        return count_leaves(schema["additionalProperties"], definitions)
    if schema.get("inherits"):
        return len(schema["properties"])
    return sum(count_leaves(field, definitions) for field in schema.get("properties", {}).values()) or 1


class _Definitions:
    """Functions, classes and imported names of one module."""

    def __init__(self, tree: SourceTree, module: Module) -> None:
        self.module = module
        self.functions: dict[str, Function] = {}
        self.methods: dict[str, dict[str, Function]] = {}
        for node in module.tree.body:
            if isinstance(node, Function):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.methods[node.name] = {
                    item.name: item for item in node.body if isinstance(item, Function)
                }
        self.imported = {entry.target for entry in tree.imports(module)}
        self.names: dict[str, tuple[str, str]] = {}
        """Local name -> (module, name in it). The second is empty if the name is a module."""
        for each in module.nodes:
            if isinstance(each, ast.ImportFrom):
                base = module.absolute(each)
                for alias in each.names:
                    full = f"{base}.{alias.name}"
                    target = (full, "") if full in tree.modules else (base, alias.name)
                    self.names[alias.asname or alias.name] = target


def _second_level(module: Module) -> str:
    """Return the package below the top level, such as `rlhf_core.ppo` for `rlhf_core.ppo.fleet.worker`."""
    return ".".join(module.package.split(".")[:2])


def files_of_ppo_step(tree: SourceTree) -> list[Module]:
    """Return the modules that a PPO step crosses, as the module's docstring defines it."""
    definitions = {name: _Definitions(tree, module) for name, module in tree.modules.items()}
    controller = next(name for name, part in definitions.items() if "PPOController" in part.methods)
    package = _second_level(tree.modules[controller])
    waiting = [
        (controller, function)
        for name, function in definitions[controller].methods["PPOController"].items()
        if name in STEP_METHODS
    ]
    crossed = {controller}
    seen: set[int] = set()
    while waiting:
        name, function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        crossed.add(name)
        for target, definition in _references(definitions, definitions[name], function, package):
            crossed.add(target)
            if definition is not None:
                waiting.append((target, definition))
    return [tree.modules[name] for name in sorted(crossed)]


def _references(
    definitions: dict[str, _Definitions], here: _Definitions, function: Function, package: str
) -> Iterator[tuple[str, Function | None]]:
    """Yield (module, function) for every reference in the body of `function`.

    The function is None for a class without methods, for example a dataclass.
    """
    classes_in_reach = [definitions[name] for name in {here.module.name, *here.imported}]
    remote = [part for part in definitions.values() if _second_level(part.module) == package]
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    for node in _without_annotations(function):
        if isinstance(node, ast.Name):
            yield from _named(definitions, here, node.id, id(node) in called)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and here.names.get(node.value.id, ("", "x"))[1] == "":
                module = definitions[here.names[node.value.id][0]]
                yield from _named(definitions, module, node.attr, id(node) in called)
            else:
                yield from _methods(classes_in_reach, node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _methods(remote, node.value)


def _named(
    definitions: dict[str, _Definitions], here: _Definitions, name: str, is_called: bool
) -> Iterator[tuple[str, Function | None]]:
    """Yield what a plain name refers to. A class counts only where it is called."""
    module, original = here.names.get(name, (here.module.name, name))
    if module not in definitions or not original:
        return
    part = definitions[module]
    if original in part.functions:
        yield module, part.functions[original]
    elif original in part.methods and is_called:
        yield module, None
        for method_name, method in part.methods[original].items():
            if method_name in ("__init__", "__post_init__", "__enter__", "__exit__", "__call__"):
                yield module, method
    elif original in part.names and part is not here:  # re-exported by a package
        yield from _named(definitions, part, original, is_called)


def _methods(parts: list[_Definitions], name: str) -> Iterator[tuple[str, Function]]:
    for part in parts:
        for methods in part.methods.values():
            if name in methods:
                yield part.module.name, methods[name]


def _without_annotations(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body except type annotations and its docstring."""
    body: list[ast.AST] = list(function.body)
    if ast.get_docstring(function) is not None:
        body = body[1:]
    while body:
        node = body.pop()
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            body.extend(child for child in children if isinstance(child, ast.AST))


def measure_commit(commit: str) -> Measures:
    """Return the measures of a commit of this repository, or of the files on disk if it is `.`."""
    if commit == ".":
        return measure(ROOT)
    # Earlier commits do not have all packages.
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "--name-only", commit, *PACKAGES, "tests", "docs", "README.md"],
        check=True, capture_output=True, timeout=60,
    ).stdout.decode().split()  # fmt: skip
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, *names], check=True, capture_output=True, timeout=60
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        return measure(Path(folder))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure", description="Print measures of the code's structure."
    )
    parser.add_argument(
        "commits", nargs="*", default=["."], help="commits of this repository; `.` are the files on disk"
    )
    try:
        columns = {commit: measure_commit(commit) for commit in parser.parse_args(arguments).commits}
    except subprocess.CalledProcessError as error:
        parser.error(error.stderr.decode(errors="replace").strip())
    print("| measure | " + " | ".join("on disk" if name == "." else name for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for row in next(iter(columns.values())):
        print(f"| {row} | " + " | ".join(column[row] for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
