"""What the pipeline reads from outside its store: digests for keys and data sets for MLflow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import (
    BASE_STAGES,
    MODEL_PATH,
    BaseModelAddress,
    base_of,
    is_reference,
    parse_address,
)
from rlhf_core.config.data import Source
from rlhf_core.config.rewards import LanguageModelReward, UserFunction
from rlhf_core.data.sources import model_digest, model_mark, short_name, source_digests, source_marks
from rlhf_core.evaluation.votes import read_vote_files
from rlhf_core.rewards.check import function_file, functions_of_ppo, reward_fields
from rlhf_core.rewards.questions import FOLDER, RUBRIC, rubric_text
from rlhf_core.stages.benchmark import benchmark_digests
from rlhf_core.tracking.tracker import DataSet


def external_digests(config: PipelineConfig) -> dict[str, str]:
    """Return digests of all that the pipeline reads from outside: data, base model, template, the Python
    files that rewards come from, the files of the judge, votes of people, and tasks of the benchmark.
    """
    of_model = partial(model_digest, home=config.run.home)
    beside = _beside_sources(config, _further_models(config), of_model)
    return source_digests(config) | beside | benchmark_digests(config)


def external_marks(config: PipelineConfig) -> dict[str, str]:
    """Return a mark of each of these inputs but references, without reading large files (`source_marks`)."""
    models = [base for base in _further_models(config) if not is_reference(base.path)]
    beside = _beside_sources(config, models, model_mark)
    return source_marks(config) | beside | benchmark_digests(config, of_file=_file_mark)


def _file_mark(file: Path) -> str:
    state = file.stat()
    # The inode as well: a file that replaces another one by a rename can have its size and its time.
    return f"{state.st_ino} {state.st_size} {state.st_mtime_ns}"


def _further_models(config: PipelineConfig) -> list[BaseModelAddress]:
    """Return the models from outside that stages read beside that of `model.path`."""
    bases = [base_of(config, stage) for stage in BASE_STAGES]
    return [base for base in bases if base is not None and base.field != MODEL_PATH]


def _beside_sources(
    config: PipelineConfig, models: Sequence[BaseModelAddress], of_model: Callable[[str, str | None], str]
) -> dict[str, str]:
    """Return digests of small files, and what `of_model(path, revision)` returns of models."""
    found = reward_code_digests(config)
    judge = config.evaluate.language_model
    if judge is not None and judge.rubric is not None:
        # Of the text that is asked and not of the file, as `evaluation.language_model`
        # compares it: a line break at the end changes no verdict.
        found[RUBRIC] = hashlib.sha256(rubric_text(judge.rubric).encode()).hexdigest()
    if judge is not None and judge.path is not None:
        found[FOLDER] = of_model(judge.path, None)
    for base in models:
        found[base.digest_name] = of_model(base.path, base.revision)
    for field, file in read_vote_files(config).items():
        found[field] = file.digest
    return found


def reward_code_digests(config: PipelineConfig) -> dict[str, str]:
    """Return digests of the Python files of a user's functions (not of what those import) and of the rubrics
    of language models, because a changed reward is another PPO run or another regression set.
    """
    rewards = {}
    sources = {**reward_fields(config), **functions_of_ppo(config)}
    for field, source in sources.items():
        file = None
        if isinstance(source, UserFunction):
            file = function_file(source)
        elif isinstance(source, LanguageModelReward) and source.rubric is not None:
            file = Path(source.rubric)
        if file is not None and file.is_file():
            rewards[field] = hashlib.sha256(file.read_bytes()).hexdigest()
    return rewards


def data_sets(config: PipelineConfig, digests: Mapping[str, str]) -> list[DataSet]:
    """Return the data sources of `config` as MLflow data sets.

    `digests` uses the names of `source_digests`.
    """
    found = []
    for name, index, source in config.data.sources():
        place = f"data.{name}[{index}]"
        kind, address = _address(source)
        digest = digests[place]
        if kind not in ("local", "s3"):
            # The digests of hub data sets and of the demo task are names, which can be too long for MLflow.
            digest = hashlib.sha256(digest.encode()).hexdigest()
        found.append(DataSet(f"{place} {short_name(source)}", digest, kind, address))
    return found


def _address(source: Source) -> tuple[str, dict[str, Any]]:
    """Return the type and the address of a source in the format of MLflow's own sources."""
    kind = parse_address(source.path).kind
    if kind == "hub":
        return "hugging_face", {"path": source.path, "split": source.split, "revision": source.revision}
    if kind == "synthetic":
        return "code", {
            "tags": {"mlflow.source.name": "rlhf_core/data/synthetic.py", "mlflow.source.type": "LOCAL"}
        }
    return kind, {"uri": source.path}
