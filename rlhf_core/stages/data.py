"""Stage `data`: sources in, token files, tokenizer and data card out."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.card import limits_of, sample_rows
from rlhf_core.data.prepare import FILE_NAMES, prepare
from rlhf_core.errors import InputError
from rlhf_core.models.architectures import architecture_problems
from rlhf_core.models.folder import base_model_config
from rlhf_core.planning.check import check_memory
from rlhf_core.stages.evaluation_check import check_evaluation
from rlhf_core.types import StageContext, StageResult

log = logging.getLogger(__name__)


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Prepare the three sets into `context.output`; log the data card and samples.

    Reads no input artifact.
    """
    if config.model.path is not None:
        # Before the rows are read. The next stage loads the model itself.
        _check_model(config.model.path, config)

    def report(done: int, total: int) -> None:
        context.progress("data", done, total, "rows")

    card = prepare(config, context.output, report, context.sources)
    limited = config.with_limits(limits_of(context.output))
    check_evaluation(limited, context)
    if None in config.given_limits:
        _check_memory(limited)
    metrics: dict[str, float] = {}
    for name, file_name in FILE_NAMES.items():
        count = card["counts"][name]
        metrics[f"data/{file_name}_read"] = count["read"]
        metrics[f"data/{file_name}_bad"] = count["bad"]
        metrics[f"data/{file_name}_dropped"] = sum(count["dropped"].values())
        metrics[f"data/{file_name}_train"] = count["train"]
        metrics[f"data/{file_name}_eval"] = count["eval"]
    metrics["data/near_overlap"] = card["overlap"]["near"]
    metrics["data/tokens"] = card["tokenizer"]["tokens"]
    metrics = {name: float(value) for name, value in metrics.items()}
    context.metrics.log_metrics(metrics, step=0)
    context.metrics.log_table("data_samples", sample_rows(card))
    context.metrics.log_file(context.output / "data_card.md", "data")
    context.metrics.log_file(context.output / "data_card.json", "data")
    if any(count["bad"] for count in card["counts"].values()):
        context.metrics.log_file(context.output / "quarantine.jsonl", "data")
    context.metrics.flush()
    facts = {f"{row['field']}.digest": row["digest"] for row in card["sources"]}
    return StageResult(metrics, facts)


def _check_memory(config: PipelineConfig) -> None:
    """Compare the memory with the measured lengths. Until now they were estimated. Raises ConfigError."""
    for finding in check_memory(config):
        if isinstance(finding, InputError):
            raise finding


def _check_model(path: str, config: PipelineConfig) -> None:
    """Check what the preflight could not: weights against config.json, and the architecture of a hub model.

    Raises ModelError or ConfigError.
    """
    if not is_hub_model(path):
        from rlhf_core.models.weights import check_headers

        check_headers(Path(path), attention=config.model.attention)
        return
    for finding in architecture_problems(path, base_model_config(config), config):
        if isinstance(finding, InputError):
            raise finding
        log.warning("%s", finding)
