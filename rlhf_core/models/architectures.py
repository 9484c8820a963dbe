"""What transformers and vLLM can do with an architecture, without importing them.

`architectures.json` has it for the locked versions. `tests/support/library_architectures.py` generates it
from their source code.

SFT needs a causal language model, which every usable architecture has. Later stages need more: the reward
model and the critic a class for sequence classification, and the engines a class of vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.consistency import evaluates_adapter
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, Finding, ModelError
from rlhf_core.models.folder import ModelFolder, read_json_object
from rlhf_core.models.shape import text_settings
from rlhf_core.system.machine import machine

OTHER_MODEL = "use another model (docs/architectures.md has a table)"


def check_architecture(config: PipelineConfig) -> Iterator[Finding]:
    """Check the architecture of a local base model for all stages. That of a hub model is checked in the data
    stage.
    """
    path = config.model.path
    if path is not None and not is_hub_model(path) and ModelFolder(path).has_config:
        yield from architecture_problems(path, ModelFolder(path).config, config)


def check_packages_of_engines(config: PipelineConfig) -> Iterator[Finding]:
    """Check that the engines of this machine can load a local base model."""
    path = config.model.path
    if path is not None and not is_hub_model(path) and ModelFolder(path).has_config:
        yield from package_problems(path, ModelFolder(path).config, config)


def package_problems(model: str, settings: Mapping[str, Any], config: PipelineConfig) -> Iterator[Finding]:
    """Yield the package that the class of vLLM for the architecture in `settings` lacks on this machine, if
    the engines run here.
    """
    name = causal_class(str(text_settings(settings).get("model_type")))
    # Engines on other hosts have the packages of those hosts.
    if config.run.executor != "local" or os.environ.get("RAY_ADDRESS") or name is None:
        return
    if needs_torchvision(name) and not machine().has_package("torchvision"):
        yield ModelError(
            f"model.path: {model} is a {name}, and its class in vLLM imports torchvision, which is not"
            " installed (the lock for CPUs has none); install the build that belongs to the installed torch,"
            f" or {OTHER_MODEL}"
        )


def architecture_problems(
    model: str, settings: Mapping[str, Any], config: PipelineConfig
) -> Iterator[Finding]:
    """Yield what later stages of the run lack for the architecture in `settings`, a config.json.

    A text model that transformers does not know is not reported, because loading it fails first.
    """
    model_type = str(text_settings(settings).get("model_type"))
    name = causal_class(model_type)
    if name is None:
        if "text_config" in settings:
            yield ModelError(
                f"model.path: {model} is multimodal ({settings.get('model_type')}), and transformers has no"
                f" class for its text part alone ({model_type}); {OTHER_MODEL}"
            )
        return
    if not has_model_and_head(name):
        yield ModelError(f"model.path: {model}: {without_model_and_head(name)}")
        return
    ppo = config.ppo
    users = []
    if config.reward.enabled:
        users.append("reward.enabled=true")
    if ppo.enabled and ppo.uses_critic:
        users.append("ppo.algorithm=ppo")
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
    # Only for classes of vLLM: its wrapper of a class of transformers has adapters.
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
    name: str | None = _tables()["causal"].get(model_type)
    return name


def has_model_and_head(name: str) -> bool:
    """Return whether a class of transformers has the attributes `model` and `lm_head`, which
    `rlhf_core.models.policy` calls.
    """
    return name not in _tables()["without_model_and_head"]


def without_model_and_head(name: str) -> str:
    """Return the message for a class without the attributes `model` and `lm_head`."""
    return f"{name} has no `model` and `lm_head`, which the training calls; {OTHER_MODEL}"


def has_score_model(model_type: str) -> bool:
    """Return whether transformers has a sequence classification for this architecture."""
    return model_type in _tables()["with_score"]


def engine_backend(name: str, model_type: str) -> Literal["vllm", "transformers", "untested"] | None:
    """Return what a vLLM engine runs for a class of transformers.

    vllm            its own class
    transformers    the class of transformers, with vLLM's attention; vLLM's registry names it
    untested        the same for a class that the registry does not have
    None            the class cannot take another attention
    """
    if name in _tables()["vllm_by_transformers"]:
        return "transformers"
    if name in _tables()["vllm"]:
        return "vllm"
    if model_type in _tables()["with_fixed_attention"]:
        return None
    return "untested"


def engine_changes_classes(folder: Path) -> bool:
    """Return whether an engine of the model in `folder` changes classes of transformers in its process, so
    that the model cannot be loaded there afterwards.
    """
    file = folder / "config.json"
    settings = read_json_object(file) if file.is_file() else {}
    model_type = str(settings.get("model_type"))
    names = settings.get("architectures")
    # vLLM takes the class that the folder names, before that of the model type.
    name = names[0] if isinstance(names, list) and names else causal_class(model_type)
    return name is not None and engine_backend(str(name), model_type) != "vllm"


def serves_adapters(name: str) -> bool:
    """Return whether the class of vLLM for `name` supports LoRA. Unknown classes count as if they did."""
    return name not in _tables()["vllm_without_adapters"]


def needs_torchvision(name: str) -> bool:
    """Return whether the class of vLLM for `name` cannot be imported without torchvision."""
    return name in _tables()["vllm_with_torchvision"]


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tables
