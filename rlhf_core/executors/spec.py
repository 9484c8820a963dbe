"""What a stage's child process is given, its input as a JSON file and its environment, and the outcome of a
stage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.pipeline import LAST_STAGE, StageName
from rlhf_core.storage.artifacts import ArtifactCopy
from rlhf_core.system.environment import STAGE_PROCESS, THREAD_VARIABLES, WITH_GPU, WITHOUT_GPU
from rlhf_core.system.files import write_atomic
from rlhf_core.system.home import Home
from rlhf_core.system.machine import machine
from rlhf_core.types import ArtifactRef


def config_from_json(tree: Mapping[str, Any]) -> PipelineConfig:
    """Return the configuration that was written as JSON, validated."""
    # In JSON mode, the strict sections accept a list for a tuple. For Python objects they do not.
    return PipelineConfig.model_validate_json(json.dumps(tree))


@dataclass(frozen=True)
class StageSpec:
    """One attempt at one stage."""

    stage: StageName
    key: str
    """Stage key: where the artifact and the checkpoints go."""
    config: PipelineConfig
    inputs: Mapping[StageName, ArtifactRef] = field(default_factory=dict)
    """The artifacts that the stage reads."""
    parent_run_id: str | None = None
    """MLflow run of the whole pipeline; None when tracking could not be reached."""
    pipeline_key: str = ""
    """Key of the whole pipeline, for lineage."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the external inputs of the stage, in `key` or in the key of an input."""
    until: StageName = LAST_STAGE
    """The last stage of the run."""
    decided_by: Mapping[str, Any] = field(default_factory=dict)
    """What `key` is made from (`rlhf_core.config.keys.key_content`), for the manifest of the artifact."""
    base_models: Mapping[str, ArtifactCopy] = field(default_factory=dict)
    """Base models that the hosts of a job fetch from a bucket, by their fields (`model.path`). Empty for a
    stage on the host of the flow, which has them.
    """

    @property
    def home(self) -> Home:
        """Local folder for scratch files and logs."""
        return Home.of(self.config.run.home)

    @property
    def work(self) -> Path:
        """Scratch folders of the attempts."""
        return self.home.work(self.stage, self.key)

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        write_atomic(path, _FORMAT.dump_json(self, by_alias=True, indent=2))

    @classmethod
    def read(cls, path: Path) -> StageSpec:
        """Return the spec in `path`, validated like any configuration."""
        return _FORMAT.validate_json(path.read_bytes())


_FORMAT = TypeAdapter(StageSpec)


@dataclass(frozen=True)
class StageRecord:
    """The outcome of one stage in one execution of the pipeline."""

    ref: ArtifactRef
    seconds: float
    """Since this execution first came to the stage; failed attempts count."""
    reused: bool
    continued: bool = False
    """The stage continued from a checkpoint of an earlier attempt."""

    @property
    def how(self) -> str:
        """`reused`, `continued` or `ran`."""
        if self.reused:
            return "reused"
        return "continued" if self.continued else "ran"


# -- environments: the parent sets threads and devices, because torch reads them when it is imported --


def past_proxies(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return NO_PROXY with the addresses of this machine added, so that local requests do not use a proxy.

    Libraries prefer different spellings of the variable, so both spellings get the entries of both. `*` means
    all hosts only if it is the only entry.
    """
    values = [environ.get(name, "").strip() for name in ("no_proxy", "NO_PROXY")]
    if "*" in values:
        return {"NO_PROXY": "*", "no_proxy": "*"}
    names = [name.strip() for names in values for name in names.split(",")]
    value = ",".join(dict.fromkeys([*filter(None, names), "127.0.0.1", "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}


def stage_environment(config: PipelineConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the whole environment of a stage's child process.

    Prefect's variables are removed. The reconciler takes every process with `PREFECT__FLOW_RUN_ID` for the
    engine of that flow run, and the child is not one.
    """
    # Not os.cpu_count(): a container or `taskset` can allow fewer cores than the host has.
    threads = str(config.run.threads or machine().cores())
    child = {name: value for name, value in environ.items() if not name.startswith("PREFECT_")}
    # Over the variables of the user: numbers depend on these.
    child |= STAGE_PROCESS
    child |= past_proxies(environ)
    # MKL and OpenBLAS read their own variables before that of OpenMP.
    child |= dict.fromkeys(THREAD_VARIABLES, threads)
    if runs_on_gpu(config):
        # The user's own value wins here, but not over STAGE_PROCESS.
        child = WITH_GPU | child
    else:
        child |= WITHOUT_GPU
    return child | config.run.env
