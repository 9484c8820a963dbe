"""Checks of `run.executor` before the run: what a job on another host cannot reach."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import given_tracking_uri
from rlhf_core.config.pipeline import Executor
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.executors.base import TEMPLATES
from rlhf_core.pipeline import STAGES
from rlhf_core.system.files import shipped
from rlhf_core.system.machine import machine


def check_executors(config: PipelineConfig) -> Iterator[Finding]:
    """Check that the jobs of all stages that do not run on this machine can be submitted and can work."""
    stages = {stage: config.run.executor_of(stage) for stage in STAGES}
    used = sorted({executor for executor in stages.values() if executor != "local"})
    if not used:
        return
    where = f"run.executor={used[0]}"
    folder = config.store_folder
    if config.store.url is None or (folder is not None and not folder.is_absolute()):
        yield ConfigError(
            f"store.url: with {where} must be s3://bucket/prefix, or an absolute path that every host mounts;"
            f" got {shown(config.store.url, limit=200)}; set it"
        )
    uri = given_tracking_uri(config)
    if uri is None:
        yield ConfigError(
            f"tracking.uri (or MLFLOW_TRACKING_URI): with {where} must be a server that every host reaches;"
            " got none; start one (`mlflow server`)"
        )
    # Only a warning, because a folder that every host mounts cannot be told from here.
    elif uri.startswith("sqlite:"):
        yield (
            f"tracking.uri is a file, {shown(uri, limit=200)}: with {where}, every host must mount its folder"
        )
    if config.run.device == "auto":
        yield ConfigError(
            f"run.device: auto looks for GPUs on this machine, and with {where} stages run on others; set"
            " cuda or cpu"
        )
    if not Path(config.run.home).is_absolute():
        yield ConfigError(
            f"run.home: with {where} must be an absolute path, which every host has for itself; got"
            f" {shown(config.run.home, limit=200)}; use for example /var/tmp/rlhf"
        )
    for name in used:
        yield from _check_scheduler(name)
    for stage, executor in stages.items():
        template = TEMPLATES.get(executor)
        if template is not None:
            file = shipped(config.run.resources.of(stage).template or template)
            if not file.is_file():
                yield ConfigError(
                    f"run.resources.{stage}.template: {shown(str(file), limit=200)} does not exist; name the"
                    f" template of {executor}"
                )


def _check_scheduler(executor: Executor) -> Iterator[Finding]:
    if executor == "ray":
        address = os.environ.get("RAY_API_SERVER_ADDRESS", "")
        if re.fullmatch(r"https?://[^/\s@]+/?", address) is None:
            yield ConfigError(
                "RAY_API_SERVER_ADDRESS: run.executor=ray needs the address of the cluster's dashboard; got"
                f" {shown(address)}; set it like http://head:8265"
            )
    elif executor == "slurm" and shutil.which("sbatch") is None:
        yield ConfigError(
            "run.executor: slurm needs the command sbatch on PATH; got none; install Slurm's client commands"
        )
    elif executor == "kuberay" and not machine().has_package("kubernetes"):
        yield ConfigError(
            "run.executor: kuberay needs the Python package kubernetes, which is not installed; install"
            " rlhf-pipeline[kubernetes]"
        )
