"""`rlhf pass-rates` on a small record.

- each prompt of the run is a row with the share of its responses that pass; held-out prompts have none
- the rows are prompts of the next run, with the pass rate in their fields
- prompts of several messages are left out, and a column without values is an error
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.formats import normalise
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import find_run
from rlhf_core.ops.pass_rates import WrittenRates, write_pass_rates
from rlhf_core.record.schema import schema_of
from rlhf_core.record.writer import RecordWriter
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PromptExample

TEXTS = ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 3?", "What is 4 + 4?"]
VALUES = {"p0": [1.0, 0.0, 1.0, 1.0], "p1": [0.0, 0.0], "p3": [1.0, 1.0]}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Undo what the command sets for the libraries of its process."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A run with three training prompts, of which `p3` has two messages, and the held-out prompt `p2`."""
    tokenizer = train_tokenizer(TEXTS, 300)
    encoder = Encoder(tokenizer, "chat", "test")

    def prompt(number: int) -> PromptExample:
        messages = [Message("user", TEXTS[number])]
        if number == 3:
            messages = [Message("system", "Be brief."), *messages]
        return PromptExample(f"p{number}", TEXTS[number], encoder.prompt(messages), {"answer": str(number)})

    home = tmp_path / "home"
    config = PipelineConfig.model_validate({"run": {"home": str(home), "name": "small"}})
    data = write_data_artifact(
        tmp_path / "data",
        prompts=[prompt(0), prompt(1), prompt(3)],
        eval_prompts=[prompt(2)],
        tokenizer=tokenizer,
    )
    schema = schema_of("rewards", ["answer"])
    rows = [
        {"kind": "ppo", "step": 1, "index": 0, "prompt_id": name, "reward/answer": value}
        for name, values in VALUES.items()
        for value in values
    ]
    record = RecordWriter(tmp_path / "parts", "ppo", RecordConfig(level="rewards"))
    record.add(1, pa.Table.from_pylist([{n: row.get(n) for n in schema.names} for row in rows], schema))
    record.save(tmp_path / "ppo")
    store = ArtifactStore(Store(config.store_url), home / "cache")
    made = Provenance(config=config.model_dump(mode="json", by_alias=True))
    stages = {
        "data": {"artifact": store.publish("data", "c" * 16, data, made).uri},
        "ppo": {"artifact": store.publish("ppo", "c" * 16, tmp_path / "ppo", made).uri},
    }
    file = home / "runs/small/summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"run": "small", "stages": stages}))
    return str(home)


def test_the_share_of_passing_responses_is_a_field_of_the_rows(home: str, tmp_path: Path) -> None:
    file = tmp_path / "rated.jsonl"
    found = write_pass_rates(find_run("small", home), "ppo", "reward/answer", 1.0, file)
    assert found == WrittenRates(rated=2, unrated=1, left_out=1, useful=1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [
        {"answer": "0", "prompt": TEXTS[0], "pass_rate": 0.75, "sampled": 4},
        {"answer": "1", "prompt": TEXTS[1], "pass_rate": 0.0, "sampled": 2},
        {"answer": "2", "prompt": TEXTS[2]},
    ]
    assert normalise(rows[0], "prompt", thoughts="keep").meta["pass_rate"] == 0.75


def test_the_command_says_how_many_prompts_are_useful(
    home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--home", home, "--output", str(tmp_path / "rated.jsonl")]
    assert main(["pass-rates", "small", "--column", "reward/answer", *options]) == 0
    shown = capsys.readouterr().out
    assert "2 prompts with a pass rate, 1 without" in shown and "1 are neither always nor never" in shown
    assert "left out, because they have several messages: 1" in shown
    with pytest.raises(InputError, match="no response that ppo recorded has a value in score"):
        write_pass_rates(find_run("small", home), "ppo", "score", 1.0, tmp_path / "rated.jsonl")
