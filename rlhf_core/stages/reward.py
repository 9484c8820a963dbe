"""Stage `reward`: SFT model + pairs -> `model/`, a sequence classifier with one label, and its score
statistics; `adapter/` with `reward.lora`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.gates import check_gate
from rlhf_core.types import PairExample, StageContext, StageResult


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Train over `reward.deepspeed.ranks` ranks; a model no better than `reward.min_accuracy` fails the
    stage.
    """
    from rlhf_core.engines.ranks import resolve_device, run_ranks

    metrics: dict[str, float] = run_ranks(
        _train,
        config.reward.deepspeed.ranks,
        resolve_device(config.run.device),
        config,
        context.inputs["data"],
        context.inputs["sft"],
        context.scratch,
        context.output,
        rank_zero=context,
        timeouts=config.run.timeouts,
        monitor=context.monitor,
    )
    shutil.copytree(context.inputs["data"] / "tokenizer", context.output / "model", dirs_exist_ok=True)
    context.metrics.flush()
    check_gate(config, "reward", metrics)
    return StageResult(metrics)


def _train(
    rank: Any,
    config: PipelineConfig,
    data: Path,
    sft: Path,
    work: Path,
    out: Path,
    context: StageContext | None,
) -> dict[str, float]:
    import torch

    from rlhf_core.data.dataset import load_pairs, require_margins
    from rlhf_core.data.tokenizer import load_decoder
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.engines.distributed import all_ranks_pack
    from rlhf_core.evaluation.exchange import exchange_pairs
    from rlhf_core.models.adapters import add_adapter
    from rlhf_core.models.score import ScoreStatistics, load_score_model
    from rlhf_core.stages.reward_loop import evaluate_reward, evaluate_saved, train_reward

    reward = config.reward
    train, held_out = load_pairs(data, "train"), load_pairs(data, "eval")
    if reward.margin == "field":
        require_margins([*train, *held_out])
    torch.manual_seed(derive_seed(config.run.seed, "reward", "init"))
    model = load_score_model(
        sft / "model",
        dtype=reward.deepspeed.dtype,
        attention=config.model.attention,
        device=rank.torch_device,
        quantize=None if reward.lora is None else reward.lora.quantize,
        pack=reward.pack,
    )
    reward = reward.model_copy(update={"pack": all_ranks_pack(model, reward.pack, rank, "reward.pack")})
    pad_id = load_decoder(data).pad
    add_adapter(model, reward.lora)
    engine = TrainingEngine(
        model, reward.deepspeed, reward.optimizer, rank, keep_best=reward.early_stop is not None
    )
    seed = derive_seed(config.run.seed, "reward")
    metrics = train_reward(
        engine, train, held_out, reward, seed=seed, pad_id=pad_id, work=work, context=context
    )
    evaluation, scores = evaluate_reward(engine, held_out, reward, pad_id)
    statistics = model.statistics = ScoreStatistics.of(scores)
    exchanged = exchange_pairs(held_out)
    of_exchanged = {} if exchanged is None else evaluate_reward(engine, exchanged, reward, pad_id)[0]
    engine.save_model(out / "model", model.save)
    engine.save_adapter(
        out / "adapter", f"{context.artifact_name('sft')}/model" if context is not None else ""
    )
    steps_done = engine.steps_done
    del model
    engine.close()  # with an adapter, rank 0 continues with the saved model
    if context is not None:
        if reward.lora is not None:
            # Later stages load the merged model, rounded to `dtype`, so the reported numbers must be those of
            # that model.
            trained = scores
            evaluation, scores = evaluate_saved(config, out / "model", held_out, pad_id, rank.torch_device)
            if exchanged is not None:
                of_exchanged, _ = evaluate_saved(config, out / "model", exchanged, pad_id, rank.torch_device)
            evaluation["eval/merge_gap"] = (scores - trained).abs().mean().item()
            statistics = ScoreStatistics.of(scores)
            statistics.save(out / "model")
        if of_exchanged:
            evaluation["eval/accuracy_exchanged"] = of_exchanged["eval/accuracy"]
        evaluation |= _examine(held_out, scores.numpy(), out, context)
        context.metrics.log_metrics(evaluation, steps_done)
        context.metrics.log_table("reward_pairs", _table(data, held_out, scores))
    return {
        "accuracy": evaluation["eval/accuracy"],
        **({"accuracy_exchanged": of_exchanged["eval/accuracy"]} if of_exchanged else {}),
        "margin": evaluation["eval/margin"],
        "eval_loss": evaluation["eval/loss"],
        "pairs": float(len(held_out)),
        **({"calibration_error": evaluation["eval/calibration_error"]} if context is not None else {}),
        "score_mean": statistics.mean,
        "score_std": statistics.std,
        **metrics,
    }


def _examine(pairs: list[PairExample], scores_P2: Any, out: Path, context: StageContext) -> dict[str, float]:
    """Calibration, length bias, accuracy by source and length: `examination.json`, a plot, and metrics."""
    from dataclasses import asdict

    from rlhf_core.evaluation.calibration import accuracy_by, accuracy_by_length, calibration, length_bias
    from rlhf_core.evaluation.plots import reliability

    lengths = [(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
    found, bias = calibration(scores_P2), length_bias(scores_P2, lengths)
    by_source = accuracy_by([pair.source or "unnamed" for pair in pairs], scores_P2)
    content = {
        "calibration": asdict(found),
        "length_bias": bias,
        "accuracy_by_source": by_source,
        "accuracy_by_length": accuracy_by_length(scores_P2, lengths),
    }
    (out / "examination.json").write_text(json.dumps(content, indent=2) + "\n")
    context.metrics.log_file(out / "examination.json")
    context.metrics.log_figure("reliability", reliability(found))
    return {
        "eval/calibration_error": found.error,
        **{f"eval/length_{name}": value for name, value in bias.items()},
        **{f"eval/accuracy_by_source/{name}": value for name, value in by_source.items()},
    }


def _table(data: Path, pairs: list[PairExample], scores: Any) -> list[dict[str, Any]]:
    """Twenty held-out pairs with their raw scores, for reading."""
    from rlhf_core.data.tokenizer import load_decoder

    decode = load_decoder(data)
    return [
        {
            "prompt": pair.prompt,
            "chosen": decode(pair.chosen_ids),
            "rejected": decode(pair.rejected_ids),
            "score_chosen": chosen,
            "score_rejected": rejected,
        }
        for pair, (chosen, rejected) in list(zip(pairs, scores.tolist(), strict=True))[:20]
    ]
