"""Load a configuration: one YAML file and overrides such as `ppo.kl.coef=0.02`.

All problems are listed in one ConfigError, one per line: `FILE:LINE: field: rule; got VALUE; fix`. Values
that may be secrets are never shown. Nothing heavy is imported here.

A section that the file gives in part keeps the rest of its defaults: with
`ppo: {policy: {weight_decay: 0.1}}` the learning rate is the default of `ppo.policy`, and not that of
`OptimizerConfig`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from rlhf_core.config.base import GroupKind, divisors_near
from rlhf_core.config.data import SETS
from rlhf_core.config.messages import Place, dotted, format_errors, locate, out_of_range, unknown
from rlhf_core.config.pipeline import PipelineConfig, uses_gpu
from rlhf_core.config.ppo import MINIBATCH, WITHOUT_GROUPS
from rlhf_core.config.redact import HIDDEN, credential_problem, is_secret, shown, texts
from rlhf_core.config.rewards import AnyReward, PythonReward
from rlhf_core.config.training import adapter_rate
from rlhf_core.config.yaml import Document, Keys, parse_value, read
from rlhf_core.errors import ConfigError, checking
from rlhf_core.system.files import exists, shipped
from rlhf_core.system.home import HOME_OF_RUNS
from rlhf_core.system.machine import machine

DEFAULT_CONFIG = "deployments/configs/demo.yaml"
"""Of a flow that is started without one."""
GROUP = 8
"""Samples of a prompt where an algorithm compares them, as in TRL."""
CPU_RESPONSES = 64
"""Responses of a step on CPUs, those of PPO's default."""
# By name: the compute capability needs torch, which reading a configuration must not import.
_BEFORE_AMPERE = re.compile(r"\b(T4|T10|V100|P100|P40|P4|K80|TITAN|GTX|Quadro)\b|RTX (20\d\d|[3-8]000$)")
"""Names of GPUs without bfloat16."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read, override and validate a configuration.

    `overrides` are `section.field=value`. The value is YAML (`3`, `1e-5`, `text`, `[1, 2]`), and the items of
    a list have an index (`ppo.rewards.0.weight=2`). RLHF_HOME replaces `run.home` of the file.

    Raises:
        ConfigError: With all problems, one per line.
    """
    home = os.environ.get(HOME_OF_RUNS) or None
    return _build(read(path), overrides_of({"run.home": home}, overrides))


def load_rewards(path: str | Path) -> tuple[AnyReward, ...]:
    """Read a file with the section `rewards`, in the form of `ppo.rewards`; or a Python file, whose function
    `score` is the only source.

    Raises:
        ConfigError: With all problems, one per line.
    """
    if Path(path).suffix == ".py":
        return (PythonReward(function="reward:score", file=str(path)),)
    document = read(path)
    if list(document.tree) != ["rewards"]:
        raise ConfigError(
            f"{path}: must have the section `rewards` and no other one; got"
            f" {', '.join(map(str, document.tree))}; copy `ppo.rewards`"
        )
    lines = {("ppo", *keys): line for keys, line in document.lines.items()}
    return _build(replace(document, tree={"ppo": document.tree}, lines=lines), ()).ppo.rewards


def overrides_of(fields: Mapping[str, Any], overrides: Sequence[str] = ()) -> list[str]:
    """Return `section.field=value` for each of `fields` that is not None, followed by `overrides`,
    which win. `fields` are for example the parameters of the form of a flow.
    """
    # JSON is valid YAML, and unlike YAML's plain scalars it keeps the name "1e3" a text.
    from_fields = [f"{field}={json.dumps(value)}" for field, value in fields.items() if value is not None]
    return [*from_fields, *overrides]


def overridden(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the content of a configuration file with overrides, to be written to another file."""
    tree = _tree_of(read(path))
    for text in overrides:
        _override(tree, text)
    return tree


def config_from_tree(
    tree: Mapping[str, Any], name: str = "configuration", overrides: Sequence[str] = ()
) -> PipelineConfig:
    """Return the configuration from plain data, such as the parameters of a flow run."""
    return _build(Document(name, dict(tree)), overrides)


def _build(document: Document, overrides: Sequence[str]) -> PipelineConfig:
    """Apply the overrides and validate. Raises ConfigError with all problems at once."""
    tree = _tree_of(document)
    given: dict[Keys, str] = {}
    problems: list[str] = []
    for text in overrides:
        try:
            given[_override(tree, text)] = text
        except ConfigError as error:
            problems.append(error.message)
    _expand(tree)  # once more, because an override can have a short form
    place = _place_of(document, given)
    for path, value in texts(tree):
        if problem := credential_problem(value, "give them by environment variables or a role"):
            problems.append(f"{place(path)}: {dotted(path)}: {problem}")
    problems.extend(f"{place(path)}: {sentence}" for path, sentence in out_of_range(tree))
    with checking(f"{document.name}: the configuration"):
        # Derived defaults first: after the merge nothing tells what the user has given.
        complete = _merged(_with_derived(tree), json.loads(_default_json()))
        try:
            # From JSON: strict validation of Python objects would refuse the lists of YAML for tuples.
            config = PipelineConfig.model_validate_json(json.dumps(complete))
        except ValidationError as error:
            problems.extend(format_errors(error, place))
    if problems:
        # Not chained: pydantic's error would carry the values that the message hides.
        raise ConfigError("\n".join(problems)) from None
    return config


def _tree_of(document: Document) -> dict[str, Any]:
    """Return a copy of the content, for overrides, with the addresses found and short forms written out."""
    tree: dict[str, Any] = json.loads(json.dumps(document.tree))
    _find_beside(tree, document.folder)
    _expand(tree)
    return tree


def _expand(tree: dict[str, Any]) -> None:
    """Write out what stands for a section: `model: NAME` and `data.sft: FILE` mean their `path`."""
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for name in SETS:
        sources = data.get(name)
        if isinstance(sources, str | dict):
            sources = [sources]
        if isinstance(sources, list):
            data[name] = [{"path": each} if isinstance(each, str) else each for each in sources]


def _find_beside(tree: dict[str, Any], folder: Path | None) -> None:
    """Let relative addresses of inputs start at the folder of the file that names them, if they are there.

    Those of files of this package, such as its templates, are found where it is installed.
    """
    if folder is None:
        return
    # A list, because the tree is changed on the way.
    for path, value in list(texts(tree)):
        is_short = path == ("model",) or (path[:1] == ("data",) and path[1:2] and path[1] in SETS)
        field = path[:-1] if isinstance(path[-1], int) else path  # an item of a list of paths
        schema = locate(_with_types(tree, field)).schema or locate(field).schema or {}
        if schema.get("affects") != "content" and not is_short:
            continue
        if value in ("", "synthetic") or path[-1] == "revision":
            continue
        place = folder / value if exists(folder / value) else shipped(value)
        if place != Path(value) and exists(place):
            parent: Any = tree
            for step in path[:-1]:
                parent = parent[step]
            parent[path[-1]] = str(place)


def _with_types(tree: Any, path: Keys) -> list[str | int]:
    """Return the path with the `type` of each section that has one, as `locate` needs it."""
    steps: list[str | int] = []
    for step in path:
        steps.append(step)
        tree = tree[step]
        if isinstance(tree, dict) and isinstance(tree.get("type"), str):
            steps.append(tree["type"])
    return steps


def _place_of(document: Document, overrides: Mapping[Keys, str]) -> Place:
    """Return a function that returns where the user has set a field: `FILE:LINE` or the override."""

    def place(path: Keys) -> str:
        for end in range(len(path), 0, -1):
            start = path[:end]
            if start in overrides:
                return _named(overrides[start])
            if start in document.lines:
                # A field that is missing from a section is attributed to the last override in that section.
                inside = [text for keys, text in overrides.items() if keys[:end] == start]
                return _named(inside[-1]) if inside and end < len(path) else document.place(start)
        return document.name

    return place


def _named(override: str) -> str:
    key, _, value = override.partition("=")
    text = override
    if is_secret(key, value):
        text = f"{key}={HIDDEN}"
    if len(text) > 80 or not text.isprintable():
        text = shown(text, limit=80)
    return f"override {text}"


def _with_derived(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill the defaults that depend on the device or on other settings."""
    on_gpu = uses_gpu(_at(tree, "run", "device") or "auto")
    _fill_precisions(tree, on_gpu)
    # Before the judge: it gets the settings of the reward model, and a rate that is there is not filled.
    _fill_adapter_rates(tree)
    _complete_judge(tree)
    _fill_ppo(tree, on_gpu)
    if _at(tree, "ppo", "enabled") is False and _at(tree, "dpo", "enabled") is True:
        _fill(tree, "register.policy", "dpo")
        if isinstance(tree.get("sample"), dict):
            _fill(tree, "sample.policy", "dpo")
    if on_gpu:  # with the 128 prompts that choose the policy, those of `data.max_eval`
        _fill(tree, "evaluate.prompts", 384)
    return tree


def _fill_precisions(tree: dict[str, Any], on_gpu: bool) -> None:
    """Fill the precisions that are not given: bfloat16 on GPUs that support it, else float32.

    The engines get the precision of the policy.
    """
    default = "float32"
    if on_gpu and not any(_BEFORE_AMPERE.search(name) for name in machine().gpu_names()):
        default = "bfloat16"
    for stage in ("sft", "reward", "dpo"):  # the judge has that of the reward model
        _fill(tree, f"{stage}.deepspeed.dtype", default)
    _fill(tree, "ppo.policy_deepspeed.dtype", default)
    _fill(tree, "ppo.critic_deepspeed.dtype", default)
    dtype = _at(tree, "ppo", "policy_deepspeed", "dtype")
    # A precision of the policy that is not allowed is reported once, and not also as that of the engines.
    if dtype not in ("float32", "bfloat16", "float16"):
        dtype = default
    _fill(tree, "ppo.engine.dtype", dtype)


def _fill_adapter_rates(tree: dict[str, Any]) -> None:
    """Fill the learning rates that are not given of sections with adapters (`adapter_rate`)."""
    defaults = json.loads(_default_json())
    for optimizer in ("sft.optimizer", "reward.optimizer", "dpo.optimizer", "ppo.policy", "ppo.critic"):
        section, name = optimizer.split(".")
        if isinstance(_at(tree, section, "lora"), dict):
            rate = adapter_rate(defaults[section][name]["learning_rate"])
            _fill(tree, f"{optimizer}.learning_rate", rate)
    if isinstance(_at(tree, "reward", "judge", "lora"), dict) and _at(tree, "reward", "lora") is None:
        rate = _at(tree, "reward", "optimizer", "learning_rate")
        # Not given, or wrong: then the validation reports it.
        if not isinstance(rate, float):
            rate = defaults["reward"]["optimizer"]["learning_rate"]
        _fill(tree, "reward.judge.optimizer.learning_rate", adapter_rate(rate))


def _fill_ppo(tree: dict[str, Any], on_gpu: bool) -> None:
    """Fill the settings of PPO whose default depends on the device, the algorithm or the rewards."""
    ppo = tree["ppo"]
    if not isinstance(ppo, dict):
        return
    if ppo.get("algorithm", "ppo") in get_args(GroupKind) and "samples_per_prompt" not in ppo:
        ppo["samples_per_prompt"] = GROUP
        if not on_gpu:
            ppo.setdefault("prompts_per_step", CPU_RESPONSES // GROUP)
    samples = ppo.get("samples_per_prompt", 1)
    # Nothing is validated yet. A wrong value stays as it is, for the message.
    if on_gpu and isinstance(samples, int) and samples > 0:
        ppo.setdefault("steps", 200)
        prompts = ppo.setdefault("prompts_per_step", max(1, 512 // samples))
        if isinstance(prompts, int) and prompts > 0:
            wanted = prompts * samples // MINIBATCH
            divisors = [count for count in divisors_near(prompts * samples, wanted) if count <= wanted]
            ppo.setdefault("minibatches", max(divisors, default=1))
    # In the reward, the KL of the tokens to come is added to the advantage of a group without a baseline, so
    # that early tokens get a negative one (decision 19).
    if ppo.get("algorithm", "ppo") not in WITHOUT_GROUPS and _at(ppo, "kl", "estimator") is None:
        _fill(ppo, "kl.place", "loss")
    if ppo.get("enabled", True) is True and _evaluations_choose(tree, ppo):
        ppo.setdefault("publish", "best")


def _evaluations_choose(tree: dict[str, Any], ppo: dict[str, Any]) -> bool:
    """Return whether evaluations can choose the policy to publish: if a score counts that the policy cannot
    exploit, that of a judge or of rules, and the KL counts against it.
    """
    if ppo.get("evaluate_every") == 0 or ppo.get("ema_decay") is not None:
        return False
    if _at(ppo, "kl", "coef") == 0 and ppo.get("publish_max_kl") is None:
        return False
    if isinstance(_at(tree, "reward", "judge"), dict):
        return True
    rewards = ppo.get("rewards")
    if not isinstance(rewards, list):
        return False
    types = [each.get("type") for each in rewards if isinstance(each, dict) and each.get("weight", 1) != 0]
    return bool(types) and "model" not in types


def _at(tree: Any, *path: str | int) -> Any:
    """Return the value at `path`; None if there is none."""
    for key in path:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    return tree


def _complete_judge(tree: dict[str, Any]) -> None:
    """Fill what the parts of `reward.judge` leave out with the settings of the reward model."""
    for part in ("optimizer", "deepspeed", "lora"):
        own, default = _at(tree, "reward", "judge", part), _at(tree, "reward", part)
        if isinstance(own, dict) and isinstance(default, dict):
            tree["reward"]["judge"][part] = default | own


def _fill(tree: dict[str, Any], field: str, value: Any) -> None:
    """Set a field such as `ppo.kl.place`, unless it is set or something else is in place of its section."""
    section: Any = tree
    *sections, name = field.split(".")
    for key in sections:
        section = section.setdefault(key, {}) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.setdefault(name, value)


@cache
def _default_json() -> str:
    # Text, so that each caller parses a tree of its own, which overrides may change.
    # Not what `PipelineConfig` itself completes: its defaults depend on `model.path`.
    limits = {"max_prompt_tokens", "max_response_tokens", "max_text_tokens"}
    completed = {"data": {*SETS, *limits}, "ppo": {"max_new_tokens"}}
    return PipelineConfig().model_dump_json(by_alias=True, exclude=completed)


def _merged(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Fill the fields that sections of `tree` leave out. Lists are not merged."""
    merged = dict(defaults)
    for key, value in tree.items():
        default = defaults.get(key)
        # A section that is absent by default (null) has no defaults here: pydantic fills those of its fields.
        if isinstance(value, dict) and isinstance(default, dict):
            merged[key] = _merged(value, default)
        else:
            merged[key] = value
    return merged


def _override(tree: dict[str, Any], text: str) -> Keys:
    """Write one override into the tree and return its path. Raises ConfigError."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    name = _named(text)
    if not equals or not key:
        raise ConfigError(f"{name}: an override has the form section.field=value; add `=` and a value")
    if not value_text.strip():
        raise ConfigError(
            f"{name}: has no value; write {key}=null to unset it, or {key}='\"\"' for empty text"
        )
    try:
        value = parse_value(value_text, name)
    except ConfigError as error:
        message = error.message.replace(f"{name}:1:", f"{name}:", 1)
        # Not chained: the original message may show the value, which can be secret.
        raise ConfigError(f"{message} (in a shell: {key}='\"...\"')") from None
    path = _path(key, name)
    _set(tree, path, value, name)
    return path


def _path(key: str, name: str) -> Keys:
    """Return `ppo.rewards.0.weight` as keys. Raises ConfigError for a key that the schema does not have."""
    steps: list[str | int] = []
    for step in key.split("."):
        parent = locate(steps).schema
        if parent is not None and parent.get("type") == "array":
            # `isdigit` alone is true for `²`, which `int` refuses.
            if not (step.isascii() and step.isdigit() and len(step) < 5):
                raise ConfigError(
                    f"{name}: {dotted(steps)} is a list; got {shown(step)}; use an index, such as"
                    f" {dotted(steps)}.0"
                )
            steps.append(int(step))
            continue
        steps.append(step)
        # The fields of a reward depend on its `type`, and a map may have any keys.
        if parent is None or "discriminator" in parent or parent.get("additionalProperties"):
            continue
        if "properties" not in parent:
            owner = dotted(steps[:-1])
            raise ConfigError(f"{name}: {owner} is a value and has no fields; override {owner}")
        if step not in parent["properties"]:
            raise ConfigError(f"{name}: {unknown(tuple(steps), parent)}")
    return tuple(steps)


def _set(tree: dict[str, Any], path: Keys, value: Any, name: str) -> None:
    """Set the field at `path`, with the sections and the list item that are missing on the way."""
    parent: Any = tree
    for depth, step in enumerate(path):
        is_last = depth == len(path) - 1
        owner = dotted(path[:depth])
        if isinstance(parent, list) and isinstance(step, int):
            if step > len(parent):
                raise ConfigError(
                    f"{name}: {owner} has {len(parent)} items; got index {step}; use 0 to {len(parent)}"
                )
            if step == len(parent):
                parent.append({})
        elif not isinstance(parent, dict):
            raise ConfigError(
                f"{name}: {owner} is no section or list in the file; got {shown(parent)}; correct it there"
            )
        elif not is_last and parent.get(str(step)) is None:
            parent[str(step)] = _default(path[: depth + 1])
        if is_last:
            parent[step] = value
        else:
            parent = parent[step]


def _default(path: Keys) -> Any:
    """Return the default of a list, so that an override can change one item, or else an empty section.

    The lists of `data` are empty: an override of a source that is not given must not add a generated one.
    """
    if len(path) == 2 and path[0] == "data" and path[1] in SETS:
        return []
    default = _at(json.loads(_default_json()), *path)
    return default if isinstance(default, list) else {}
