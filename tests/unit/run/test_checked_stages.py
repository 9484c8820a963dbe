"""The command, the flow and the Python API check the devices of the stages that the run comes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.rlhf import rlhf
from rlhf_cli.main import main
from rlhf_core.config.load import load_config
from rlhf_core.errors import InputError
from rlhf_core.ops.api import run_pipeline
from rlhf_core.pipeline import StageName
from tests.support.demo_data import YAML
from tests.support.scripted_machine import ScriptedMachine, on_machine


def message_of(run: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        run()
    return caught.value.message


@pytest.mark.parametrize(("until", "is_refused"), [("sft", False), ("register", True)])
def test_devices_of_later_stages_are_no_error(
    until: StageName,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    file = str(tmp_path / "c.yaml")
    Path(file).write_text(
        f"run: {{device: cuda, home: {tmp_path}}}\n"
        f"model: {{path: {tmp_path}/none}}\n"  # so that nothing starts
        "ppo: {engine: {count: 4}}\n" + YAML
    )
    with on_machine(ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"])):
        assert main(["run", file, "--until", until]) == 2
        messages = [
            capsys.readouterr().err,
            message_of(lambda: rlhf.fn(config=file, until=until)),
            message_of(lambda: run_pipeline(load_config(file), until=until)),
        ]
    for message in messages:
        assert "model.path: " in message
        assert ("ppo: needs 6 GPUs" in message) == is_refused, message
