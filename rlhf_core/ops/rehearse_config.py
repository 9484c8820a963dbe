"""The configuration of a rehearsal: that of the run, with a small model, few rows and few steps, on the CPU.

Each field that differs is a `Change`. Those with `missed` say what is not exercised.
"""

from __future__ import annotations

import heapq
import json
import math
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.data import SetName, Source
from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.data.files import BadRow
from rlhf_core.data.sources import address_of, read_rows
from rlhf_core.errors import InputError, RLHFError
from rlhf_core.models.weights import model_config
from rlhf_core.system.machine import machine

ROWS = 64
"""First rows of each source."""
LONGEST = 8
"""Longest rows of each source, besides the first ones."""
_SEARCHED = 200_000
"""Rows among which the longest are searched."""
_NEW_TOKENS = 64
"""Length of sampled responses: a random model hardly ever ends one."""
_SAMPLES = 8
"""Samples of a prompt, at most."""
_MINIBATCHES = 4
_HELD_OUT = 8
"""Prompts of an evaluation."""
_ROWS_OF_A_RANK = 8
"""Rows of a batch for each rank, in the stages before PPO."""
_GPU = "kernels, collectives and memory of GPUs"


@dataclass(frozen=True)
class Change:
    """A field that has another value in the rehearsal."""

    field: str
    given: Any
    used: Any
    missed: str | None
    """What is not exercised because of it; None: the same is exercised with a smaller number."""


class Derivation:
    """The configuration of a rehearsal, and how it differs from the given one.

    Args:
        given: The configuration of the run, with its references resolved.
        place: Folder of the rehearsal: model, rows and home.
        model: Folder with `config.json` and tokenizer for a model that is not on this machine.

    Raises InputError if a model or source is not on this machine.
    """

    def __init__(self, given: PipelineConfig, place: Path, model: Path | None) -> None:
        self.config = given
        self.changes: list[Change] = []
        self.rows: dict[str, str] = {}
        """Which rows there are, by the field of their source."""
        self.copies: dict[str, str] = {}
        """The address in the configuration of each file and folder that stands for it here."""
        # Two rehearsals can have one store.
        self.prefix = f"rehearsal/{uuid.uuid4().hex[:12]}"
        """Where the objects of the rehearsal are, below `store.url` of the run."""
        self._given, self._place, self._model = given, place, model
        self._of_machine()
        self._of_models()
        self._of_data()
        self._of_training()
        self._of_ppo()
        self._of_sampling()
        self._of_evaluation()

    def _value(self, field: str) -> Any:
        value: Any = self.config
        for name in field.split("."):
            value = getattr(value, name)
        return value

    def _set(self, field: str, used: Any, missed: str | None = None) -> None:
        given = self._value(field)
        if given != used:
            self.changes.append(Change(field.replace("register_", "register"), given, used, missed))
            self.config = self.config.with_values({field: used})

    def _fewer(self, number: int) -> int:
        """Return the number of ranks or engines in place of a larger one: several stay several."""
        return min(number, max(2, machine().cores()))

    def _of_machine(self) -> None:
        run, store = self._given.run, self._given.store
        # A name has at most 64 characters.
        self._set("run.name", f"rehearse-{run.name}"[:64])
        self._set("run.home", str(self._place / "home"))
        self._set("run.device", "cpu", _GPU if run.device != "cpu" else None)
        self._set("run.threads", 1)
        self._set("run.retries", max(run.retries, 1))  # the kill is followed by one
        self._set("run.budget", None)
        self._set("run.env", {}, "these variables")
        if run.is_remote:
            self._set("run.executor", "local", "submission of jobs, and their nodes")
            self._set("run.resources", type(run.resources)({}), "what jobs ask the cluster for")
        if store.url is not None:
            self._set("store.url", f"{store.url.rstrip('/')}/{self.prefix}")
        self._set("tracking.experiment", f"{self._given.experiment}-rehearsal")
        self._set("register_.model", f"{self._given.registered_model}-rehearsal")
        self._set("register_.votes", (), "votes of people")
        self._set("register_.votes_margin", None, "votes of people")
        self._set("drift", None, "the comparison with the data of the champion")
        self._set("benchmark", None, "tasks of lm-evaluation-harness")
        if self._given.record.level == "none":
            self._set("record.level", "rewards")

    def _of_models(self) -> None:
        config, judge = self._given, self._given.reward.judge
        for seed, stage in enumerate(("sft", "judge", "ppo")):
            base = base_of(config, stage)  # type: ignore[arg-type]
            if base is None:
                continue
            folder = Path(base.path)
            if base.is_hub or not (folder / "config.json").is_file():
                if self._model is None:
                    raise InputError(
                        f"{base.field}: {base.path} is not on this machine; give --model FOLDER with its"
                        " config.json and its tokenizer (tokenizer.json, tokenizer_config.json), which"
                        " are enough"
                    )
                folder = self._model
            small = self._place / "models" / stage
            said = shrink(folder, small, seed)
            self.copies[str(small)] = base.path
            self._set(base.field, str(small), f"the weights of {base.path}: {said}")
            self._set(base.revision_field, None)
        if config.model.attention == "flash_attention_2":
            self._set("model.attention", "sdpa", "the kernels of flash attention")
        if judge is not None and judge.own_settings:
            self._of_section("reward.judge", judge.batch_size or config.reward.batch_size)

    def _of_data(self) -> None:
        data = self._given.data
        sources: dict[SetName, list[Source]] = {}
        for name, index, source in data.sources():
            sources.setdefault(name, []).append(self._cut(f"data.{name}.{index}", name, index, source))
        for name, cut in sources.items():
            self.config = self.config.with_values({f"data.{name}": tuple(cut)})
        for field in ("sft_examples", "pairs", "prompts"):
            path = f"data.synthetic.{field}"
            self._set(path, min(getattr(data.synthetic, field), ROWS + LONGEST))
        # A usual share of the 72 rows of a source is a handful, and an evaluation takes `_HELD_OUT` prompts.
        self._set("data.eval_fraction", max(data.eval_fraction, 0.25))
        self._set("data.max_eval", min(data.max_eval, 2 * _HELD_OUT))
        self._set("data.min_rows", min(data.min_rows, 2))

    def _cut(self, field: str, name: SetName, index: int, source: Source) -> Source:
        """Write the first and the longest rows of a source to a file, and return it as a source."""
        if address_of(source).kind == "synthetic":
            return source
        try:
            rows = list(_first_and_longest(source, self._given))
        except RLHFError as error:
            raise InputError(
                f"{field}.path: {source.path} cannot be read here: {error.message}; give a copy of some rows"
                f" of it: {field}.path=FILE"
            ) from error
        file = self._place / "rows" / f"{name}-{index}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        self.copies[str(file)] = source.path
        self.rows[field] = f"{len(rows)} rows of {source.path}"
        return source.model_copy(update={"path": str(file), "revision": None, "subset": None, "limit": None})

    def _of_training(self) -> None:
        given = self._given
        for stage in ("sft", "reward", "dpo"):
            section = getattr(given, stage)
            if section.enabled:
                self._of_section(stage, section.batch_size)
                self._set(f"{stage}.threads", None)
        # On several ranks they need an engine, which PPO and the evaluation start as well.
        self._set("sft.samples", 0, "samples of the stage sft")
        judge, shared = given.reward.judge, self.config.reward.deepspeed
        if judge is not None and judge.deepspeed is None and shared.ranks > 1:
            # Each rank costs its start, and those of the reward model run the same code.
            alone = shared.model_copy(update={"ranks": 1, "zero_stage": 0})
            self._set("reward.judge.deepspeed", alone, "several ranks of the judge")
        ensemble = given.reward.ensemble
        if ensemble is not None:
            self._set("reward.ensemble.members", min(ensemble.members, 2))
        self._set("reward.min_accuracy", 0.0, "whether the reward model learns: a random model does not")

    def _of_section(self, field: str, batch: int) -> None:
        """Shorten the training of a section."""
        section = self._value(field)
        # `and` leaves None, with which the judge has the setting of the reward model.
        self._set(f"{field}.epochs", section.epochs and 1)
        ranks = 1
        if section.deepspeed is not None:
            ranks = self._sharding(f"{field}.deepspeed")
        # As full as that of the run: with a rest if the ranks do not divide it.
        rest = 1 if section.deepspeed is not None and batch % section.deepspeed.ranks else 0
        self._set(f"{field}.batch_size", section.batch_size and min(batch, _ROWS_OF_A_RANK * ranks + rest))
        if field != "reward.judge":
            self._set(f"{field}.checkpoint_every", 2)
        if section.lora is not None:
            self._set(f"{field}.lora.quantize", None, "weights in 4 bits")

    def _sharding(self, field: str) -> int:
        """Reduce the ranks of a model, and return their number."""
        sharded = self._value(field)
        ranks = self._fewer(sharded.ranks)
        self._set(f"{field}.ranks", ranks)
        self._set(f"{field}.hpz", 1, "the second copy of parameters on each host")
        self._set(f"{field}.offload", "none", "offload to host memory")
        if sharded.dtype == "float16":
            self._set(f"{field}.dtype", "bfloat16", "float16 and its loss scale")
        return ranks

    def _of_ppo(self) -> None:
        ppo = self._given.ppo
        policy = self._sharding("ppo.policy_deepspeed")
        critic = self._sharding("ppo.critic_deepspeed")
        self._set("ppo.reference_ranks", self._fewer(ppo.reference_ranks))
        self._set("ppo.reward_ranks", self._fewer(ppo.reward_ranks))
        samples, minibatches = min(ppo.samples_per_prompt, _SAMPLES), min(ppo.minibatches, _MINIBATCHES)
        ranks = max(policy, critic if ppo.uses_critic else 1)
        divides = ppo.minibatch_size % ppo.policy_deepspeed.ranks == 0
        self._set("ppo.samples_per_prompt", samples)
        self._set("ppo.minibatches", minibatches)
        # Whole minibatches of two responses or more for each rank, with a rest if those of the run have one.
        minibatch = math.lcm(2 * ranks, samples) + (0 if divides else samples)
        self._set("ppo.prompts_per_step", minibatch * minibatches // samples)
        steps = 2 * ppo.sync_every  # one before the kill, one after it
        self._set("ppo.steps", steps)
        # The default of 10 steps is never reached here, and the kill waits for the first checkpoint.
        self._set("ppo.checkpoint_every", ppo.sync_every)
        self._set("ppo.samples_every", 1)
        if ppo.longest_warmup:
            self._set("ppo.critic_warmup_steps", 1)
            self._set("ppo.critic_warmup_max_steps", 1, "a critic's warm-up that waits for its values")
        if ppo.evaluation_interval is not None:
            self._set("ppo.evaluate_every", steps)
        self._set("ppo.guards", {}, "guards that stop: a random model has no trend")
        self._set("ppo.max_kl", 1e6, "the limit of the KL")
        self._set("ppo.published_loss_limit", 1.0, "what a merge loses of a trained adapter")
        if ppo.lora is not None:
            self._set("ppo.lora.quantize", None, "weights in 4 bits")
        if ppo.ptx is not None:
            self._set("ppo.ptx.batch_size", min(ppo.ptx.batch_size, 2 * policy))
        graders = tuple(
            source.model_copy(update={"min_agreement": None})
            if isinstance(source, LanguageModelReward)
            else source
            for source in ppo.rewards
        )
        self._set("ppo.rewards", graders, "the agreement of grades with people")

    def _of_sampling(self) -> None:
        ppo, engine = self._given.ppo, self._given.ppo.engine
        new = min(ppo.max_new_tokens or _NEW_TOKENS, _NEW_TOKENS)
        longer = None if ppo.max_new_tokens == new else f"responses of more than {new} tokens"
        self._set("ppo.max_new_tokens", new, longer)
        if ppo.overlong is not None:
            share = ppo.overlong.buffer / (ppo.max_new_tokens or ppo.overlong.buffer)
            self._set("ppo.overlong.buffer", max(1, round(share * new)))
        self._set("ppo.engine.count", self._fewer(engine.count))
        self._set("ppo.engine.min_count", engine.min_count and 1)
        self._set("ppo.engine.tensor_parallel", 1, "engines on several GPUs")
        self._set("ppo.engine.sleep_level", 0, "engines that sleep while models train")
        # Compilation for a CPU takes minutes in each start, and shows nothing about GPUs.
        self._set("ppo.engine.enforce_eager", True, "compiled engines, and their CUDA graphs")
        self._set("ppo.engine.kv_cache_gib", min(engine.kv_cache_gib, 0.25))
        if engine.dtype == "float16":
            self._set("ppo.engine.dtype", "bfloat16", "float16 in the engines")
        self._set("ppo.weight_sync.backend", "auto", f"a sync by {ppo.weight_sync.backend}")
        if self._given.sample is not None:
            self._set("sample.prompts", _HELD_OUT)
            if self._given.labels_by_language_model:
                self._set("sample.judge", "reward", "labels of the language model")

    def _of_evaluation(self) -> None:
        evaluate = self._given.evaluate
        self._set("evaluate.prompts", min(evaluate.prompts, _HELD_OUT))
        self._set("evaluate.ranks", self._fewer(evaluate.ranks))
        self._set("evaluate.engines", self._fewer(evaluate.engines))
        if evaluate.language_model is not None:
            self._set("evaluate.language_model", None, "the agreement of the language model with people")
            if evaluate.judge == "language_model":
                self._set("evaluate.judge", "auto")
        sets = tuple(each.model_copy(update={"limit": _HELD_OUT}) for each in evaluate.regression)
        self._set("evaluate.regression", sets)


def _first_and_longest(source: Source, config: PipelineConfig) -> Iterator[str]:
    """Yield the first rows of a source and its longest ones, in their order. First ones may be bad."""
    texts = _texts(source, config)
    first = list(islice(texts, ROWS))
    # `texts` is an iterator, which goes on after the first rows here. No row is twice in the file.
    longest = heapq.nlargest(LONGEST, texts, key=lambda each: len(each[1]))
    yield from (text for _, text in (*first, *sorted(longest)))


def _texts(source: Source, config: PipelineConfig) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each row, without bad ones among those that are not the first."""
    for number, row in enumerate(islice(read_rows(source, config.store), _SEARCHED)):
        if not isinstance(row, BadRow):
            yield number, json.dumps(row.data, ensure_ascii=False)
        elif number < ROWS:
            yield number, " ".join(row.text.split())


# -- a small model with the architecture, tokenizer and attention pattern of a large one --


_HEAD = 32
"""Width of an attention head: the smallest that vLLM has on the CPU."""
_MOST_GROUPED = 2
"""Query heads of one key-value head, at most. The width is in proportion to them, and with a vocabulary of
128k tokens nearly all of the time goes into the embeddings.
"""
_EXPERT = 64
"""Width of an expert."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def shrink(source: Path, out: Path, seed: int) -> str:
    """Write a small model in the place of a large one, and say how it differs.

    Only depth and width are less. A kind of layer, such as one with a sliding window, occurs at least once.

    Args:
        source: Folder with `config.json` and a tokenizer. Its weights are not read.
        out: Is created.
        seed: Seed of the random weights.

    Raises:
        InputError: `source` has no `config.json`, or no model of this shape can be made.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not (source / "config.json").is_file():
        raise InputError(
            f"--model: {source} has no config.json; give a folder with config.json and tokenizer.json"
        )
    try:
        config = model_config(source, attention="sdpa")
        before = (config.num_hidden_layers, config.hidden_size)
        _make_small(config)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None))
    # transformers has no common error for a shape that it cannot build.
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"--model: no small model can be made of {source}/config.json: {type(error).__name__}:"
            f" {str(error)[:200]}; give a folder of the same architecture that is small already"
        ) from error
    model.save_pretrained(out)
    for file in source.iterdir():
        is_weights = file.name.endswith(_WEIGHTS) or file.name == "config.json"
        if file.is_file() and not is_weights and not (out / file.name).exists():
            shutil.copy(file, out)
    after = (config.num_hidden_layers, config.hidden_size)
    return f"{after[0]} of {before[0]} layers, width {after[1]} in place of {before[1]}, random weights"


def _make_small(config: Any) -> None:
    """Reduce depth and width of a configuration of transformers, in place."""
    heads = config.num_attention_heads
    groups = max(1, heads // (getattr(config, "num_key_value_heads", None) or heads))
    # Grouped queries stay grouped, and several heads stay several: both have code of their own.
    kv_heads = 1 if groups > 1 else 2
    heads_now = kv_heads * min(groups, _MOST_GROUPED)
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not _fixes_head(config):
        head = min(head, _HEAD)
    layers = config.num_hidden_layers
    kept = min(layers, max(2, _with_every_kind(getattr(config, "layer_types", None) or [])))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:kept])  # one entry for each layer
    smaller = {
        "num_hidden_layers": kept,
        "num_attention_heads": heads_now,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_size": heads_now * head,
        "intermediate_size": 2 * heads_now * head,
        "moe_intermediate_size": _EXPERT,
        "shared_expert_intermediate_size": _EXPERT,
    }
    for name, value in smaller.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)


def _fixes_head(config: Any) -> bool:
    """Return whether the positions have one number for each part of a head, as those of type longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, list) for value in rope.values())


def _with_every_kind(kinds: list[str]) -> int:
    """Return the number of layers from the first on that have one of each kind."""
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
