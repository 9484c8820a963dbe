"""What transformers and vLLM can do with an architecture, read from their source code without importing them.

SFT needs a causal language model, which every usable architecture has. Later stages need more: the reward
model and the critic a class for sequence classification, and the engines a class of vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.consistency import evaluates_adapter
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, Finding, ModelError
from rlhf_core.models.folder import ModelFolder, read_json_object

_VLLM_MODELS = "vllm.model_executor.models"
OTHER_MODEL = "use another model (docs/architectures.md has a table)"


def check_architecture(config: PipelineConfig) -> Iterator[Finding]:
    """Check the architecture of a local base model for all stages. That of a hub model is checked in the data
    stage.
    """
    path = config.model.path
    if path is not None and not is_hub_model(path) and ModelFolder(path).has_config:
        yield from architecture_problems(path, ModelFolder(path).config, config)


def architecture_problems(
    model: str, settings: Mapping[str, Any], config: PipelineConfig
) -> Iterator[Finding]:
    """Yield what later stages of the run lack for the architecture in `settings`, a config.json.

    An architecture that transformers does not know is not reported, because loading it fails first.
    """
    model_type = str(settings.get("model_type"))
    name = causal_class(model_type)
    if name is None:
        return
    if not has_model_and_head(name, model_type):
        yield ModelError(f"model.path: {model}: {without_model_and_head(name)}")
        return
    ppo = config.ppo
    users = ["reward.enabled=true"] if config.reward.enabled else []
    users += ["ppo.algorithm=ppo"] if ppo.enabled and ppo.uses_critic else []
    if users and not has_score_model(model_type):
        others = ", other ppo.rewards and ppo.algorithm=reinforce_pp" if ppo.enabled else ""
        yield ModelError(
            f"model.path: {model} has the model_type {model_type}, for which transformers has no model with a"
            f" score (AutoModelForSequenceClassification), but {' and '.join(users)} needs one;"
            f" {OTHER_MODEL}, or set reward.enabled=false{others}"
        )
    engine = engine_backend(name, model_type)
    if engine is None:
        yield ModelError(
            f"model.path: {model} is a {name}, which vLLM cannot sample from in PPO and evaluation: it is not"
            f" in vLLM's registry, and its attention cannot be replaced; {OTHER_MODEL}"
        )
    elif engine == "untested":
        yield (
            f"model.path: {model} is a {name}, which is not in vLLM's registry; engines try its class of"
            " transformers; run a few steps of PPO (ppo.steps=2) before a long run"
        )
    if ppo.enabled and ppo.syncs_adapter and engine == "vllm" and not serves_adapters(name):
        yield ConfigError(
            f"ppo.lora: vLLM has no adapters for {name} ({model}), but ppo.weight_sync.lora="
            f"{ppo.weight_sync.lora or 'null'} sends the adapter alone to the engines; set"
            " ppo.weight_sync.lora=merged"
        )
    has_adapter = config.dpo.enabled and evaluates_adapter(config.dpo, ppo)
    if has_adapter and engine == "vllm" and not serves_adapters(name):
        yield ConfigError(
            f"dpo.lora: vLLM has no adapters for {name} ({model}), but outside float32 the policy of DPO is"
            " sampled with a separate adapter; leave dpo.lora out, or set dpo.deepspeed.dtype,"
            " ppo.engine.dtype and ppo.policy_deepspeed.dtype to float32"
        )


def causal_class(model_type: str) -> str | None:
    """Return the class of the causal language model, or None if transformers has none."""
    return _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type)


def has_model_and_head(name: str, model_type: str) -> bool:
    """Return whether a class of transformers has the attributes `model` and `lm_head`, which
    `rlhf_core.models.policy` calls. True if its source is not found.
    """
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


def without_model_and_head(name: str) -> str:
    """Return the message for a class without the attributes `model` and `lm_head`."""
    return f"{name} has no `model` and `lm_head`, which the training calls; {OTHER_MODEL}"


def has_score_model(model_type: str) -> bool:
    """Return whether transformers has a sequence classification for this architecture."""
    return model_type in _classes("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")


def engine_backend(name: str, model_type: str) -> Literal["vllm", "transformers", "untested"] | None:
    """Return what a vLLM engine runs for a class of transformers.

    vllm            its own class
    transformers    the class of transformers, with vLLM's attention; vLLM's registry names it
    untested        the same for a class that the registry does not have
    None            the class cannot take another attention
    """
    if name in _registry("_TRANSFORMERS_SUPPORTED_MODELS"):
        return "transformers"
    if name in _registry("_TEXT_GENERATION_MODELS") or name in _registry("_MULTIMODAL_MODELS"):
        return "vllm"
    return "untested" if _takes_attention(model_type) else None


def engine_changes_classes(folder: Path) -> bool:
    """Return whether an engine of the model in `folder` changes classes of transformers in its process, so
    that the model cannot be loaded there afterwards.
    """
    file = folder / "config.json"
    settings = read_json_object(file) if file.is_file() else {}
    model_type = str(settings.get("model_type"))
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else causal_class(model_type)
    return name is not None and engine_backend(str(name), model_type) != "vllm"


def serves_adapters(name: str) -> bool:
    """Return whether the class of vLLM for `name` supports LoRA. Unknown classes count as if they did."""
    found = _registry("_TEXT_GENERATION_MODELS") | _registry("_MULTIMODAL_MODELS")
    if name not in found:
        return True
    module, vllm_name = found[name]
    module = module if module.startswith("vllm.") else f"{_VLLM_MODELS}.{module}"
    return _inherits(module, vllm_name, "SupportsLoRA")


# -- source code --


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
