"""Stage `ppo`: SFT model + reward model + prompts -> `policy/` (Hugging Face layout), `policy_ema/` with the
moving average of the weights if it is not published, `adapter/` with `ppo.lora`, `record/` with the rollouts,
and `metrics.jsonl`."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.base import Section
from rlhf_core.config.placement import PPOSettings, Role, plan
from rlhf_core.config.rewards import UserFunction
from rlhf_core.data.dataset import load_pairs, load_prompts, open_prompts, open_sft, require_answers
from rlhf_core.data.difficulty import by_difficulty
from rlhf_core.data.tokenizer import Decoder, load_decoder
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import DataError, GateFailed
from rlhf_core.evaluation.during_ppo import SEQUENCES, HeldOutEvaluation, TrainedPolicy, measure_published
from rlhf_core.evaluation.prompts import prompts_of_ppo
from rlhf_core.evaluation.reward_checks import check_sources
from rlhf_core.evaluation.reward_views import PROMPTS, rows_of
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.recording import KIND
from rlhf_core.ppo.sampling.reward_actor import RewardSettings, open_rewards
from rlhf_core.ppo.training.experience import own_advantages_of
from rlhf_core.record.writer import RecordWriter
from rlhf_core.rewards.compose import code_digests
from rlhf_core.rewards.python_function import read_code
from rlhf_core.stages.agreement import check_language_model_rewards
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.training import fetch_base, require_usable
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.system.home import Home
from rlhf_core.types import PromptExample, StageContext, StageResult, prefixed

log = logging.getLogger(__name__)


def new_fleet(config: PipelineConfig, context: StageContext, device: str, pad_id: int) -> Fleet:
    """Return the processes of the stage, which are not started yet."""
    folders = _folders(config, context)
    code = _code(config.ppo.loss, "ppo.loss", context)
    settings = PPOSettings.of(config)
    return Fleet(settings, device, folders, pad_id, context.monitor, context.nodes, code)


def _code(section: Section | None, field: str, context: StageContext) -> bytes | None:
    """Return the source of a user's function, which the ranks on all hosts get; None for a built-in one."""
    if not isinstance(section, UserFunction):
        return None
    # Read once by the driver: the file need not exist on other hosts, and may change during the run.
    return read_code(section, field, context.sources.get(field))


def run(
    config: PipelineConfig,
    context: StageContext,
    make_fleet: Callable[[PipelineConfig, StageContext, str, int], Fleet] = new_fleet,
) -> StageResult:
    """Start the fleet, run the controller, save the policy.

    `make_fleet` gets the configuration, the context, "cpu" or "cuda", and the padding token.
    """
    agreement = check_language_model_rewards(config, context, "ppo")
    fetch_base(config, context, "ppo")
    require_usable(config, context, "ppo")
    device = resolve_device(config.run.device)
    decoder = load_decoder(context.data)
    check_rewards_of_stage(config, context, decoder)
    fleet = make_fleet(config, context, device, decoder.pad)
    with _started(config, context, decoder, fleet) as controller:
        controller.run()
        chosen: dict[str, float] = {}
        if config.ppo.evaluation_interval is not None:
            chosen = _restore_published_weights(config, context, controller)
        trained = _save(config, context, controller)
        controller.save_record(context.output)
        steps = controller.completed_steps
    for folder in context.output.glob("policy*"):  # also `policy_ema`
        shutil.copytree(context.data / "tokenizer", folder, dirs_exist_ok=True)
    published = {}
    if trained is not None:  # the fleet's memory is free now
        sft = context.inputs["sft"]
        published = measure_published(
            config, trained, context.output, sft, pad_id=decoder.pad, device=device, context=context
        )
        context.metrics.log_metrics(published, config.ppo.steps)
        check_gate(config, "ppo", published)
    context.metrics.flush()
    policy = context.output / "policy"
    # From the file: an attempt that continues after the last step makes no step of its own.
    last = json.loads((context.output / "metrics.jsonl").read_text().splitlines()[-1])
    shown = ("objective/scores", "objective/kl", "objective/rlhf_reward", "policy/entropy", "rollout/length")
    metrics = {name.removeprefix("objective/"): float(last[name]) for name in shown if name in last}
    return StageResult(
        {**metrics, **published, **chosen, **agreement, "steps": float(steps)},
        {"weights_sha256": weights_sha256(policy, context.stored_in(policy))},
    )


@contextmanager
def _started(
    config: PipelineConfig, context: StageContext, decoder: Decoder, fleet: Fleet
) -> Iterator[PPOController]:
    """Start the fleet, and yield its controller."""
    data, ppo = context.data, config.ppo
    prompts: Sequence[PromptExample] = open_prompts(data, "train", context.scratch)
    if ppo.difficulty is not None:
        prompts = by_difficulty(prompts, ppo.difficulty)
    # The stage `data` has checked the share of answers that can be reached.
    require_answers(prompts, ppo.rewards, most=1.0)
    processes = plan(ppo).processes
    unit = "processes have loaded their models"
    context.progress("ppo start", 0, processes, unit)
    rewards = RewardSettings(
        ppo.rewards,
        decoder.response,
        code_digests(ppo.rewards, context.sources),
        ppo.score_clip,
        Home.of(config.run.home).judge,
        config.run.threads,
    )
    # The rewards first: one that cannot be used ends the stage before any process of the fleet starts.
    with open_rewards(rewards) as composer_of, fleet:
        composer = composer_of(fleet)
        context.progress("ppo start", processes, processes, unit)
        demonstrations = open_sft(data, "train", context.scratch) if ppo.ptx is not None else []
        evaluation = None
        if ppo.evaluation_interval is not None:
            held_out = prompts_of_ppo(config, load_prompts(data, "eval"))
            if not held_out:
                raise DataError(
                    "evaluations during PPO need held-out prompts; got 0; raise data.eval_fraction, or use"
                    " ppo.evaluate_every=0 and ppo.publish=last"
                )
            evaluation = HeldOutEvaluation(config, fleet, held_out, decoder.response, composer)
        yield PPOController(
            fleet,
            prompts,
            decoder.response,
            composer,
            context,
            demonstrations=demonstrations,
            evaluation=evaluation,
            own_advantages=own_advantages_of(ppo, _code(ppo.advantages, "ppo.advantages", context)),
            record=None if config.record.level == "none" else _new_record(config, context),
        )


def _new_record(config: PipelineConfig, context: StageContext) -> RecordWriter:
    return RecordWriter(context.scratch / "record", KIND, config.record)


def _save(config: PipelineConfig, context: StageContext, controller: PPOController) -> TrainedPolicy | None:
    """Save the policy that is published, its adapter and the moving average.

    Returns log-probabilities of a policy with an adapter, for the comparison with the saved files.
    """
    ppo = config.ppo
    if ppo.publish == "average":
        controller.restore_average()
    controller.save_policy(context.output / "policy")
    trained = None
    if ppo.lora is not None:
        controller.save_adapter(context.output / "adapter", f"{context.artifact_name('sft')}/model")
        # While the fleet runs: the files are compared when its memory is free.
        trained = TrainedPolicy(*controller.trained_logprobs(SEQUENCES))
    # At the end, because the average replaces the weights that were saved and measured above.
    if ppo.ema_decay is not None and ppo.publish != "average":
        controller.restore_average()
        controller.save_policy(context.output / "policy_ema")
    return trained


def _restore_published_weights(
    config: PipelineConfig, context: StageContext, controller: PPOController
) -> dict[str, float]:
    """Restore the weights to publish, and return their evaluation metrics. Write and draw all evaluations."""
    # Here, because a run without evaluations needs no matplotlib.
    from rlhf_core.evaluation.plots import evaluation_curves

    evaluations = controller.selection.evaluations
    controller.selection.write(context.output / "evaluations.jsonl")
    controller.selection.write_columns(context.output / "evaluations_by_prompt.jsonl")
    version = controller.restore_best() if config.ppo.publish == "best" else controller.completed_steps
    figure = evaluation_curves(
        evaluations, best=controller.selection.best, max_kl=config.ppo.publish_kl_limit
    )
    context.metrics.log_figure("evaluations", figure)
    if config.ppo.publish == "average":  # the engines, and so the evaluations, have no average
        return {}
    found = evaluations.get(version, {})
    # The best of several noisy evaluations is higher than another one of the same version would be.
    name_of = "selected" if config.ppo.publish == "best" else "published"
    return {"published_step": float(version)} | prefixed(f"{name_of}/", found)


def _folders(config: PipelineConfig, context: StageContext) -> dict[Role, Path | str]:
    """Return the model that each role starts from: a folder, or the hub id of a teacher.

    The critic starts from the reward model if that provides the rewards. Otherwise its scale would be wrong,
    so the critic starts from the SFT model with a head of zeros.
    """
    sft = context.inputs["sft"] / "model"
    reward = context.inputs["reward"] / "model" if "reward" in context.inputs else sft
    critic = reward if config.ppo.trains_on_reward_model else sft
    folders: dict[Role, Path | str] = {"policy": sft, "reference": sft, "critic": critic, "reward": reward}
    if (teacher := base_of(config, "ppo")) is not None:
        folders["reference"] = teacher.path if teacher.is_hub else Path(teacher.path)
    if config.judge_in_ppo:
        folders["judge"] = context.inputs["judge"] / "model"
    return folders


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
