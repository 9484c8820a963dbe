"""Which held-out prompts are for what, and which prompts a policy and its judges were trained on.

Of the held-out prompts, the first ones are for the evaluation and the match, the last ones for the
evaluations during PPO, which choose the policy. They are in the order of the split, which does not depend on
sources, so both parts have the sources in the same proportions, up to chance. If PPO's evaluations choose the
policy, their prompts are left out of the evaluation and the match, if enough others remain.

Every artifact names the artifacts that it was made from, and the configuration of its run. If its base model,
that of its judge, or one of its sources is in an artifact of another run, the data of that run count as well,
and so on:

    policy -> data
           -> base model `champion:NAME` -> its data -> its base model ...
           -> source `sample/best.jsonl` -> the data of the run that sampled ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import LEAST_PROMPTS
from rlhf_core.config.data import SETS
from rlhf_core.data.dataset import load_prompts, load_sft, read_pair_groups, sft_prompts
from rlhf_core.errors import CorruptArtifact, StoreError, StoreUnavailable
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.storage.artifacts import (
    ArtifactAddress,
    ArtifactStore,
    parse_artifact_address,
    parse_artifact_copy,
)
from rlhf_core.system.files import json_sha256
from rlhf_core.system.home import Home
from rlhf_core.types import PromptExample


def prompts_of_evaluation(
    config: PipelineConfig, held_out: Sequence[PromptExample], usable: Sequence[PromptExample] | None = None
) -> list[PromptExample]:
    """Return the first `evaluate.prompts` of the `usable` held-out prompts (None: all), or all if there are
    fewer. Groups that choose PPO's policy are left out if `LEAST_PROMPTS` other groups, or
    `evaluate.prompts` if that is less, remain.
    """
    prompts = list(held_out if usable is None else usable)
    count = config.evaluate.prompts
    if config.evaluations_choose:
        choosing = {prompt.group for prompt in prompts_of_ppo(config, held_out)}
        others = [prompt for prompt in prompts if prompt.group not in choosing]
        # By groups, as the tests count them: prompts of one group are one outcome.
        if len({prompt.group for prompt in others}) >= min(LEAST_PROMPTS, count):
            prompts = others
    return prompts[:count]


def prompts_of_ppo(config: PipelineConfig, held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the last `ppo.evaluate_prompts` held-out prompts, or all if there are fewer."""
    # The type allows no 0, with which this slice would be all prompts.
    return list(held_out[-config.ppo.evaluate_prompts :])


def shared_prompts(config: PipelineConfig, held_out: Sequence[PromptExample]) -> int:
    """Return how many prompts of the evaluation are of a group of the evaluations during PPO."""
    of_ppo = {prompt.group for prompt in prompts_of_ppo(config, held_out)}
    return sum(prompt.group in of_ppo for prompt in prompts_of_evaluation(config, held_out))


@dataclass(frozen=True)
class TrainedPrompts:
    """Prompts of training data. It contains a prompt that is one of them or of the same group."""

    ids: frozenset[str]
    """Ids of the prompts of PPO and of the pairs, and of the groups of all rows."""
    tokens: frozenset[str]
    """Digests of the tokens of the prompts of demonstrations, whose groups earlier versions did not store."""

    @classmethod
    def of(cls, folders: Sequence[Path]) -> TrainedPrompts:
        """Return the prompts of the training splits of data artifacts.

        Args:
            folders: Folders of the data artifacts.

        Raises:
            DataError: A file is missing or damaged.
        """
        ids: set[str] = set()
        tokens: set[str] = set()
        for folder in folders:
            for prompt in load_prompts(folder, "train"):
                ids.update((prompt.prompt_id, prompt.group))
            for _, prompt_id, group in read_pair_groups(folder, "train"):
                ids.update((prompt_id, group))
            for example in load_sft(folder, "train"):
                ids.add(example.group)
                tokens.update(map(_digest, sft_prompts(example)))
        # Earlier versions stored no group with demonstrations, which is read as "".
        return cls(frozenset(ids - {""}), frozenset(tokens))

    def __contains__(self, prompt: PromptExample) -> bool:
        return (
            prompt.prompt_id in self.ids
            or prompt.group in self.ids
            or _digest(prompt.input_ids) in self.tokens
        )

    def untrained(self, prompts: Sequence[PromptExample]) -> list[PromptExample]:
        """Return the prompts of the groups of which none is a training prompt."""
        trained = {prompt.group for prompt in prompts if prompt in self}
        return [prompt for prompt in prompts if prompt.group not in trained]


def _digest(tokens: Sequence[int]) -> str:
    return json_sha256(tuple(tokens))[:16]


def data_of_ancestors(
    config: PipelineConfig, artifacts: ArtifactStore, made: Mapping[str, Any]
) -> list[Path]:
    """Return the data artifacts of the runs whose artifacts a run used as base models or as sources.

    Args:
        config: The present configuration, for the access to other stores.
        artifacts: The store of the run.
        made: Configuration of the run, without references.

    Raises:
        CorruptArtifact: One of them is in no store any more, is damaged, or is in another store that refuses
            the access.
    """
    # By manifests, and not by the registry, where versions can be deleted (decision 37).
    found: dict[tuple[str, str], Path] = {}
    waiting = [(artifacts, used) for used in _used(made)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        store, used = waiting.pop()
        # Rounds share ancestors: without this, the walk could double with each generation.
        if (used.stage, used.key) in seen:
            continue
        seen.add((used.stage, used.key))
        ref = store.find(used.stage, used.key)
        if ref is None and used.address is not None:
            store = used.address.open_store(Home.of(config.run.home), config.store.endpoint)
            try:
                ref = store.find(used.stage, used.key)
            # An outage passes: the attempt is repeated.
            except StoreUnavailable:
                raise
            except StoreError as error:  # no bucket, or no permission: later attempts would fail as well
                raise CorruptArtifact(
                    f"the data of {used.stage}/{used.key}, which it was made from, cannot be read"
                    f" ({error.message})"
                ) from error
        data = ref if ref is None or used.stage == "data" else store.parent(ref, "data")
        if ref is None or data is None:
            raise CorruptArtifact(
                f"the data of {used.stage}/{used.key}, which it was made from, are not in its store"
            )
        found[data.key, data.digest] = store.fetch(data)
        waiting += [(store, each) for each in _used(store.config(ref))]
    return [found[identity] for identity in sorted(found)]


class _Used(NamedTuple):
    """An artifact that a configuration names."""

    stage: StageName
    key: str
    address: ArtifactAddress | None
    """None for a local copy whose store is not known."""


def _used(config: Mapping[str, Any]) -> Iterator[_Used]:
    paths = [config["model"]["path"], (config["reward"].get("judge") or {}).get("path")]
    for name in SETS:
        paths += [source["path"] for source in config["data"].get(name) or ()]
    for path in paths:
        address = parse_artifact_address(path or "")
        copy = parse_artifact_copy(path or "")
        if address is not None:
            named, key = address.stage, address.key
        elif copy is not None:
            named, key, address = copy.stage, copy.key, copy.address
        else:
            continue
        stage = next((name for name in STAGES if name == named), None)
        if stage is not None:
            yield _Used(stage, key, address)
