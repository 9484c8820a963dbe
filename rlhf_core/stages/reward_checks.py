"""`ppo.check_rewards`: the checks of `rlhf check-reward` before PPO, as far as they ask nobody."""

from __future__ import annotations

import logging
from dataclasses import asdict

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_pairs, load_prompts
from rlhf_core.data.tokenizer import Decoder
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation.reward_checks.checks import check_sources
from rlhf_core.evaluation.reward_checks.material import rows_of
from rlhf_core.evaluation.reward_checks.views import PROMPTS
from rlhf_core.types import StageContext

log = logging.getLogger(__name__)


def check_rewards_of_stage(config: PipelineConfig, context: StageContext, decoder: Decoder) -> None:
    """Check the rewards with the data artifact, and warn of findings. The score card is the table
    `reward_checks`.

    Rewards that are asked over the network, and the reward model, are left out.

    Raises:
        GateFailed: There is a finding, and `ppo.check_rewards` is `refuse`.
    """
    if config.ppo.check_rewards == "off":
        return
    prompts, pairs = load_prompts(context.data, "train"), load_pairs(context.data, "train")
    card = check_sources(
        config.ppo.rewards,
        rows_of(prompts, pairs, decoder.response, config.ppo.rewards, PROMPTS),
        lambda text: [*decoder.tokenizer.encode(text, add_special_tokens=False).ids, decoder.eos],
        ask=False,
    )
    context.metrics.log_table("reward_checks", [asdict(row) for row in card.rows])
    found = [f"reward {each.source}: {each.check}: {each.evidence}" for each in card.findings]
    for text in found:
        log.warning("%s", text)
    if found and config.ppo.check_rewards == "refuse":
        raise GateFailed(
            f"{found[0]} (the first of {len(found)} findings); correct the reward, or set"
            " ppo.check_rewards to warn"
        )
