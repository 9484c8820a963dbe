"""What was trained is what is judged: a bfloat16 policy with an adapter, and the files that evaluation loads.

- base model and adapter give the trained policy's log-probabilities, bit for bit; the merged model does so in
  float32
- the merge rounded to bfloat16 has lost a large part of a small update; above the limit the stage fails, and
  says what to do
- on a cluster all models are loaded by ranks, in one session, which get the folders through the stage's hosts
- outside float32 the adapter is synced and judged by itself, unless the configuration says otherwise
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import GateFailed, ModelError
from rlhf_core.evaluation import during_ppo
from rlhf_core.evaluation.during_ppo import TrainedPolicy, measure_published
from rlhf_core.evaluation.policy_files import PolicyFiles, policy_files
from rlhf_core.evaluation.scoring import ResponseScorer
from rlhf_core.models.adapters import adapter_name, add_adapter, load_adapter, merged, save_adapter
from rlhf_core.models.policy import load_policy
from rlhf_core.models.scoring import sequence_logprobs, single_process_batches
from rlhf_core.stages.gates import check_gate
from rlhf_core.testing import stage_context
from rlhf_core.testing.ranks import RayCall, scripted_ranks
from rlhf_core.types import ArtifactRef
from tests.support.tiny_llama import save_tiny_llama
from tests.support.weight_streams import stream_of

LORA = LoraConfig(r=16, alpha=32)
SMALL = 3e-4
"""Size of B after a few hundred steps of AdamW at 1e-5."""


def config_of(dtype: str = "bfloat16", **ppo: Any) -> PipelineConfig:
    settings = {"lora": {}, "policy_deepspeed": {"dtype": dtype}, "engine": {"dtype": dtype}} | ppo
    return PipelineConfig.model_validate_json(json.dumps({"run": {"device": "cpu"}, "ppo": settings}))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, TrainedPolicy]:
    return save_artifacts(tmp_path_factory.mktemp("artifacts"), SMALL)


def save_artifacts(folder: Path, size: float) -> tuple[Path, Path, TrainedPolicy]:
    """Save artifacts as the stages do, and return (ppo, sft, log-probabilities of the policy in memory)."""
    sft, ppo = folder / "sft", folder / "ppo"
    torch.manual_seed(0)
    save_tiny_llama(folder / "start", hidden_size=256, intermediate_size=512, dtype=torch.bfloat16)
    start = load_policy(folder / "start", dtype="bfloat16", attention="sdpa", device="cpu")
    start.save(sft / "model")
    policy = load_policy(sft / "model", dtype="bfloat16", attention="sdpa", device="cpu")
    add_adapter(policy, LORA)
    assert policy.lora is not None
    for name, parameter in policy.lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=size)
    sequences = [(tuple(range(3, 9)), tuple(torch.randint(3, 60, (12,)).tolist())) for _ in range(16)]
    logprobs, _ = sequence_logprobs(policy.eval(), single_process_batches(policy, sequences, 4096, 0), 1.0)
    named = dict(policy.lm.named_parameters())
    tensors = {new: tensor.detach() for name, tensor in named.items() if (new := adapter_name(name))}
    save_adapter(ppo / "adapter", policy.lm, policy.lora, tensors, "base")
    policy.save(ppo / "policy", stream_of(dict(merged(named, policy.lora, torch.float32))))
    return ppo, sft, TrainedPolicy(sequences, [values.numpy() for values in logprobs])


def check(config: PipelineConfig, artifacts: tuple[Path, Path, TrainedPolicy]) -> dict[str, float]:
    ppo, sft, trained = artifacts
    found = measure_published(config, trained, ppo, sft, pad_id=0, device="cpu", context=stage_context(ppo))
    check_gate(config, "ppo", found)
    return found


def test_base_and_adapter_are_the_trained_policy_and_a_merge_in_bfloat16_is_not(
    artifacts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = check(config_of(), artifacts)
    assert found["published/logprob_gap"] == 0.0 and found["published/loss"] == 0.0
    assert found["published/logprob_update"] > 1e-3
    assert found["published/merge_loss"] > 0.3
    assert "serve the SFT model with adapter/, or policy/ in float32" in caplog.text


def test_a_stage_whose_judged_files_lost_the_update_fails(artifacts: Any) -> None:
    merge = config_of(weight_sync={"lora": "merged"})
    with pytest.raises(
        GateFailed,
        match=(
            r"loses \d+% of the change by training, above ppo.published_loss_limit=0.1; leave it out, or use"
        ),
    ):
        check(merge, artifacts)
    with pytest.raises(
        GateFailed, match=r"merged \(ppo.lora.r: 1024\) and rounded .*; use at most 512, train in float32"
    ):
        check_gate(config_of(lora={"r": 1024}), "ppo", {"published/loss": 0.2})
    raised = config_of(weight_sync={"lora": "merged"}, published_loss_limit=1.0)
    assert check(raised, artifacts)["published/loss"] > 0.3


def as_trained_in_float32(config: PipelineConfig, artifacts: Any) -> TrainedPolicy:
    """Return the log-probabilities that base model and adapter have in float32."""
    ppo, sft, trained = artifacts
    files = PolicyFiles(sft / "model", ppo / "adapter")
    exact = ResponseScorer(config, 0, "cpu").logprobs(files, trained.sequences, 1.0)
    return TrainedPolicy(trained.sequences, [values.numpy() for values in exact])


def test_a_merge_that_only_the_engines_round_counts_as_a_loss(artifacts: Any) -> None:
    ppo, sft, _ = artifacts
    mixed = config_of(weight_sync={"lora": "merged"}, policy_deepspeed={"dtype": "float32"})
    assert mixed.ppo.served_dtype == "bfloat16"
    in_float32 = as_trained_in_float32(mixed, artifacts)
    found = measure_published(mixed, in_float32, ppo, sft, pad_id=0, device="cpu", context=stage_context(ppo))
    assert found["published/logprob_gap"] < 1e-5 and found["published/loss"] > 0.3


def test_the_merged_policy_is_saved_in_float32_and_is_the_trained_one_there(artifacts: Any) -> None:
    ppo, sft, trained = artifacts
    assert json.loads((ppo / "policy" / "config.json").read_text())["dtype"] == "float32"
    exact = policy_files(config_of().ppo, ppo, lambda: sft)
    scorer = ResponseScorer(config_of("float32"), 0, "cpu")
    merge, apart = (
        scorer.logprobs(files, trained.sequences, 1.0) for files in (PolicyFiles(ppo / "policy"), exact)
    )
    assert during_ppo.mean_gap(merge, apart) < 1e-6


def test_files_that_are_not_the_trained_policys_fail_the_stage(artifacts: Any) -> None:
    ppo, sft, trained = artifacts
    other = TrainedPolicy(trained.sequences, [values + 0.2 for values in trained.logprobs])
    with pytest.raises(
        GateFailed, match=r"differ from the trained policy by 0.2 nats per token, more than 0.05 "
    ):
        check(config_of(), (ppo, sft, other))


def test_files_without_the_effect_of_training_fail_the_stage(tmp_path: Path) -> None:
    """Their gap is below the fixed tolerance of bfloat16, and as large as the distance from the SFT model."""
    ppo, sft, trained = save_artifacts(tmp_path, 5.5e-3)
    found = check(config_of(), (ppo, sft, trained))
    assert found["published/logprob_gap"] == 0.0
    assert 0.04 < found["published/logprob_change"] < 0.05
    file = ppo / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(GateFailed, match=r"differ from the trained policy by .* more than .* do not match"):
        check(config_of(), (ppo, sft, trained))
    check(config_of(weight_sync={"canary_tolerance": 0.1}), (ppo, sft, trained))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "change", "allowed"),
    [
        ("float32", 1e-4, 1.0, 1e-4),
        ("float32", 0.01, 0.0, 0.01),
        ("bfloat16", 1e-3, 0.0, 0.02),
        ("bfloat16", 1e-3, 0.06, 0.03),
        ("bfloat16", 0.05, 1.0, 0.05),
        ("bfloat16", 0.1, 0.0, 0.1),
    ],
)
def test_largest_gap_follows_the_precision_the_tolerance_and_the_effect_of_training(
    dtype: str, tolerance: float, change: float, allowed: float
) -> None:
    config = config_of(dtype, weight_sync={"canary_tolerance": tolerance})
    assert during_ppo._allowed_gap(config, change) == allowed


def test_empty_responses_are_left_out_and_nothing_but_them_is_named(artifacts: Any) -> None:
    ppo, sft, trained = artifacts
    empty = ((3, 4, 5), ()), np.zeros(0, np.float32)
    some = TrainedPolicy([empty[0], *trained.sequences], [empty[1], *trained.logprobs])
    assert check(config_of(), (ppo, sft, some))["published/logprob_gap"] == 0.0
    with pytest.raises(GateFailed, match="the last rollouts have no response token"):
        check(config_of(), (ppo, sft, TrainedPolicy([empty[0]], [empty[1]])))


class SharedFolders:
    """The other hosts of a stage, which get folders."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.have_left = False
        self.stored: Mapping[Path, str] = {}

    def check(self) -> None: ...

    def join(self, ranks: Mapping[str, Mapping[str, Collection[int]]]) -> None: ...

    def add_inputs(self, refs: Sequence[ArtifactRef]) -> None: ...

    def gather(self, folder: Path) -> None: ...

    def share(self, folder: Path) -> None:
        self.folders.append(folder)

    def leave(self) -> None:
        self.have_left = True


def test_on_a_cluster_all_models_are_loaded_by_ranks_in_one_session(
    artifacts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter, the SFT model, and the merge in both precisions."""
    ppo, sft, _ = artifacts
    nodes = SharedFolders()
    context = replace(stage_context(ppo), nodes=nodes)
    mixed = config_of(policy_deepspeed={"dtype": "float32"})
    trained = as_trained_in_float32(mixed, artifacts)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with scripted_ranks() as calls:
        measure_published(mixed, trained, ppo, sft, pad_id=0, device="cpu", context=context)
    assert calls == [RayCall("connect", 1), *[RayCall("training rank", 1)] * 4, RayCall("disconnect")]
    assert set(nodes.folders) == {sft / "model", ppo / "adapter", ppo / "policy"} and nodes.have_left


def test_an_adapter_of_another_model_is_refused(artifacts: Any, tmp_path: Path) -> None:
    small = save_tiny_llama(tmp_path, num_hidden_layers=1)
    policy = load_policy(small, dtype="float32", attention="sdpa", device="cpu")
    with pytest.raises(ModelError, match="does not belong to its model"):
        load_adapter(policy, artifacts[0] / "adapter")


@pytest.mark.parametrize(
    ("dtype", "settings", "apart"),
    [
        ("float32", {}, False),
        ("bfloat16", {}, True),
        ("bfloat16", {"lora": {"r": 600}}, False),
        ("bfloat16", {"lora": {"quantize": "nf4"}}, False),
        ("bfloat16", {"weight_sync": {"lora": "merged"}}, False),
        ("float32", {"weight_sync": {"lora": "adapter"}}, True),
        ("float32", {"engine": {"dtype": "bfloat16"}}, True),
        ("bfloat16", {"lora": None}, False),
    ],
)
def test_outside_float32_the_adapter_is_kept_apart_from_its_model(
    dtype: str, settings: Any, apart: bool, artifacts: Any
) -> None:
    config = config_of(dtype, **settings)
    assert config.ppo.syncs_adapter is apart
    assert (policy_files(config.ppo, artifacts[0], lambda: artifacts[1]).adapter is not None) is apart
