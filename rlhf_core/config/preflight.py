"""Everything about a run that can be checked before anything heavy starts: files, folders, devices,
arithmetic.

`check` looks and raises one error that lists all problems. Nothing is imported or executed on the way: reward
functions and models are only looked at.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config.checkadapters import check_adapters
from rlhf_core.config.checkdata import check_source
from rlhf_core.config.checkfiles import (
    MAX_TEMPLATE_BYTES,
    Finding,
    attention_heads,
    check_model,
    guarded,
    is_local,
    tensors,
)
from rlhf_core.config.checkplaces import check_environment, check_places
from rlhf_core.config.checkrewards import check_rewards
from rlhf_core.config.devices import cpu_cores, runs_on_gpu, visible_gpus
from rlhf_core.config.doubts import doubts
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.placement import plan as placement
from rlhf_core.config.rewards import ModelReward
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.system.files import read_bounded

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on the CPU computes with; other sizes load and then fail at the first token."""
_LEAST_DISK = 30_000_000
_BYTES_PER_PARAMETER = 16
"""A resumable checkpoint in float32: weights, two moments of Adam, and a copy of the weights to load from."""


def check(config: PipelineConfig) -> list[str]:
    """Warnings, one sentence each. Raises ConfigError, DataError or ModelError (the class of the first
    problem) whose message lists every problem, a line each.
    """
    parts = (
        ("store, run.home, tracking", check_places),
        ("environment", check_environment),
        ("data", _data),
        ("model.path", _model),
        ("lora", check_adapters),
        ("ppo.rewards", check_rewards),
        ("configuration", doubts),
        ("configuration", _consistency),
        ("ppo.engine.tensor_parallel", _tensor_parallel),
        ("run.device", _devices),
        ("run.home", _disk),
    )
    findings: list[Finding] = [finding for field, part in parts for finding in guarded(field, part(config))]
    errors = [finding for finding in findings if isinstance(finding, InputError)]
    if errors:
        raise type(errors[0])("\n".join(dict.fromkeys(error.message for error in errors)))
    return list(dict.fromkeys(finding for finding in findings if isinstance(finding, str)))


def _data(config: PipelineConfig) -> Iterator[Finding]:
    data = config.data
    for name, sources in (("sft", data.sft), ("preference", data.preference), ("prompts", data.prompts)):
        for index, source in enumerate(sources):
            field = f"data.{name}.{index}"
            yield from guarded(f"{field}.path", check_source(field, source.path, source.revision))
    if data.chat_template is not None:
        yield from guarded("data.chat_template", _chat_template(data.chat_template))
    if all(source.path == "synthetic" for source in data.prompts):
        training = round(data.synthetic.prompts * (1 - data.eval_fraction))
        if config.ppo.prompts_per_step > training:
            yield (
                f"ppo.prompts_per_step is {config.ppo.prompts_per_step}, but only about {training} prompts"
                " are for training: some come twice in one step; raise data.synthetic.prompts"
            )


def _chat_template(path: str) -> Iterator[Finding]:
    try:
        content = read_bounded(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        yield ConfigError(f"data.chat_template: file not found: {path}; give a Jinja file")
    except OSError as error:
        yield ConfigError(f"data.chat_template: cannot read {path}: {error}; give a Jinja file")
    else:
        if not content.strip():
            yield ConfigError(f"data.chat_template: {path} is empty; a template must render something")


def _model(config: PipelineConfig) -> Iterator[Finding]:
    data = config.data
    if config.model.path is not None:
        longest = max(config.max_sequence_tokens, data.max_prompt_tokens + data.max_response_tokens)
        needs_template = data.template == "chat" and data.chat_template is None
        sizes = None if runs_on_gpu(config) else _CPU_HEAD_SIZES
        sdpa = config.model.attention == "sdpa"
        yield from check_model(config.model.path, config.model.revision, longest, needs_template, sdpa, sizes)


def _consistency(config: PipelineConfig) -> Iterator[Finding]:
    judge, ppo = config.evaluate.judge, config.ppo
    rules = [source for source in ppo.rewards if not isinstance(source, ModelReward) and source.weight]
    if config.reward.enabled and not config.data.preference:
        yield ConfigError(
            "reward.enabled: is true, but data.preference is empty; add pairs, or set reward.enabled=false"
        )
    elif config.reward.enabled and not ppo.uses_reward_model:
        yield (
            "reward.enabled: a reward model is trained, but ppo.rewards has no source of type model: it only"
            " judges"
        )
    if judge == "reward_model" and not config.reward.enabled:
        yield ConfigError(
            "evaluate.judge: reward_model needs reward.enabled=true; got false; use auto or rules"
        )
    if judge == "rules" and not rules:
        yield ConfigError(
            "evaluate.judge: rules needs a rule of some weight in ppo.rewards; got none; use auto or"
            " reward_model"
        )
    if judge == "gold" and any(source.path != "synthetic" for source in config.data.prompts):
        yield ConfigError("evaluate.judge: gold knows the demo task only; got other data.prompts; use auto")
    if config.sft.deepspeed.ranks > config.sft.batch_size:
        yield ConfigError(
            f"sft.deepspeed.ranks: must be at most sft.batch_size ({config.sft.batch_size}); "
            f"got {config.sft.deepspeed.ranks}; lower it or raise the batch"
        )
    if ppo.colocate == "all" and ppo.uses_critic and ppo.policy_deepspeed.hpz != ppo.critic_deepspeed.hpz:
        yield ConfigError(
            f"ppo.critic_deepspeed.hpz: must be that of the policy ({ppo.policy_deepspeed.hpz}) where both"
            f" share processes (ppo.colocate=all); got {ppo.critic_deepspeed.hpz}"
        )
    for field, deepspeed in _trainers(config):
        if deepspeed.hpz > 1 and deepspeed.zero_stage != 3:
            yield ConfigError(
                f"{field}.hpz: needs {field}.zero_stage=3; got {deepspeed.zero_stage}; set it, or hpz=1"
            )
        offloads = {"optimizer": (1, 2, 3), "all": (3,)}.get(deepspeed.offload)
        if offloads is not None and deepspeed.zero_stage not in offloads:
            yield ConfigError(
                f"{field}.offload: {deepspeed.offload} needs {field}.zero_stage {_either(offloads)}; got "
                f"{deepspeed.zero_stage}; set it, or offload=none"
            )
        if deepspeed.grad_accum_dtype is not None and deepspeed.dtype != "float32":
            yield from _accumulation(field, deepspeed)
        if deepspeed.dtype == "float16" and deepspeed.zero_stage == 0:
            yield ConfigError(
                f"{field}.dtype: float16 needs {field}.zero_stage 1, 2 or 3; got 0; set it, or dtype=bfloat16"
            )


def _accumulation(field: str, deepspeed: DeepSpeedConfig) -> Iterator[Finding]:
    """Check float32 sums of 16-bit gradients. DeepSpeed 0.19 supports them under ZeRO 2 and 3, without
    offload.
    """
    rule = f"{field}.grad_accum_dtype: float32 needs"
    if deepspeed.dtype != "bfloat16":
        yield ConfigError(f"{rule} {field}.dtype=bfloat16 (or float32); got {deepspeed.dtype}; leave it out")
    if deepspeed.zero_stage < 2:
        yield ConfigError(
            f"{rule} {field}.zero_stage 2 or 3; got {deepspeed.zero_stage}; set zero_stage=2, also on one"
            " rank, or leave it out"
        )
    if deepspeed.offload != "none":
        yield ConfigError(f"{rule} {field}.offload=none; got {deepspeed.offload}; set it, or leave it out")


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _trainers(config: PipelineConfig) -> list[tuple[str, DeepSpeedConfig]]:
    return [
        ("sft.deepspeed", config.sft.deepspeed),
        ("reward.deepspeed", config.reward.deepspeed),
        ("ppo.policy_deepspeed", config.ppo.policy_deepspeed),
        ("ppo.critic_deepspeed", config.ppo.critic_deepspeed),
    ]


def _devices(config: PipelineConfig) -> Iterator[Finding]:
    # A Ray cluster counts its devices itself when PPO reserves them; all other stages run here.
    cluster = bool(os.environ.get("RAY_ADDRESS"))
    gpus = visible_gpus()
    if config.run.device == "cuda" and gpus == 0:
        yield ConfigError(
            "run.device: cuda needs a GPU and a CUDA build of torch; got 0 visible GPUs; use auto or cpu"
        )
    elif runs_on_gpu(config):
        yield from _gpu_counts(config, gpus, cluster)
        yield from _flash_attention(config)
    elif not cluster:
        yield from _cpu_limits(config)


def _gpu_counts(config: PipelineConfig, gpus: int, cluster: bool) -> Iterator[Finding]:
    for field, ranks in (
        ("sft.deepspeed", config.sft.deepspeed.ranks),
        ("reward.deepspeed", config.reward.deepspeed.ranks),
    ):
        if ranks > gpus:
            yield ConfigError(
                f"{field}.ranks: must be at most the {gpus} visible GPUs; got {ranks}; use {gpus}"
            )
    plan = placement(config.ppo)
    if plan.devices > gpus and not cluster:
        yield ConfigError(
            f"ppo: needs {plan.devices} GPUs ({plan.describe()}; colocate={config.ppo.colocate}); got {gpus}"
            " visible; lower ranks or ppo.engine.count, or use ppo.colocate=all"
        )


def _flash_attention(config: PipelineConfig) -> Iterator[Finding]:
    if config.model.attention != "flash_attention_2":
        return
    if find_spec("flash_attn") is None:
        yield ConfigError(
            "model.attention: flash_attention_2 needs the package flash_attn, which is not installed; install"
            " it, or use sdpa"
        )
    exact = [f"{field}.dtype" for field, deepspeed in _trainers(config) if deepspeed.dtype == "float32"]
    if exact:
        yield ConfigError(
            f"model.attention: flash_attention_2 has no float32, which {', '.join(exact)}"
            f" {'is' if len(exact) == 1 else 'are'} here; use bfloat16 there, or model.attention=sdpa"
        )


def _tensor_parallel(config: PipelineConfig) -> Iterator[Finding]:
    ways, path = config.ppo.engine.tensor_parallel, config.model.path
    heads = (
        config.model.tiny.heads if path is None else attention_heads(Path(path)) if is_local(path) else None
    )
    if heads is not None and heads % ways:
        fits = max(n for n in range(1, ways) if heads % n == 0)
        yield ConfigError(
            f"ppo.engine.tensor_parallel: must divide the {heads} attention heads of the model; got {ways};"
            f" use {fits}"
        )


def _cpu_limits(config: PipelineConfig) -> Iterator[Finding]:
    ppo, cores, plan = config.ppo, cpu_cores(), placement(config.ppo)
    if ppo.weight_sync.backend in ("nccl", "ipc"):
        yield ConfigError(
            f"ppo.weight_sync.backend: {ppo.weight_sync.backend} needs GPUs; got 0 visible; use auto or gloo"
        )
    if config.model.attention == "flash_attention_2":
        yield ConfigError("model.attention: flash_attention_2 needs a GPU; got 0 visible; use sdpa")
    for field, deepspeed in _trainers(config):
        if deepspeed.offload != "none":
            yield ConfigError(
                f"{field}.offload: {deepspeed.offload} needs a GPU to offload from; got 0 visible; use none"
            )
        if deepspeed.dtype == "float16":
            yield ConfigError(f"{field}.dtype: float16 needs a GPU; got 0 visible; use float32 or bfloat16")
    for field, ranks in (("sft", config.sft.deepspeed.ranks), ("reward", config.reward.deepspeed.ranks)):
        if ranks > cores:
            yield (
                f"{field}.deepspeed.ranks is {ranks} on {cores} CPU cores: the ranks will take turns, each"
                " with a copy of the model; lower it"
            )
    if plan.busy > cores:
        yield (
            f"ppo has {plan.busy} processes at work at once ({plan.describe()}) on {cores} CPU cores: they"
            " will take turns; lower ranks or ppo.engine.count for speed"
        )
    memory = ppo.engine.count * ppo.engine.kv_cache_gib
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if memory > total:
        yield ConfigError(
            f"ppo.engine.kv_cache_gib: {ppo.engine.count} engines x {ppo.engine.kv_cache_gib:g} GiB ="
            f" {memory:g} GiB must fit in memory; got {total:.0f} GiB; lower it"
        )


def _parameters(config: PipelineConfig) -> int:
    """Parameters of the base model; 0 if it is on the hub."""
    if config.model.path is None:
        tiny = config.model.tiny
        layer = 4 * tiny.hidden_size**2 + 3 * tiny.hidden_size * tiny.intermediate_size
        return tiny.layers * layer + tiny.vocab_size * tiny.hidden_size * (1 if tiny.tie_embeddings else 2)
    if not is_local(config.model.path) or not Path(config.model.path).is_dir():
        return 0
    return sum(math.prod(entry["shape"]) for entry in tensors(Path(config.model.path)).values())


def _disk(config: PipelineConfig) -> Iterator[Finding]:
    place = Path(config.run.home).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    copies = (
        config.store.keep_checkpoints + config.store.keep_best + 1 if "://" not in config.store_url else 1
    )
    # With an adapter nothing large is in a checkpoint; the merged model is saved once.
    each = _BYTES_PER_PARAMETER * copies if config.ppo.lora is None else 4
    need = 200_000_000 + 2 * _parameters(config) * each
    disk = shutil.disk_usage(place)
    free = disk.free
    if (
        disk.total > 0 and free < _LEAST_DISK
    ):  # file systems that are not disks, such as /proc, have a total of 0
        yield ConfigError(
            f"run.home: {place} has {free / 1e6:.0f} MB free; databases and logs alone need"
            f" {_LEAST_DISK / 1e6:.0f} MB; free some, or set run.home"
        )
    elif free < need:
        yield (
            f"run.home: {place} has {free / 1e9:.1f} GB free, but policy and critic with {copies} checkpoints"
            f" need about {need / 1e9:.1f} GB; free some, or set run.home and store.url"
        )
