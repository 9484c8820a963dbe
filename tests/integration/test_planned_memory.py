"""What `rlhf plan` predicts is what training allocates, on the CPU through the real DeepSpeed.

- parameters, gradients and optimizer state on 1 and 2 ranks under ZeRO 0 to 3, in float32 and bfloat16: to
  the byte (gradients of ZeRO 2: to the parameter that straddles the ranks' border)
- the peak of an SFT step, activations and logits included, in either precision, with checkpointing and
  adapters, under each ZeRO stage: within 5 %
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.memory import ForwardPass, Model
from rlhf_core.system.processes import free_port
from tests.integration.deepspeed_memory import LENGTHS, PEAKS, SHAPE, measure_states
from tests.integration.deepspeed_step import model
from tests.support.prepared_ranks import ENVIRONMENT, spawn

TOLERANCE = 0.05


def measured_peaks(tmp_path: Path) -> Any:
    script = str(Path(__file__).parent / "deepspeed_memory.py")
    paths = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    command = [sys.executable, script, str(tmp_path / "found.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "found.json").read_text())


def shape(found: dict[str, Any]) -> ModelShape:
    heads = found["num_attention_heads"]
    return ModelShape(
        found["hidden_size"], found["intermediate_size"], found["num_hidden_layers"], heads,
        found.get("num_key_value_heads", heads), found["hidden_size"] // heads, found["vocab_size"],
        tied=False,
    )  # fmt: skip


def planned_model(settings: dict[str, Any]) -> Model:
    lora = LoraConfig.model_validate(settings["lora"]) if "lora" in settings else None
    deepspeed = {name: value for name, value in settings.items() if name not in ("lora", "scores")}
    scores = bool(settings.get("scores"))
    return Model(
        shape(SHAPE), DeepSpeedConfig.model_validate(deepspeed), scores=scores, lora=lora, device="cpu"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_predicted_state_is_what_deepspeed_allocates(ranks: int, tmp_path: Path) -> None:
    tiny = model("policy")
    of = shape(tiny.lm.config.to_dict())
    assert of.parameters == sum(p.numel() for p in tiny.parameters())
    spawn(measure_states, (ranks, free_port(), tmp_path / "found.json"), ranks)
    for dtype, stage, found in json.loads((tmp_path / "found.json").read_text()):
        planned = Model(of, DeepSpeedConfig(ranks=ranks, zero_stage=stage, dtype=dtype), device="cpu")
        setting = f"{dtype}, ZeRO {stage}, {ranks} ranks"
        assert (found["weights"], found["optimizer"]) == (
            planned.state.weights,
            planned.state.optimizer,
        ), setting
        slack = 0.01 if stage == 2 else 0.0
        assert found["gradients"] == pytest.approx(planned.gradients, rel=slack, abs=0), setting


@pytest.mark.slow  # a minute
def test_the_predicted_peak_of_a_step_is_what_is_measured(tmp_path: Path) -> None:
    batch = ForwardPass(sum(LENGTHS), max(LENGTHS))
    found = measured_peaks(tmp_path)
    assert found.keys() == PEAKS.keys()
    for name, settings in PEAKS.items():
        planned = planned_model(settings)
        predicted = planned.state.total + max(planned.backward(batch).total, planned.step.total)
        assert predicted == pytest.approx(found[name], rel=TOLERANCE), (name, predicted / found[name])
