"""Stage `sft`: base model + demonstrations -> `model/` (Hugging Face layout, with the tokenizer), and
`adapter/` with `sft.lora`.

The loss of one optimizer step is the mean over ALL target tokens of its batch, over every rank and
micro-batch. With `early_stop`, the held-out loss decides when the training ends and which weights are its
result.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rlhf_core.algo.losses import sft_loss
from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import never_ends
from rlhf_core.config.training import SFTConfig
from rlhf_core.data.dataset import Rows, load_prompts, load_sft, open_sft
from rlhf_core.data.tokenizer import Decoder, load_decoder
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import classified
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.models.adapters import check_targets
from rlhf_core.models.batching import TokenSequence, collate, plan_ranks
from rlhf_core.models.policy import load_policy
from rlhf_core.models.weights import left_out
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.training import (
    Folders,
    Objective,
    StageModel,
    Training,
    fetch_base,
    load_to_train,
    load_whole,
    own_micro_batches,
    step_metrics,
    train_epochs,
    train_on_ranks,
)
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import PromptExample, SFTExample, StageContext, StageResult

log = logging.getLogger(__name__)

_SAMPLES_AT_ONCE = 32
"""Rows of a batch of sampled responses."""


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Fine-tune over `sft.deepspeed.ranks` ranks and log some sampled answers."""
    device = resolve_device(config.run.device)
    fetch_base(config, context, "sft")
    metrics = train_on_ranks(_train if config.sft.enabled else _save_base, config.sft, config, context)
    # Later stages and users load the model and its tokenizer from one folder.
    shutil.copytree(context.data / "tokenizer", context.output / "model", dirs_exist_ok=True)
    samples = _samples(config, context, device)
    context.metrics.log_table("sft_samples", samples)
    context.metrics.flush()
    if samples:
        metrics["eos_rate"] = sum(sample["finished"] for sample in samples) / len(samples)
        model = "the SFT model" if config.sft.enabled else "the base model"
        if problem := never_ends({model: metrics["eos_rate"]}):
            log.warning("%s", problem)
    return StageResult(metrics)


def base_model(config: PipelineConfig, data: Path) -> tuple[Path | str, str | None]:
    """Return (address, revision) of the base model: the configured one, or the data artifact's `config.json`
    for one from scratch.
    """
    if config.model.path is None:
        return data / "model", None
    return config.model.path, config.model.revision


def _train(
    rank: Any, config: PipelineConfig, folders: Folders, context: StageContext | None
) -> dict[str, float]:
    """Train, save and measure the policy on each rank, and return the metrics."""
    data, out = folders.data, folders.out
    folder, revision = base_model(config, data)
    torch.manual_seed(derive_seed(config.run.seed, "sft", "init"))  # of a model from scratch, and of adapters
    policy = load_to_train(
        load_policy, folder, rank, config, config.sft, revision, head_dtype=config.model.head_dtype
    )
    check_targets(policy.lm, config)
    ids = load_decoder(data)
    _set_special_tokens(policy.lm, ids)
    model = StageModel(rank, policy, config.sft, "sft", context)
    del policy
    rows = open_sft(data, "train", folders.work)
    train = Rows(len(rows), lambda index: _sequence(rows[index]))
    held_out = list(map(_sequence, load_sft(data, "eval")))
    pad_id, engine, sft = ids.pad, model.engine, model.settings
    training = Training("sft", derive_seed(config.run.seed, "sft"), pad_id, folders.work, context)
    metrics = train_sft(engine, train, held_out, sft, training)
    model.save(out / "model", out / "adapter", str(folder), revision)
    saved = model.close_and_evaluate(
        lambda: evaluate_sft(engine, held_out, sft, pad_id),
        lambda: evaluate_saved(config, out / "model", held_out, pad_id, rank.torch_device),
    )
    if saved is not None:
        gap = saved["eval/loss"] - metrics["eval_loss"]
        metrics |= {"eval_loss": saved["eval/loss"], "perplexity": saved["eval/perplexity"], "merge_gap": gap}
    return metrics if context is None else metrics | left_out(folder, revision)


def _sequence(example: SFTExample) -> TokenSequence:
    return TokenSequence(example.input_ids, example.loss_mask)


def _save_base(
    rank: Any, config: PipelineConfig, folders: Folders, context: StageContext | None
) -> dict[str, float]:
    """Save the base model as the SFT model, with the special tokens of the data, on rank 0."""
    if rank.rank == 0:
        heartbeat("load the model", config.run.timeouts.start)
        folder, revision = base_model(config, folders.data)
        policy = load_policy(
            folder,
            dtype=config.sft.deepspeed.dtype,
            attention=config.model.attention,
            device="cpu",  # it computes nothing
            revision=revision,
            pack=False,
            head_dtype=config.model.head_dtype,
        )
        _set_special_tokens(policy.lm, load_decoder(folders.data))
        # Through `save` and not as a copy of the files: later stages need safetensors and the special tokens
        # of the data.
        policy.save(folders.out / "model")
        return left_out(folder, revision)
    # Metrics of rank 0 are those of the stage.
    return {}


def _set_special_tokens(lm: Any, ids: Decoder) -> None:
    """Give the model the special tokens of the data, and no other sampling settings."""
    # The engines end a response at the `eos_token_id` of config.json, so it must be that of the data.
    lm.config.update({"pad_token_id": ids.pad, "eos_token_id": ids.eos})
    if ids.bos is not None:  # Qwen's config.json has one, although its tokenizer has none
        lm.config.bos_token_id = ids.bos
    # Sampling settings of the base model (top_p, repetition_penalty) would change samples and reach the
    # registered policy.
    lm.generation_config = GenerationConfig(
        pad_token_id=ids.pad, eos_token_id=ids.eos, bos_token_id=lm.config.bos_token_id
    )


def _samples(config: PipelineConfig, context: StageContext, device: str) -> list[dict[str, Any]]:
    """Return held-out prompts with one sampled answer of the new model each.

    A model that this process trained without ZeRO-3 fits its device. Others are sampled by an engine, as in
    evaluation: the driver of a cluster may have no device.
    """
    from rlhf_core.cluster.ranks import needs_actors
    from rlhf_core.evaluation.generate import responses_of

    folder = context.output / "model"
    decode = load_decoder(context.data)
    prompts = load_prompts(context.data, "eval")[: config.sft.samples]
    deepspeed = config.sft.deepspeed
    if prompts and (needs_actors(deepspeed.ranks) or deepspeed.zero_stage == 3):
        models = {"sft": PolicyFiles(folder)}
        try:
            found = responses_of(config, models, decode, prompts, device=device, context=context)
        except Exception as error:
            # The table is only for reading. It must not fail the stage after all training.
            log.warning("sft: no responses are sampled: %s", classified(error).message)
            return []
        return _rows(prompts, [(sample.response, sample.finished) for sample in found["sft"]])
    model = (
        # Safetensors only: a pickled file can run code when it is loaded.
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
        .to(device)
        .eval()
    )
    responses: list[tuple[str, bool]] = []
    while len(responses) < len(prompts):
        start = len(responses)
        # For each batch by its place, so that the samples do not depend on what was drawn before.
        torch.manual_seed(derive_seed(config.run.seed, "sft", "samples", start))
        for ids, finished in _sampled(model, prompts[start : start + _SAMPLES_AT_ONCE], config, device):
            responses.append((decode(ids), finished))
        context.progress("sft samples", len(responses), len(prompts), "responses")
    return _rows(prompts, responses)


def _rows(prompts: Sequence[PromptExample], responses: Sequence[tuple[str, bool]]) -> list[dict[str, Any]]:
    rows = []
    for prompt, (response, finished) in zip(prompts, responses, strict=True):
        rows.append({"prompt": prompt.prompt, "response": response, "finished": finished})
    return rows


def _sampled(
    model: PreTrainedModel, prompts: Sequence[PromptExample], config: PipelineConfig, device: str
) -> list[tuple[list[int], bool]]:
    """Return the tokens of one response to each prompt, up to and with the EOS token, and whether there is
    one. All are one batch.
    """
    width = max(len(prompt.input_ids) for prompt in prompts)
    pad, eos = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    ids = torch.full((len(prompts), width), pad, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        # Padded on the left: `generate` continues each row at its end.
        start = width - len(prompt.input_ids)
        ids[row, start:] = torch.tensor(prompt.input_ids, device=device)
        mask[row, start:] = 1
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,  # transformers otherwise samples from the 50 most likely tokens
        temperature=config.ppo.temperature,
        max_new_tokens=config.limits.new,
    )[:, width:].tolist()
    return [_until_eos(row, ends) for row in output]


def _until_eos(tokens: list[int], ends: set[int]) -> tuple[list[int], bool]:
    """Return the tokens up to and with the first one in `ends`, or all, and whether there is one."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], True
    return tokens, False


# -- the loop --


def train_sft(
    engine: TrainingEngine,
    train: Sequence[TokenSequence],
    held_out: Sequence[TokenSequence],
    config: SFTConfig,
    training: Training,
) -> dict[str, float]:
    """Train to the end (`train_epochs`), and evaluate.

    Args:
        engine: The model with its optimizer.
        train: The training set.
        held_out: The set that is evaluated on.
        config: Settings of the stage.
        training: Stage, seed, padding, folder and context.

    Returns:
        `eval_loss`, `perplexity`, `tokens_per_s`, and `best_step` with `early_stop`.
    """
    trained = train_epochs(engine, train, held_out, config, training, OBJECTIVE)
    final = evaluate_sft(engine, held_out, config, training.pad_id)
    if training.context is not None:
        training.context.metrics.log_metrics(final, trained.steps)
    return {"eval_loss": final["eval/loss"], "perplexity": final["eval/perplexity"], **trained.metrics}


def train_step(
    engine: TrainingEngine, batch: Sequence[TokenSequence], config: SFTConfig, total: int, pad_id: int
) -> dict[str, float]:
    """Run one optimizer step and return its metrics. Each rank computes its share of `batch`.

    A step whose gradient is not finite is skipped and counted, and its loss is not reported.

    Args:
        engine: The model with its optimizer.
        batch: The sequences of the step, the same on every rank.
        config: Settings of the stage.
        total: Number of steps of the whole training, for the schedule of the learning rate.
        pad_id: The token that fills rows.
    """
    targets = sum(sequence.targets for sequence in batch)
    loss_sum = torch.zeros((), device=engine.rank.torch_device)

    # A generator: the backward pass of a loss runs before the next forward pass, so the activations of one
    # micro-batch are in memory at a time.
    def losses() -> Iterator[torch.Tensor]:
        for micro_batch in own_micro_batches(engine.rank, list(map(len, batch)), config):
            tensors = collate([batch[i] for i in micro_batch], pad_id=pad_id, pack=config.packs).to(
                engine.rank.torch_device
            )
            logprobs_N = engine(tensors).logprobs_N
            # `collate` selects the target tokens, so nothing is left to mask.
            loss = sft_loss(logprobs_N, torch.ones_like(logprobs_N), denominator=targets)
            loss_sum.add_(loss.detach())
            yield loss

    norm = engine.train_step(losses(), total)
    dist.all_reduce(loss_sum)
    return step_metrics(engine, norm, {"train/loss": loss_sum.item()})


@torch.no_grad()
def evaluate_sft(
    engine: TrainingEngine, held_out: Sequence[TokenSequence], config: SFTConfig, pad_id: int
) -> dict[str, float]:
    """Return the mean loss per target token over the held-out set, in nats, and its exponential.

    This is a collective operation.
    """
    engine.module.eval()
    micro_batches = own_micro_batches(engine.rank, list(map(len, held_out)), config)
    sums = _loss_and_count(engine, held_out, micro_batches, config.packs, pad_id, engine.rank.torch_device)
    dist.all_reduce(sums)
    engine.module.train()
    return _measures(sums)


def evaluate_saved(
    config: PipelineConfig, folder: Path, held_out: Sequence[TokenSequence], pad_id: int, device: str
) -> dict[str, float]:
    """Evaluate the model in `folder` as later stages load it, on one device. See `evaluate_sft`.

    Quantized weights cannot take an adapter (`TrainingEngine.merge_adapter`), so they are evaluated here.

    Args:
        config: The configuration.
        folder: The saved model.
        held_out: The sequences to evaluate on.
        pad_id: The token that fills rows.
        device: Device of the model.
    """
    sft = config.sft
    heartbeat("load the model", config.run.timeouts.start)
    model = load_whole(load_policy, folder, device, config, sft, head_dtype=config.model.head_dtype).eval()
    (micro_batches,) = plan_ranks(list(map(len, held_out)), 1, sft.micro_batch_tokens, pack=model.packs)
    with torch.no_grad():
        return _measures(_loss_and_count(model, held_out, micro_batches, model.packs, pad_id, device))


def _loss_and_count(
    model: Any,
    held_out: Sequence[TokenSequence],
    micro_batches: Sequence[Sequence[int]],
    pack: bool,
    pad_id: int,
    device: str,
) -> torch.Tensor:
    """Return (2,) float64: the sum of the losses in nats, and the number of target tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        heartbeat("evaluation")
        tensors = collate([held_out[i] for i in micro_batch], pad_id=pad_id, pack=pack).to(device)
        logprobs_N = model(tensors).logprobs_N
        sums[0] -= logprobs_N.double().sum()
        sums[1] += logprobs_N.numel()
    return sums


def _measures(sums: torch.Tensor) -> dict[str, float]:
    loss = (sums[0] / sums[1]).item()
    # `math.exp` raises OverflowError for the loss of a training that diverged.
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 50.0))}


def _table_row(row: TokenSequence) -> dict[str, Any]:
    return {"tokens": len(row), "targets": row.targets, "input_ids": str(list(row.input_ids))}


OBJECTIVE = Objective(train_step, evaluate_sft, count_tokens=len, table_row=_table_row)
