"""Description of a run's batches: sequences, ranks, micro-batches and optimizer steps of each stage."""

from __future__ import annotations

import math

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import SetName
from rlhf_core.config.placement import plan
from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, SFTConfig, TrainingSection
from rlhf_core.planning.loads import PPO, largest_pass, largest_pass_of_ppo
from rlhf_core.planning.memory import ForwardPass


def describe_batches(config: PipelineConfig) -> list[tuple[str, str]]:
    """Return (stage, description) for every training stage of the run."""
    descriptions = []
    for stage, section in config.training_sections.items():
        batch = largest_pass(config, stage)
        text = _batches(config, section, batch)
        if section is config.reward and config.reward.members > 1:
            text += f"; {config.reward.members} models one after the other"
        descriptions.append((str(stage), text))
    if config.ppo.enabled:
        descriptions.append((PPO, _ppo(config)))
    return descriptions


def _batches(config: PipelineConfig, section: TrainingSection, batch: ForwardPass) -> str:
    """Return the batch size of a stage that trains one model, the share of each rank, and the steps."""
    size, ranks = section.batch_size, section.deepspeed.ranks
    longest = f"{batch.longest} tokens an"
    examples: int | None = None
    if isinstance(section, SFTConfig):
        name: SetName = "sft"
        one, what, each = "sequence", "demonstrations", 1
    else:
        name = "preference"
        one, what, each = "pair", "pairs", 2
        longest = f"2 x {longest}"
    sources = getattr(config.data, name)
    if sources and all(source.path == "synthetic" for source in sources):
        examples = config.data.synthetic.rows(name)
    return (
        f"{_plural(size, one)} of at most {longest} optimizer step, {_share(size, ranks)};"
        f" {_passes(batch, each * math.ceil(size / ranks))};"
        f" {_steps(config, examples, size, section.epochs, what)};"
        f" {_training(section.deepspeed, section.lora)}"
    )


def _ppo(config: PipelineConfig) -> str:
    """Return the batch sizes of PPO, the share of each rank, and the devices."""
    ppo = config.ppo
    total, engines, ranks = ppo.rollout_batch_size, ppo.engine.count, ppo.policy_deepspeed.ranks
    trained = "policy and critic" if ppo.uses_critic else "the policy"
    lines = [
        (
            f"{ppo.steps} steps of {ppo.prompts_per_step} prompts x"
            f" {_plural(ppo.samples_per_prompt, 'sample')} = {total} responses of at most"
            f" {config.limits.new} tokens, {math.ceil(total / engines)} for each of"
            f" {_plural(engines, 'engine')}; {ppo.steps * total} responses in all"
        ),
        (
            f"each step: {_plural(ppo.epochs, 'epoch')} x {_plural(ppo.minibatches, 'minibatch')} of"
            f" {ppo.minibatch_size} responses = {_plural(ppo.epochs * ppo.minibatches, 'optimizer step')} of"
            f" {trained}, {ppo.policy_optimizer_steps} of the policy in all"
        ),
        (
            f"policy: {_share(ppo.minibatch_size, ranks)};"
            f" {_passes(largest_pass_of_ppo(config), math.ceil(ppo.minibatch_size / ranks))};"
            f" {_training(ppo.policy_deepspeed, ppo.lora)}"
        ),
    ]
    if ppo.uses_critic:
        lines.append(
            f"critic: {_share(ppo.minibatch_size, ppo.critic_deepspeed.ranks)};"
            f" {_training(ppo.critic_deepspeed, ppo.lora)}"
        )
    if ppo.difficulty is not None:
        chosen = ppo.difficulty
        lines.append(
            f"prompts with {chosen.field} from {chosen.min:g} to {chosen.max:g}"
            f" ({chosen.order.replace('_', ' ')}); the number of steps stays, so each is drawn more often"
        )
    for source in ppo.rewards:
        if isinstance(source, LanguageModelReward):
            asked = ppo.most_questions(source)
            lines.append(
                f"reward {source.used_name}: at most {_plural(asked, 'question')} to {source.model} a step,"
                f" with replies of at most {source.max_tokens} tokens; {ppo.steps * asked} questions in all"
            )
    lines.append(f"devices: {plan(ppo).describe()}")
    return "\n".join(lines)


def _share(count: int, ranks: int) -> str:
    if ranks == 1:
        return "on one rank"
    return f"{math.ceil(count / ranks)} on each of {ranks} ranks"


def _passes(batch: ForwardPass, sequences: int) -> str:
    """Describe the micro-batches of one rank in one optimizer step, which has `sequences`."""
    count = math.ceil(sequences / max(1, batch.tokens // batch.longest))
    return f"at most {_plural(count, 'micro-batch')} of {batch.tokens} tokens"


def _steps(config: PipelineConfig, examples: int | None, batch: int, epochs: int, what: str) -> str:
    if examples is None:
        return (
            f"{math.ceil(1000 / batch) * epochs} optimizer steps for every 1000 {what}"
            f" ({_plural(epochs, 'epoch')})"
        )
    per_epoch = math.ceil(round(examples * (1 - config.data.eval_fraction)) / batch)
    return f"about {_plural(per_epoch, 'optimizer step')} an epoch, {per_epoch * epochs} in all"


def _training(deepspeed: DeepSpeedConfig, lora: LoraConfig | None) -> str:
    offloaded = {"optimizer": "optimizer state", "all": "optimizer state and parameters"}
    parts = [f"ZeRO-{deepspeed.zero_stage}", deepspeed.dtype]
    if deepspeed.hpz > 1:
        parts.append(f"a second copy over {deepspeed.hpz} ranks (hpZ)")
    if deepspeed.gradient_checkpointing:
        parts.append("gradient checkpointing")
    if deepspeed.offload != "none":
        parts.append(f"{offloaded[deepspeed.offload]} in host memory")
    parts.append("all parameters" if lora is None else f"LoRA of rank {lora.r}")
    return ", ".join(parts)


def _plural(count: int, word: str) -> str:
    if count != 1:
        word += "es" if word.endswith("batch") else "s"
    return f"{count} {word}"
