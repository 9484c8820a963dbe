"""Stage `sft`: base model + demonstrations -> `model/` (Hugging Face layout, with the tokenizer), and
`adapter/` with `sft.lora`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.models.batching import TokenSequence
from rlhf_core.seeds import derive_seed
from rlhf_core.types import StageContext, StageResult

if TYPE_CHECKING:
    from rlhf_core.data.sources import ModelState


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Fine-tune over `sft.deepspeed.ranks` ranks and sample some answers for reading."""
    from rlhf_core.data.hub import fetch_model
    from rlhf_core.data.sources import model_digests, model_state, require_unchanged
    from rlhf_core.engines.ranks import resolve_device, run_ranks
    from rlhf_core.models.folder import is_hub_model

    device = resolve_device(config.run.device)
    if config.model.path is not None and is_hub_model(config.model.path):
        # A download takes what it takes; ranks that load have `run.timeouts.start`.
        fetch_model(config.model.path, config.model.revision)
    # Here and not in the ranks: reading every file of a large model takes longer than ranks may wait for each
    # other.
    state = model_state(config)
    require_unchanged(model_digests(config), context.sources, config)
    metrics = run_ranks(
        _train,
        config.sft.deepspeed.ranks,
        device,
        config,
        context.inputs["data"],
        context.scratch,
        context.output,
        state,
        rank_zero=context,
        timeouts=config.run.timeouts,
        monitor=context.monitor,
    )
    shutil.copytree(context.inputs["data"] / "tokenizer", context.output / "model", dirs_exist_ok=True)
    context.metrics.log_table("sft_samples", _samples(config, context, device))
    context.metrics.flush()
    return StageResult(metrics)


def base_model(config: PipelineConfig, data: Path) -> tuple[Path | str, str | None]:
    """(where the base model is, revision): the configured one, or the data artifact's `config.json` for one
    from scratch.
    """
    return (
        (config.model.path, config.model.revision)
        if config.model.path is not None
        else (data / "model", None)
    )


def _train(
    rank: Any,
    config: PipelineConfig,
    data: Path,
    work: Path,
    out: Path,
    state: ModelState,
    context: StageContext | None,
) -> dict[str, float]:
    import torch
    from transformers import GenerationConfig

    from rlhf_core.data.dataset import load_sft
    from rlhf_core.data.sources import require_same_state
    from rlhf_core.data.tokenizer import load_decoder
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.engines.distributed import all_ranks_pack
    from rlhf_core.models.adapters import add_adapter
    from rlhf_core.models.policy import load_policy
    from rlhf_core.stages.sft_loop import evaluate_saved, train_sft

    sft = config.sft
    folder, revision = base_model(config, data)
    torch.manual_seed(derive_seed(config.run.seed, "sft", "init"))
    policy = load_policy(
        folder,
        dtype=sft.deepspeed.dtype,
        attention=config.model.attention,
        device=rank.torch_device,
        revision=revision,
        quantize=None if sft.lora is None else sft.lora.quantize,
        pack=sft.pack,
        head_dtype=config.model.head_dtype,
    )
    if context is not None:
        require_same_state(state, config)
    sft = sft.model_copy(update={"pack": all_ranks_pack(policy, sft.pack, rank, "sft.pack")})
    ids = load_decoder(data)
    policy.lm.config.update({"pad_token_id": ids.pad, "eos_token_id": ids.eos, "bos_token_id": ids.bos})
    # Sampling settings of the base model (top_p, repetition_penalty) would change samples and reach the
    # registered policy.
    policy.lm.generation_config = GenerationConfig(
        pad_token_id=ids.pad, eos_token_id=ids.eos, bos_token_id=ids.bos
    )
    add_adapter(policy, sft.lora)
    engine = TrainingEngine(policy, sft.deepspeed, sft.optimizer, rank)
    held_out = [TokenSequence(e.input_ids, e.loss_mask) for e in load_sft(data, "eval")]
    metrics = train_sft(
        engine,
        [TokenSequence(e.input_ids, e.loss_mask) for e in load_sft(data, "train")],
        held_out,
        sft,
        seed=derive_seed(config.run.seed, "sft"),
        pad_id=ids.pad,
        work=work,
        context=context,
    )
    engine.save_model(out / "model", policy.save)
    engine.save_adapter(out / "adapter", str(folder), revision)
    del policy
    engine.close()  # rank 0 goes on with another copy of the model
    if sft.lora is not None and context is not None:
        # Later stages load the merge, rounded to `dtype`: the metrics are those of that model.
        saved = evaluate_saved(config, out / "model", held_out, ids.pad, rank.torch_device)
        gap = saved["eval/loss"] - metrics["eval_loss"]
        metrics |= {"eval_loss": saved["eval/loss"], "perplexity": saved["eval/perplexity"], "merge_gap": gap}
    return metrics


def _samples(config: PipelineConfig, context: StageContext, device: str) -> list[dict[str, Any]]:
    """Held-out prompts and what the new model says, one sample each."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_core.data.dataset import load_prompts
    from rlhf_core.data.tokenizer import load_decoder

    folder = context.output / "model"
    decode = load_decoder(context.inputs["data"])
    model = (
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
        .to(device)
        .eval()
    )
    rows = []
    prompts = load_prompts(context.inputs["data"], "eval")[: config.sft.samples]
    for i, prompt in enumerate(prompts):
        torch.manual_seed(derive_seed(config.run.seed, "sft", "sample", prompt.prompt_id))
        ids = torch.tensor([prompt.input_ids], device=device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            temperature=config.ppo.temperature,
            max_new_tokens=config.ppo.max_new_tokens,
        )[0, ids.shape[1] :]
        rows.append({"prompt": prompt.prompt, "response": decode(output.tolist())})
        context.progress("sft samples", i + 1, len(prompts), "responses")
    return rows
