"""Stage `benchmark`: the registered policy on tasks of lm-evaluation-harness (package `lm_eval`).

    policy + tasks -> likelihoods and answers -> benchmark.json   each metric with its standard error
                                                 failed.jsonl     questions with wrong answers, as prompts
                                                                  for `evaluate.regression`

The harness runs the policy with transformers in the process of the stage. Most tasks compare likelihoods of
given answers. A server computes those of concurrent requests in batches that depend on time, so two runs
would differ in the last bits, and the harness's class for vLLM does not find vLLM's build for CPUs. The seeds
are those of the harness, so that its few-shot examples are the ones of published results.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf_core.cluster.connect import on_cluster
from rlhf_core.config.evaluate import BenchmarkConfig
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import ConfigError, DataError, Finding
from rlhf_core.evaluation.policy_files import trained_files
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.storage.bundles import hash_file
from rlhf_core.system.files import json_sha256, write_json, write_jsonl
from rlhf_core.types import ArtifactRef, Findings, StageContext, StageResult

log = logging.getLogger(__name__)

RESULTS, FAILED = "benchmark.json", "failed.jsonl"
_ERROR = "_stderr"
_INSTALL = (
    "in a clone, run `.venv/bin/uv pip install --no-deps --require-hashes -r requirements/benchmark.txt`"
    " (docs/harness.md says how without), or leave the section out"
)


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Run the tasks, and write their metrics and the questions with wrong answers.

    Raises:
        ConfigError: There is no such task.
        DataError: The tasks, or the version of the harness, are not those of the run.
    """
    # Here, because the package is optional, and the table of stages imports this module for `FINDINGS`.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from rlhf_core.engines.distributed import resolve_device

    settings = config.benchmark
    assert settings is not None
    _require_unchanged(config, context)
    manager = TaskManager(include_path=settings.folder)
    loaded = _load(manager, settings)
    groups = loaded["group_map"]
    # What is part of a group is run with it.
    inner = _inside(groups, groups)
    chosen = [each for name, each in {**loaded["tasks"], **loaded["groups"]}.items() if name not in inner]
    chat = settings.apply_chat_template
    results = simple_evaluate(
        "hf",
        _model(config, context),
        tasks=chosen,
        task_manager=manager,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        apply_chat_template=config.data.template == "chat" if chat is None else chat,
        batch_size=settings.batch_size,
        device=resolve_device(config.run.device),
    )
    rows = _rows(results["results"])
    write_json(context.output / RESULTS, {"lm_eval": version("lm_eval"), "metrics": rows})
    failed = list(_failed(loaded["tasks"], results["samples"]))
    write_jsonl(context.output / FAILED, failed)
    metrics = _metrics(rows)
    context.metrics.log_metrics({f"benchmark/{name}": value for name, value in metrics.items()}, 0)
    context.metrics.log_table("benchmark", rows)
    context.metrics.flush()
    # A group with a metric stands for its tasks, of which it can have dozens.
    inner = _inside(groups, {row["task"] for row in rows})
    return StageResult(_metrics([row for row in rows if row["task"] not in inner]), {"failed": len(failed)})


def _inside(groups: Mapping[str, Sequence[str]], names: Iterable[str]) -> set[str]:
    """Return the tasks and groups that are part of the groups in `names`."""
    return {each for name in names for each in groups.get(name, ())}


def _load(manager: Any, settings: BenchmarkConfig) -> dict[str, Any]:
    """Return `tasks`, `groups` and the names in each group (`group_map`). Raises ConfigError."""
    for name in settings.tasks:
        if name not in manager.task_index:
            near = " or ".join(difflib.get_close_matches(name, manager.all_tasks))
            fix = f"use {near}" if near else "`lm_eval ls tasks` lists them"
            raise ConfigError(
                f"benchmark.tasks: {name} is no task of lm_eval {version('lm_eval')} or of benchmark.folder;"
                f" {fix}"
            )
    # The harness reads the data of its tasks here, and relative paths start at the working folder.
    with contextlib.chdir(settings.folder or "."):
        try:
            loaded: dict[str, Any] = manager.load(list(settings.tasks))
        except ValueError as error:  # also for a task that is in two groups, or named beside its group
            raise ConfigError(
                f"benchmark.tasks: lm_eval cannot load them: {error}; name each task once, or correct their"
                " files"
            ) from error
    return loaded


def _model(config: PipelineConfig, context: StageContext) -> dict[str, Any]:
    """Return the arguments of the harness's class for models of transformers."""
    files = trained_files(config, config.register_.policy, context.inputs)
    arguments = {
        "pretrained": str(files.model),
        "tokenizer": load_tokenizer(str(context.data / "tokenizer")),
        # As it is served.
        "dtype": config.ppo.engine.dtype,
    }
    return arguments if files.adapter is None else arguments | {"peft": str(files.adapter)}


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each metric of a task or group. `standard_error` is None where there is none. A
    metric that is not finite is left out with a warning.
    """
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, by = name.partition(",")
            # Others are names and counts.
            if not comma or metric.endswith(_ERROR) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                log.warning("benchmark: %s of %s is %s and left out", metric, task, value)
                continue
            error = values.get(f"{metric}{_ERROR},{by}")
            has_error = isinstance(error, int | float) and math.isfinite(error)
            rows.append(
                {
                    "task": task,
                    "metric": metric if by == "none" else f"{metric}/{by}",
                    "value": value,
                    "standard_error": error if has_error else None,
                    "items": values.get("sample_len"),
                }
            )
    return rows


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    metrics = {}
    for row in rows:
        name = f"{row['task']}/{row['metric']}"
        metrics[name] = float(row["value"])
        if row["standard_error"] is not None:
            metrics[name + _ERROR] = float(row["standard_error"])
    return metrics


def _failed(
    tasks: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield the question and its true answer, or a list of its spellings, for each item of tasks with
    generated answers whose first metric is 0, by every filter of the task.
    """
    for name, task in tasks.items():
        if task.get_config("output_type") != "generate_until":
            continue
        done = {each["doc_id"] for each in samples[name] if each[each["metrics"][0]]}
        for each in samples[name]:
            if each["doc_id"] not in done:
                done.add(each["doc_id"])
                question, answer = task.doc_to_text(each["doc"]), each["target"]
                spellings = [str(text) for text in answer] if isinstance(answer, list) else str(answer)
                yield {"prompt": str(question), "answer": spellings, "task": name}


# -- before the run --


def check_benchmark(
    config: PipelineConfig, stages: Collection[StageName] = tuple(STAGES)
) -> Iterator[Finding]:
    """Check, if the stage is one of `stages`, that it runs on this machine alone, that the harness is
    installed, and that the folder exists. Names of tasks are checked by the stage: the harness needs seconds
    to list them.
    """
    settings = config.benchmark
    if settings is None or "benchmark" not in stages:
        return
    executor = config.run.executor_of("benchmark")
    if executor != "local" or on_cluster():
        # There, weights are fetched by ranks and engines only, and this stage has none.
        where = "RAY_ADDRESS" if executor == "local" else f"run.executor={executor}"
        yield ConfigError(
            f"benchmark: runs on one machine and not on a Ray cluster; got {where}; use `--until evaluate`,"
            " then `rlhf run CONFIG run.executor=local --from benchmark` on one machine without RAY_ADDRESS"
        )
    if _harness() is None:
        yield ConfigError(f"benchmark: needs the package lm_eval, which is not installed; {_INSTALL}")
    if settings.folder is not None and not Path(settings.folder).is_dir():
        yield ConfigError(f"benchmark.folder: must be a folder; got {settings.folder}; correct it")


def benchmark_digests(config: PipelineConfig, of_file: Callable[[Path], str] = hash_file) -> dict[str, str]:
    """Return the version of the harness, which contains its tasks, and a digest of what `of_file` returns for
    each file of `benchmark.folder`.
    """
    settings = config.benchmark
    if settings is None:
        return {}
    digests = {}
    if (harness := _harness()) is not None:
        digests["benchmark.lm_eval"] = harness
    if settings.folder is not None:
        folder = Path(settings.folder)
        digests["benchmark.folder"] = json_sha256(
            {
                file.relative_to(folder).as_posix(): of_file(file)
                for file in folder.rglob("*")
                # Python writes its bytecode there when the harness imports functions.
                if file.is_file() and file.parent.name != "__pycache__"
            }
        )
    return digests


def _harness() -> str | None:
    """Return the version of the harness; None if it is not installed."""
    try:
        return version("lm_eval")
    except PackageNotFoundError:
        return None


def _require_unchanged(config: PipelineConfig, context: StageContext) -> None:
    for name, digest in benchmark_digests(config).items():
        if context.sources.get(name, digest) != digest:
            raise DataError(
                f"{name} was changed after the run began: it no longer matches the stage's key; nothing was"
                " stored; run again"
            )


# -- the end of a run --


def _found(ref: ArtifactRef) -> dict[str, Any]:
    metrics = ref.metrics
    names = [name for name in metrics if not name.endswith(_ERROR)]
    return {name: {"value": metrics[name], "standard_error": metrics.get(name + _ERROR)} for name in names}


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, each in found.items():
        error = "" if each["standard_error"] is None else f", standard error {each['standard_error']:.3f}"
        lines.append((f"benchmark {name}", f"{each['value']:.3f}{error}"))
    return lines


FINDINGS = Findings(_found, _lines)
