"""What the stage `ppo` leaves: the policy as it is at the end, and the average of its weights where one is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster import controller, fleet
from rlhf_core.config.load import config_from_tree
from rlhf_core.data import dataset, decoding
from rlhf_core.stages import ppo
from rlhf_core.types import Services


class _Fleet:
    """Its policy's weights are the word for what was asked for."""

    def __init__(self, *_: Any) -> None:
        self.groups = {"policy": self}

    def __enter__(self) -> _Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, method: str, role: str, folder: str, average: bool) -> list[None]:
        assert (method, role) == ("save_model", "policy")
        Path(folder).mkdir()
        Path(folder, "model.safetensors").write_text("average" if average else "last")
        return []

    def wait(self, calls: list[None], what: str) -> None:
        pass


@pytest.mark.parametrize(
    ("decay", "left"),
    [(None, {"policy": "last"}), (0.9, {"policy": "last", "policy_ema": "average"})],
)
def test_the_average_of_the_weights_is_a_model_of_its_own(
    decay: float | None, left: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    for folder in (data / "tokenizer", out):
        folder.mkdir(parents=True)
    (data / "tokenizer" / "tokenizer.json").write_text("{}")
    (out / "metrics.jsonl").write_text('{"objective/kl": 1.0}\n')
    monkeypatch.setattr(decoding, "load_decoder", lambda _data: SimpleNamespace(pad=0))
    monkeypatch.setattr(dataset, "load_prompts", lambda _data, _split: [])
    monkeypatch.setattr(fleet, "Fleet", _Fleet)
    monkeypatch.setattr(controller.PPOController, "run", lambda self: None)
    config = config_from_tree({"run": {"device": "cpu"}, "ppo": {"ema_decay": decay}}, "test")
    tracker: Any = SimpleNamespace(flush=lambda: None)
    nothing: Any = None
    inputs = {"data": data, "sft": tmp_path, "reward": tmp_path}
    ppo.run(config, Services(inputs, out, tmp_path, nothing, tracker, lambda *_: None))
    assert {path.parent.name: path.read_text() for path in out.rglob("*.safetensors")} == left
    assert {path.parent.name for path in out.rglob("tokenizer.json")} == set(left)
