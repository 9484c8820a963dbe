"""Checks of `run.executor` before the run, and its fields.

- local needs nothing, and looks at nothing
- a stage on another host needs a store, a tracker, a home and a device that do not depend on this machine
- each executor needs its address, its commands or its package, and its template
- the fields are in no stage key
- the fields of a stage replace those of `default`, also after they went through JSON
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import pipeline_key
from rlhf_core.config.pipeline import ResourcesConfig
from rlhf_core.errors import ConfigError
from rlhf_core.executors.check import check_executors
from rlhf_core.planning.check import check_devices

REMOTE: dict[str, Any] = {
    "run": {"home": "/var/tmp/rlhf", "device": "cuda", "executor": "ray"},
    "store": {"url": "s3://bucket/rlhf"},
    "tracking": {"uri": "http://mlflow:5000"},
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def config(**changes: dict[str, Any]) -> PipelineConfig:
    sections = {name: {**section, **changes.get(name, {})} for name, section in REMOTE.items()}
    return PipelineConfig.model_validate(sections)


def errors(checked: PipelineConfig) -> list[str]:
    return [finding.message for finding in check_executors(checked) if isinstance(finding, ConfigError)]


def test_local_needs_nothing() -> None:
    assert list(check_executors(PipelineConfig())) == []
    assert not PipelineConfig().run.is_remote


def test_a_whole_configuration_passes_and_this_machine_needs_no_gpu() -> None:
    assert errors(config()) == []
    assert list(check_devices(config())) == []


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        ("store", "url", None, "store.url: .*every host mounts"),
        ("store", "url", "store", "store.url: .*'store'"),
        ("tracking", "uri", None, "tracking.uri"),
        ("run", "device", "auto", "run.device: .*set cuda or cpu"),
        ("run", "home", ".rlhf", "run.home: .*absolute"),
    ],
)
def test_what_another_host_cannot_reach_is_refused(section: str, field: str, value: Any, words: str) -> None:
    [message] = errors(config(**{section: {field: value}}))
    assert re.search(words, message)


def test_a_database_file_is_a_warning() -> None:
    findings = list(check_executors(config(tracking={"uri": "sqlite:////shared/mlflow.db"})))
    assert len(findings) == 1
    assert "every host must mount its folder" in str(findings[0])


@pytest.mark.parametrize("address", ["", "head:6379", "ray://head:10001", "http://user:pw@head:8265"])
def test_ray_needs_the_address_of_the_dashboard(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    [message] = errors(config())
    assert message.startswith("RAY_API_SERVER_ADDRESS: ")
    assert "pw" not in message


def test_slurm_needs_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [message] = errors(config(run={**REMOTE["run"], "executor": "slurm"}))
    assert "sbatch" in message


def test_a_template_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {**REMOTE["run"], "executor": "local"}
    run["resources"] = {"ppo": {"executor": "kuberay", "template": str(tmp_path / "none.yaml")}}
    [message] = errors(config(run=run))
    assert message.startswith("run.resources.ppo.template: ")


def test_one_stage_can_run_elsewhere() -> None:
    run = {**REMOTE["run"], "resources": {"default": {"nodes": 2}, "register": {"executor": "local"}}}
    checked = config(run=run).run
    assert checked.is_remote
    assert (checked.executor_of("register"), checked.executor_of("ppo")) == ("local", "ray")


def test_the_fields_are_in_no_key() -> None:
    resources = {"default": {"nodes": 2, "queue": "q"}, "sft": {"image": "x", "executor": "slurm"}}
    changed = PipelineConfig.model_validate({"run": {"executor": "kuberay", "resources": resources}})
    assert pipeline_key(changed, {}) == pipeline_key(PipelineConfig(), {})


def test_fields_of_a_stage_replace_those_of_default() -> None:
    given = ResourcesConfig.model_validate(
        {"default": {"nodes": 2, "gpus_per_node": 8, "queue": "a"}, "sft": {"queue": "b", "gpus_per_node": 0}}
    )
    for resources in (given, ResourcesConfig.model_validate_json(given.model_dump_json(by_alias=True))):
        sft, ppo = resources.of("sft"), resources.of("ppo")
        assert (sft.nodes, sft.gpus_per_node, sft.queue) == (2, 0, "b")
        assert (ppo.nodes, ppo.gpus_per_node, ppo.queue) == (2, 8, "a")
        assert resources.of("register").nodes == 2


@pytest.mark.parametrize(
    "fields", [{"memory_per_node": "64GB"}, {"queue": "a b"}, {"queue": "--wrap=x"}, {"priority": "-x"}]
)
def test_values_that_are_no_names_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="pattern"):
        ResourcesConfig.model_validate({"sft": fields})
