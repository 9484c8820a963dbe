"""The first thing that differs between two recordings of PPO, in causal order.

    of each step    prompt -> seed -> weight -> token -> log-probability -> score -> advantage -> gradient
                    -> new weight
    of a row        the first response, and in it the first token

A thing that differs can be the cause of everything after it, and of nothing before it. The sums of a step are
those of `metrics.jsonl`: losses and norms of gradients, in full precision. They take the place of digests:
hashing the gradients would take longer than anything else that is recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import key_fields, rounding_settings
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.record.reader import RECORD, parts_of, read_rollouts
from rlhf_core.record.schema import REWARD, WEIGHTED

Kind = Literal[
    "prompt",
    "seed",
    "weight",
    "token",
    "log-probability",
    "score",
    "advantage",
    "gradient",
    "new weight",
]
"""What differs, in causal order."""

_Columns = tuple[tuple[Kind, tuple[str, ...]], ...]
_BEFORE_UPDATE: _Columns = (
    ("prompt", ("prompt_id", "source", "prompt_ids", "group")),
    ("seed", ("seed",)),
    ("weight", ("policy_version", "weights")),
    ("token", ("response_ids", "finished")),
    ("log-probability", ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")),
    ("score", (REWARD, WEIGHTED, "ensemble_std", "total", "score", "excluded")),
    ("advantage", ("kl", "advantages", "returns")),
)
"""Columns before the update; a name that ends with a slash stands for all that begin with it."""
_AFTER_UPDATE: _Columns = (("new weight", ("new_logprobs",)),)

_OF_UPDATE = ("loss/", "policy/", "value/", "ppo/skipped_steps")
_OF_EXPERIENCE = ("policy/entropy", "value/mean", "value/explained_variance")
"""Metrics that begin as one of `_OF_UPDATE`, but are known before the update."""

_FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "weight": ("inputs.sft",),
    "token": (
        *("ppo.temperature", "ppo.max_new_tokens", "ppo.engine.", "run.threads"),
        *("versions.torch", "versions.transformers", "versions.vllm"),
    ),
    "log-probability": ("inputs.reward", "ppo.micro_batch_tokens", "ppo.pack", "versions.deepspeed"),
    "score": ("ppo.rewards.", "ppo.score_clip", "ppo.missing_eos_penalty", "ppo.overlong.", "inputs.judge"),
    "advantage": ("ppo.kl.", "ppo.gamma", "ppo.lam", "ppo.advantages.", "ppo.whiten_advantages"),
    "gradient": (
        # `ppo.steps` is here because the learning rate follows from the share of all steps that are done.
        *("ppo.policy.", "ppo.critic.", "ppo.loss", "ppo.epochs", "ppo.minibatches", "ppo.steps"),
        *("ppo.clip_", "ppo.dual_clip", "ppo.value_clip", "ppo.critic_warmup_", "ppo.ema_decay", "ppo.ptx."),
    ),
}
"""The first thing that a setting, input or version can change in step 1, by the beginnings of their names.
Any other one can change everything.
"""

_NO_STEP = ("ppo.evaluate_", "ppo.publish", "ppo.stop_patience")
"""Settings of PPO that change no step."""


@dataclass(frozen=True)
class Difference:
    """The first thing that differs."""

    step: int
    kind: Kind
    name: str
    """Column or metric."""
    one: Any
    other: Any
    index: int | None = None
    """Number of the response in its step; None if it is of the whole step."""
    position: int | None = None
    """Number of the token; None if it is of the whole response."""

    def describe(self) -> str:
        """Return it in words, such as `step 3, token: response_ids of response 5, position 4: 17 and 29`."""
        place = "" if self.index is None else f" of response {self.index}"
        place += "" if self.position is None else f", position {self.position}"
        return (
            f"step {self.step}, {self.kind}: {self.name}{place}: {_shown(self.one)} and {_shown(self.other)}"
        )

    def can_be_explained_by(self, name: str) -> bool:
        """Return whether a setting, version or input with another value can be the cause."""
        kinds = get_args(Kind)
        earliest = next((kind for kind, names in _FIELDS.items() if name.startswith(names)), kinds[0])
        # In later steps all of them act on the weights.
        return self.step > 1 or kinds.index(earliest) <= kinds.index(self.kind)


@dataclass(frozen=True)
class Recording:
    """What PPO recorded.

    Args:
        folder: An artifact of `ppo`, or one of its checkpoints.
        name: For messages.
    """

    folder: Path
    name: str

    @cached_property
    def steps(self) -> Collection[int]:
        """The recorded steps, ascending; empty without a record."""
        if not parts_of(self.folder / RECORD):
            return []
        recorded: list[int] = read_rollouts(self.folder, ["step"])["step"].unique().to_pylist()
        return recorded

    def rollouts(self, step: int) -> pa.Table:
        """Return the rows of a step. Raises InputError if it is not recorded."""
        table = read_rollouts(self.folder, steps=[step])
        if not len(table):
            raise InputError(
                f"--step: must be a recorded step of {self.name}; got {step}; it has {min(self.steps)} to"
                f" {max(self.steps)}"
            )
        return table

    @cached_property
    def metrics(self) -> Mapping[int, Mapping[str, float]]:
        """The metrics of each step."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return {row.pop("step"): row for row in map(json.loads, lines)}

    def weights_after(self, step: int) -> str | None:
        """Return the digest of the weights after a step; None if it is not known."""
        weights: str | None
        state = self.folder / "controller.json"  # of a checkpoint
        if state.is_file():
            found = json.loads(state.read_text(encoding="utf-8"))
            # A kept folder can have a later checkpoint, whose weights are those of another step.
            if found["done"] == step:
                weights = found.get("weights")
                return weights
        if step + 1 not in self.steps:
            return None
        following = self.rollouts(step + 1)
        if "weights" not in following.column_names:  # the record of an earlier release
            return None
        weights = following["weights"][0].as_py()
        return weights


def first_difference(one: Recording, other: Recording, step: int) -> Difference | None:
    """Return the first difference of the steps until `step`; None if there is none.

    Columns that only one of them has are not compared, and of steps that only one has recorded, only the
    metrics are.
    """
    for number in range(1, step + 1):
        for found in _differences(one, other, number):
            return found
    return None


def columns_compared(one: pa.Table, other: pa.Table) -> list[str]:
    """Return the columns that both rows of a step have, without those that identify a row."""

    def has_values(table: pa.Table, name: str) -> bool:
        return name in table.column_names and table[name].null_count < len(table)

    names = [name for name in one.column_names if name not in ("kind", "step", "index")]
    return [name for name in names if has_values(one, name) and has_values(other, name)]


def _differences(one: Recording, other: Recording, step: int) -> Iterator[Difference]:
    """Yield differences of a step in causal order, at most one of each column."""
    rows = None
    if step in one.steps and step in other.steps:
        rows = one.rollouts(step), other.rollouts(step)
        yield from _in_columns(*rows, _BEFORE_UPDATE, step)
    yield from _in_metrics(one.metrics.get(step, {}), other.metrics.get(step, {}), step)
    if rows is not None:
        yield from _in_columns(*rows, _AFTER_UPDATE, step)
    after, other_after = one.weights_after(step), other.weights_after(step)
    if None not in (after, other_after) and after != other_after:
        yield Difference(step, "new weight", "weights after the step", after, other_after)


def _in_columns(one: pa.Table, other: pa.Table, columns: _Columns, step: int) -> Iterator[Difference]:
    # A column that is null in only one of the two was not recorded, but for `excluded`.
    common = {*columns_compared(one, other), "excluded"}
    for kind, names in columns:
        for name in _expanded(names, common):
            # This is quick, but NaN is not equal to NaN.
            if one[name].equals(other[name]):
                continue
            if (found := _in_column(one[name].to_pylist(), other[name].to_pylist())) is not None:
                yield Difference(step, kind, name, *found)
        if kind == "prompt" and len(one) != len(other):
            yield Difference(step, kind, "number of responses", len(one), len(other))


def _expanded(names: Sequence[str], common: Collection[str]) -> list[str]:
    """Return the columns of `common` that `names` stands for."""
    found = []
    for name in names:
        is_prefix = name.endswith("/")
        found += sorted(each for each in common if each == name or (is_prefix and each.startswith(name)))
    return found


def _in_column(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any, int, int | None] | None:
    """Return the first two values that differ, with the response and the position in it."""
    # Not strict: another number of responses is a difference of its own, which `_in_columns` yields.
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if _equal(a, b):
            continue
        if not isinstance(a, list) or not isinstance(b, list):
            return a, b, index, None
        # Not strict: if one is the beginning of the other, they part at the end of the shorter one.
        pairs = enumerate(zip(a, b, strict=False))
        position = next((place for place, pair in pairs if not _equal(*pair)), min(len(a), len(b)))
        first, second = [row[position] if position < len(row) else "nothing" for row in (a, b)]
        return first, second, index, position
    return None


def _in_metrics(one: Mapping[str, float], other: Mapping[str, float], step: int) -> Iterator[Difference]:
    """Yield the sums of the experience, and then those of the update, that differ."""
    found = [name for name, value in one.items() if name in other and not _equal(value, other[name])]
    of_update = [name for name in found if name.startswith(_OF_UPDATE) and name not in _OF_EXPERIENCE]
    for name in found:
        if name not in of_update:
            yield Difference(step, "advantage", name, one[name], other[name])
    for name in of_update:
        yield Difference(step, "gradient", name, one[name], other[name])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        # Python's comparison of lists is much faster, and decides all lists without NaN.
        return one == other or (len(one) == len(other) and all(map(_equal, one, other)))
    return bool(one == other) or (_is_nan(one) and _is_nan(other))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _shown(value: Any) -> str:
    # All digits: two numbers that differ must not look equal.
    return repr(value) if not isinstance(value, list) else f"{len(value)} tokens"


# -- what can explain it --


def differing(*runs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what differs between runs, with the value of each."""
    found = {}
    for name in dict.fromkeys(chain.from_iterable(runs)):
        values = tuple(each.get(name) for each in runs)
        if any(value != values[0] for value in values):
            found[name] = values
    return found


def conditions(run: FinishedRun) -> dict[str, Any]:
    """Return everything that the numbers of a run's PPO follow from, by flat names: settings, versions, and
    digests of the inputs and of files such as rewards.
    """
    artifacts, ref = run.artifact("ppo")
    config, origin = run.config("ppo"), artifacts.origin(ref)
    inputs = {f"inputs.{name}": digest[:16] for name, digest in origin.parents.items()}
    files = of_files(origin.decided_by.get("sources", {}))
    return settings_of(config) | of_versions(origin.versions) | inputs | files


def of_files(digests: Mapping[str, str]) -> dict[str, str]:
    """Return digests of files by the field that names them, with names as in `conditions`."""
    return {f"{field}.content": digest[:16] for field, digest in digests.items()}


def of_versions(found: Mapping[str, str]) -> dict[str, str]:
    """Return versions with names as in `conditions`. The commit is left out: `code` is what it changes."""
    return {f"versions.{name}": value for name, value in found.items() if name != "git"}


def settings_of(config: PipelineConfig) -> dict[str, Any]:
    """Return the settings that PPO depends on directly. Those of earlier stages act through its inputs."""
    fields = {}
    for name, value in key_fields(config, {}).items():
        if name.startswith(("ppo.", "model.", "run.seed")) and not name.startswith(_NO_STEP):
            fields[name] = value
    return fields | rounding_settings(config, "ppo") | {"run.threads": config.run.threads}
