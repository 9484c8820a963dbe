"""Adapters in every stage, and all models of PPO in one group of ranks, through `rlhf run`.

- SFT, reward model and PPO each leave an adapter next to a merged model
- PPO sends only the adapter to its engines; the policy that is evaluated and registered is the one that was
  trained
- the adapter gives the same log-probabilities in vLLM, in PEFT and merged
- with `colocate: all` policy, reference, critic and reward model share their ranks

Slow: the whole pipeline, after SFT of its base model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parents[1] / "assets" / "tiny.yaml"

pytestmark = pytest.mark.slow


def rlhf_run(home: Path, *arguments: str) -> dict[str, Any]:
    """The summary of `rlhf run` with the smallest configuration."""
    command = [sys.executable, "-P", "-m", "rlhf_cli.main", "run", str(TINY), f"run.home={home}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(
        Path(done.stdout.splitlines()[-1].removeprefix("summary: ")).read_text()
    )
    return summary


def test_adapters_in_all_three_stages_with_all_models_in_one_group(
    tmp_path: Path, summary_lines: list[str]
) -> None:
    # Adapters of SFT need a pretrained model: this is one.
    first = rlhf_run(tmp_path / "first", "--until", "sft")
    base = tmp_path / "first" / "store" / first["stages"]["sft"]["artifact"] / "model"
    home = tmp_path / "home"
    summary = rlhf_run(
        home,
        f"model.path={base}",
        "sft.lora.r=8",
        "reward.lora.r=8",
        "ppo.lora.r=8",
        "ppo.weight_sync.lora=adapter",
        "ppo.colocate=all",
    )
    for stage, model in (("sft", "model"), ("reward", "model"), ("ppo", "policy")):
        folder = home / "store" / summary["stages"][stage]["artifact"]
        assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"] == 8
        assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 0
        assert (folder / model / "config.json").is_file()
    published = summary["stages"]["ppo"]["metrics"]
    assert published["published/logprob_update"] > 0
    assert published["published/logprob_gap"] < 1e-3 * max(1.0, published["published/logprob_update"])
    assert "register" in summary["stages"]
    summary_lines.append(
        "adapters in three stages: the judged policy differs from the trained one by "
        f"{published['published/logprob_gap']:.1e} nats per token, from the SFT model by "
        f"{published['published/logprob_update']:.1e}"
    )
    agree(home / "runs" / summary["run"] / "summary.json")


def agree(summary: Path) -> None:
    """Compare the adapter in vLLM, in PEFT and merged with `tests.benchmarks.adapter_agreement`."""
    command = [sys.executable, "-m", "tests.benchmarks.adapter_agreement", str(summary)]
    done = subprocess.run(
        [*command, "--prompts", "4", "--tokens", "8"],
        cwd=TINY.parents[2], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = done.stdout.splitlines()[-3:]
    without, with_peft, merged = (float(row.split()[-1]) for row in rows)
    assert with_peft < 1e-3 and merged < 1e-3 < without, rows
