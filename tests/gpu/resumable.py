"""PPO of three steps with checkpoints, for `tests.gpu.parts`: `python -m tests.gpu.resumable DEVICE FOLDER`.

A second process with the same folder continues from the checkpoint of the first one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlhf_core.config.placement import PPOSettings
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.testing import stage_context
from tests.support.small_ppo import ROLES, save_small_model, small_config, small_prompts


def main(device: str, folder: Path) -> None:
    dtype = "bfloat16" if device == "cuda" else "float32"
    model = save_small_model(folder / "model")
    ppo = {
        "colocate": "all" if device == "cuda" else "pairs",
        "prompts_per_step": 16, "max_new_tokens": 12, "minibatches": 2, "checkpoint_every": 1,
        "policy_deepspeed": {"dtype": dtype}, "critic_deepspeed": {"dtype": dtype},
        "engine": {"dtype": dtype, "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.5},
    }  # fmt: skip
    config = small_config(model, ppo, device=device)
    context = stage_context(folder)
    latest = context.checkpoints.latest()
    with (
        RewardComposer(config.ppo.rewards, score_clip=config.ppo.score_clip) as composer,
        Fleet(PPOSettings.of(config), device, dict.fromkeys(ROLES, model), 0) as fleet,
    ):
        PPOController(fleet, small_prompts(), str, composer, context).run()
    after = 0 if latest is None else latest[0]
    (folder / "resumed.json").write_text(json.dumps({"continued_after": after}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
