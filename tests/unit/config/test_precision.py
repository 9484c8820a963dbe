"""Which precision a configuration that says nothing has.

- bfloat16 where it runs on GPUs, float32 on CPUs; a configured value stays
- engines follow the policy, unless they have a precision of their own
- where the driver lists GPUs that torch cannot use, a stage says so: it does not train on the CPU in their
  place
- `rlhf plan` for GPUs counts with what is usual there, on whatever machine it runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.load import config_from_tree
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import ConfigError
from rlhf_core.ops.plan.plan import make_plan
from tests.support.scripted_machine import ScriptedMachine, on_machine

TRAINED = ("sft.deepspeed", "reward.deepspeed", "ppo.policy_deepspeed", "ppo.critic_deepspeed", "ppo.engine")


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def precisions(tree: dict[str, Any], gpus: int, name: str = "NVIDIA L40S") -> list[str]:
    with on_machine(ScriptedMachine(gpus=[name] * gpus)):
        dump = config_from_tree(tree, "test").model_dump()
    return [str(dump[section][field]["dtype"]) for section, field in (path.split(".") for path in TRAINED)]


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 0, "float32"), ("auto", 2, "bfloat16"), ("cpu", 2, "float32"), ("cuda", 0, "bfloat16")],
)
def test_defaults_depend_on_the_device(device: str, gpus: int, expected: str) -> None:
    assert precisions({"run": {"device": device}}, gpus) == [expected] * 5


@pytest.mark.parametrize("available", [False, True])
def test_a_gpu_that_torch_cannot_use_is_not_replaced_by_the_cpu(
    available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever torch was built for, and whatever this machine has.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with on_machine(ScriptedMachine(gpus=["NVIDIA L40S"])):
        assert resolve_device("cpu") == "cpu"
        for wanted in ("auto", "cuda"):
            if available:
                assert resolve_device(wanted) == "cuda"
                continue
            with pytest.raises(
                ConfigError, match=f"run.device={wanted} resolves to cuda on this host, but torch.cuda is not"
            ):
                resolve_device(wanted)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla T4", "float32"),
        ("Tesla V100-SXM2-16GB", "float32"),
        ("NVIDIA GeForce RTX 2080 Ti", "float32"),
        ("Quadro RTX 6000", "float32"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16"),
        ("NVIDIA GeForce RTX 4090", "bfloat16"),
        ("NVIDIA RTX A6000", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "bfloat16"),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16"),
        ("NVIDIA L40S", "bfloat16"),
    ],
)
def test_gpus_that_do_not_know_bfloat16_have_float32(name: str, expected: str) -> None:
    assert precisions({}, 1, name) == [expected] * 5


def test_given_values_stay_and_engines_follow_the_policy() -> None:
    tree: dict[str, Any] = {"ppo": {"policy_deepspeed": {"dtype": "float16", "zero_stage": 2}}}
    assert precisions(tree, 1) == ["bfloat16", "bfloat16", "float16", "bfloat16", "float16"]
    tree["ppo"]["engine"] = {"dtype": "float32"}
    assert precisions(tree, 1)[-1] == "float32"
    assert precisions(tree, 0) == ["float32", "float32", "float16", "float32", "float32"]


def test_a_plan_for_gpus_uses_the_defaults_of_gpus(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: {name: x}\n")
    assert make_plan(str(file), (), None, None).config.sft.deepspeed.dtype == "float32"
    assert make_plan(str(file), (), "1xH100", None).config.sft.deepspeed.dtype == "bfloat16"
