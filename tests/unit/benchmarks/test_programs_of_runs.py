"""The benchmarks that start whole runs, with scripted runs whose files are those of the stages.

- they start the runs that they describe, read their files, and end with tables, pages and figures
- a run that fails ends the program with its command
- stored evaluations give the same tables as those of the runs
- the record's bytes, its share of the time and changed weights are read from the runs of each level
- the adapter is compared in vLLM, in PEFT and merged, from the files of a run
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from typing_extensions import override

from rlhf_core.config.load import load_config
from rlhf_core.ppo.watching.selection import HeldOutResult, Selection
from rlhf_core.record.writer import RecordWriter
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.system.files import write_jsonl
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PromptExample, Rollout
from tests.benchmarks import adapter_agreement, alarm, learning_curves, overoptimization, record_cost
from tests.chaos.harness import CONFIG
from tests.integration.learning import ALGORITHMS
from tests.support.tiny_llama import save_tiny_llama

PNG = b"\x89PNG"


class Runs:
    """Scripted `rlhf run`: it publishes the files of PPO and prints where its summary is."""

    def __init__(self) -> None:
        self.overrides: list[list[str]] = []
        """Of each run."""
        self.returncode = 0

    def run(self, command: Sequence[str], **_options: Any) -> SimpleNamespace:
        words = list(command)[command.index("run") + 1 :]
        until = words.index("--until") if "--until" in words else len(words)
        config = load_config(Path(words[0]), words[1:until])  # refuses unknown settings
        self.overrides.append(words[1:until])
        home = Path(config.run.home)
        folder = home / f"ppo-{len(self.overrides)}"
        folder.mkdir(parents=True)
        self.write(folder, config)
        made = Provenance(config=config.model_dump(mode="json", by_alias=True))
        store = ArtifactStore(Store(config.store_url), home / "cache")
        artifact = store.publish("ppo", f"{len(self.overrides):016d}", folder, made).uri
        summary = {"stages": {"ppo": {"artifact": artifact}}, "reward": {"accuracy": 0.75}}
        file = home / "summary.json"
        file.write_text(json.dumps(summary))
        return SimpleNamespace(returncode=self.returncode, stdout=f"a table\nsummary: {file}\n")

    def write(self, folder: Path, config: Any) -> None:
        """Write the steps of PPO, and evaluations of versions 0, 1, ... by the code of the stage."""
        steps = range(1, 1 + config.ppo.steps)
        # The true reward falls after step 3, unless there is a KL penalty.
        falls = config.ppo.kl.coef == 0
        gold = [float(min(step, 6 - step)) if falls else 1.0 for step in steps]
        write_jsonl(
            folder / "metrics.jsonl",
            [
                {"rewards/model/mean": float(step), "rewards/gold/mean": value, "objective/kl": 2.0 * step}
                for step, value in zip(steps, gold, strict=True)
            ],
        )
        selection = Selection(config.ppo)
        chance = torch.Generator().manual_seed(config.run.seed)
        for version, value in enumerate([0.0, *gold]):
            columns = {"kl": [float(version)] * 8}
            for name in ("reward_model", "judge", "gold", "length"):
                # With the digits that the stored evaluations have.
                noise = torch.randn(8, generator=chance).tolist()
                columns[name] = [round(value + each, 4) for each in noise]
            metrics = {
                "eval/kl": float(version), "eval/objective": value, "eval/judge_correlation": 1.0,
                "eval/judge_correlation_error": 0.01,
            }  # fmt: skip
            selection.add(version, HeldOutResult(metrics, columns["judge"], columns))
        selection.write(folder / "evaluations.jsonl")
        selection.write_columns(folder / "evaluations_by_prompt.jsonl")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    scripted = Runs()
    for program in (alarm, overoptimization):
        monkeypatch.setattr(program, "subprocess", SimpleNamespace(run=scripted.run, PIPE=None))
    return scripted


def test_over_optimisation_ends_with_its_page_and_figure(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "page.md"
    overoptimization.main(["--out", str(page), "--home", str(tmp_path / "home"), "--seed", "3"])
    assert [overrides[1:] for overrides in runs.overrides] == [
        ["run.seed=3", "ppo.kl.coef=0"], ["run.seed=3", "ppo.kl.coef=0.05"],
    ]  # fmt: skip
    figure = page.with_suffix(".png")
    assert capsys.readouterr().out == f"page: {page}, figure: {figure}\n"
    assert figure.read_bytes().startswith(PNG)
    text = page.read_text()
    assert "accuracy on held-out pairs is 0.750" in text and "seed 3" in text
    # Means of steps 1 to 5, without the penalty and with it.
    assert "| 5 | 3.00 | 1.80 | 6.00 | 3.00 | 1.00 | 6.00 |" in text
    assert "the true reward is highest at step 3" in text


def test_the_alarm_is_judged_on_the_evaluations_of_the_runs_and_again_on_the_stored_ones(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "SIZES", ((8, 1), (4, 2)))
    curves = tmp_path / "new" / "curves.jsonl.gz"
    options = ["--curves", str(curves)]
    settings = ["--set", "sft.epochs=1"]
    kinds = ["--over", "0", "--sound", "0"]
    alarm.main([*options, "--home", str(tmp_path / "home"), *kinds, *settings])
    shown = capsys.readouterr().out
    assert ["ppo.kl.coef=0" in overrides for overrides in runs.overrides] == [True, False]
    assert all(overrides[-1] == "sft.epochs=1" for overrides in runs.overrides)
    for title in ("Sizes", "Movement", *(f"Rule: {rule}" for rule in alarm.RULES), "over, seed 0"):
        assert f"## {title}\n" in shown
    assert "| 8 | 1 |" in shown and "| 4 | 2 |" in shown
    # The gain of the run without a penalty, and the step of its highest true reward.
    assert any(row.startswith("| 0 | ") and "| 3 |" in row for row in shown.splitlines())
    alarm.main([*options, "--replay"])
    assert capsys.readouterr().out == shown
    assert len(runs.overrides) == 2, "it trains nothing"


def test_evaluations_that_are_not_there_cannot_be_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        alarm.main(["--replay", "--curves", str(tmp_path / "curves.gz")])
    assert "curves.gz does not exist; without --replay" in capsys.readouterr().err


def test_a_run_that_fails_ends_the_program(runs: Runs, tmp_path: Path) -> None:
    runs.returncode = 3
    with pytest.raises(SystemExit, match=r"overoptimization\.yaml .* ended with code 3"):
        overoptimization.main(["--out", str(tmp_path / "page.md"), "--home", str(tmp_path / "home")])
    with pytest.raises(SystemExit, match=r"demo\.yaml .* ended with code 3"):
        alarm.main(["--home", str(tmp_path / "home"), "--over", "0", "--sound"])


class RecordedRuns(Runs):
    """Each step takes 4 s, and the record 1 s of it. With `all`, the run has other files."""

    @override
    def write(self, folder: Path, config: Any) -> None:
        level, home = config.record.level, Path(config.run.home)
        (folder / "metrics.jsonl").write_text("other" if level == "all" else "same")
        if level != "none":
            parts = RecordWriter(home / "parts", "ppo", config.record)
            parts.add(1, pa.table({"response_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32()))}))
            parts.save(folder)
        with sqlite3.connect(home / "mlflow.db") as database:
            database.execute("create table metrics (key, value)")
            rows = [("timing/step", 4.0)] + [("timing/record", 1.0)] * (level != "none")
            database.executemany("insert into metrics values (?, ?)", rows)


def test_the_cost_of_the_record_is_that_of_each_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = RecordedRuns()
    monkeypatch.setattr(record_cost, "subprocess", SimpleNamespace(run=runs.run, DEVNULL=None))
    (tmp_path / "before").mkdir()
    record_cost.main(["--before", str(tmp_path / "before"), str(CONFIG), "ppo.steps=1"])
    assert [each[1:] for each in runs.overrides] == [
        ["ppo.steps=1", f"record.level={level}"] for level in record_cost.LEVELS
    ]
    shown = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    rows = [row for row in shown if row and row[0] in record_cost.LEVELS]
    assert [row[2:] for row in rows] == [
        ["0.00%", "True"], ["25.00%", "True"], ["25.00%", "True"], ["25.00%", "False"],
    ]  # fmt: skip
    assert float(rows[0][1]) == 0 and all(float(row[1]) > 0 for row in rows[1:])


def test_learning_curves_end_with_their_figure_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def curve(algorithm: str, seed: int, work: Path, *, steps: int) -> list[float]:
        assert work.is_dir()
        return [0.5 + 0.1 * seed] * steps

    monkeypatch.setattr(learning_curves, "reward_curve", curve)
    out = tmp_path / "new" / "curves.png"
    learning_curves.main(["--out", str(out), "--steps", "2"])
    assert capsys.readouterr().out == f"figure: {out}\n"
    assert out.read_bytes().startswith(PNG)
    found = json.loads(out.with_suffix(".json").read_text())
    assert set(found) == set(ALGORITHMS)
    assert found["grpo"] == [[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]]


class AdapterEngine:
    """An engine that gives all responses the log-probabilities of the merged model."""

    lm: Any = None

    def __init__(
        self, model: Path, _config: Any, *, adapter_rank: int, max_model_len: int, **_rest: Any
    ) -> None:
        assert (model / "config.json").exists() and adapter_rank == 4
        self._longest = max_model_len
        self.adapters: list[Any] = []
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(add_lora=self.adapters.append))

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[PromptExample], *, n: int, max_new_tokens: int, adapter: int, **_options: Any
    ) -> list[Rollout]:
        [request] = self.adapters
        assert (request.lora_int_id, n) == (adapter, 1)
        assert (Path(request.lora_path) / "adapter_model.safetensors").exists()
        rollouts = []
        for prompt in prompts:
            response = tuple(range(3, 3 + max_new_tokens))
            ids = torch.tensor([prompt.input_ids + response])
            assert ids.shape[1] <= self._longest
            logprobs = self.lm(ids).logits[0].log_softmax(-1)[len(prompt.input_ids) - 1 : -1]
            chosen = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
            rollouts.append(Rollout("p", 0, prompt.input_ids, response, tuple(chosen.tolist()), True, 0))
        return rollouts

    def shutdown(self) -> None:
        """Do nothing: no process was started."""


def test_the_adapter_is_compared_in_vllm_in_peft_and_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    prompts = [PromptExample(f"p{i}", "", tuple(range(3, 6 + i))) for i in range(5)]
    write_data_artifact(tmp_path / "data", eval_prompts=prompts)
    sft = save_tiny_llama(tmp_path / "sft" / "model")
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(sft), lora)
    model.save_pretrained(tmp_path / "ppo" / "adapter")
    AdapterEngine.lm = model.merge_and_unload().eval()
    AdapterEngine.lm.save_pretrained(tmp_path / "ppo" / "policy")
    summary = tmp_path / "summary.json"
    stages = {name: {"artifact": f"file://{tmp_path / name}"} for name in ("data", "sft", "ppo")}
    summary.write_text(json.dumps({"stages": stages}))
    monkeypatch.setattr(adapter_agreement, "Engine", AdapterEngine)
    adapter_agreement.main([str(summary), "--prompts", "3", "--tokens", "4"])
    *_, first, without_adapter, peft, merged_model = capsys.readouterr().out.splitlines()
    assert first.startswith("12 tokens sampled by vLLM with the adapter")
    rows = (without_adapter, peft, merged_model)
    without, with_peft, merged = (float(row.split()[-1]) for row in rows)
    assert without > 1e-3
    assert with_peft < 1e-5 and merged < 1e-5
