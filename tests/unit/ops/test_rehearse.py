"""The configuration, the model and the checks of `rlhf rehearse`. `tests.benchmarks.rehearsal_faults` has its
faults; its `--whole` runs whole ones.

- every shipped configuration gives a valid configuration with the placement of its own: several ranks and
  engines stay several, the ranks divide minibatches as before, groups stay groups
- what a CPU cannot show is a change with a reason
- a small model has the vocabulary, the classes and every kind of layer of the large one
- the first and the longest rows are read
- a model or a source that is not here is refused with the field and a fix
- faults of template, rewards, user functions and store are named with field and fix, sound ones are not
- a run that fails, hangs or is killed is reported
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlhf_cli.before import _show_rehearsal
from rlhf_core.config.data import Source
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.ops.rehearse import Rehearsal, check_registry, rehearse
from rlhf_core.ops.rehearse_config import LONGEST, ROWS, Change, Derivation, shrink
from rlhf_core.system.files import CONFIGS
from rlhf_core.system.home import HOME_OF_RUNS
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.benchmarks.rehearsal_faults import FAULTS, SOUND, Base, Case, prepare

PROFILES = ("production", "budget", "entry", "one-h100", "overoptimization")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsed")
    prepare(folder)
    return folder


def derive(files: Path, config: PipelineConfig, place: Path) -> Derivation:
    return Derivation(config, place, files / "model")


def with_rows(files: Path, config: PipelineConfig) -> PipelineConfig:
    rows = (Source(path=str(files / "rows.jsonl")),)
    return config.with_values({f"data.{name}": rows for name in ("sft", "preference", "prompts")})


@pytest.mark.parametrize("name", PROFILES)
def test_the_placement_and_the_batches_of_a_profile_stay(files: Path, tmp_path: Path, name: str) -> None:
    given = load_config(CONFIGS[name])
    if given.model.path is not None:
        given = with_rows(files, given)
    derived = derive(files, given, tmp_path).config
    file = tmp_path / "derived.yaml"
    file.write_text(yaml.safe_dump(derived.model_dump(mode="json", by_alias=True)))
    config = load_config(file)
    assert config == derived
    assert config.run.device == "cpu"
    for had, has in (
        (given.ppo.policy_deepspeed.ranks, config.ppo.policy_deepspeed.ranks),
        (given.sft.deepspeed.ranks, config.sft.deepspeed.ranks),
        (given.ppo.engine.count, config.ppo.engine.count),
    ):
        assert min(had, 2) <= has <= had
    assert config.ppo.colocate == given.ppo.colocate
    assert config.ppo.policy_deepspeed.zero_stage == given.ppo.policy_deepspeed.zero_stage
    assert config.ppo.lora == given.ppo.lora
    assert config.ppo.syncs_adapter == given.ppo.syncs_adapter
    assert config.ppo.minibatches == given.ppo.minibatches
    assert config.ppo.minibatch_size % config.ppo.policy_deepspeed.ranks == 0
    assert config.ppo.steps == 2


def test_a_batch_that_the_ranks_do_not_divide_stays_one(files: Path, tmp_path: Path) -> None:
    tree = Base(files, ExitStack()).tree()
    tree["ppo"] |= {
        "prompts_per_step": 20,
        "minibatches": 4,
        "policy_deepspeed": {"ranks": 2, "zero_stage": 1},
    }
    config = derive(files, config_from_tree(tree), tmp_path).config
    assert config.ppo.minibatch_size % config.ppo.policy_deepspeed.ranks == 1


def test_what_a_cpu_cannot_show_has_a_reason(files: Path, tmp_path: Path) -> None:
    given = with_rows(files, load_config(CONFIGS["entry"]))
    missed = {change.field: change.missed for change in derive(files, given, tmp_path).changes}
    assert missed["ppo.weight_sync.backend"] == "a sync by ipc"
    assert missed["run.device"] is not None
    compiled = with_rows(files, load_config(CONFIGS["budget"]))
    changes = {change.field: change for change in derive(files, compiled, tmp_path / "budget").changes}
    assert changes["ppo.engine.enforce_eager"].used
    assert missed["ppo.prompts_per_step"] is None
    assert str(missed["model.path"]).startswith("the weights of mistralai/Mistral-7B-v0.1: ")


def test_a_small_model_keeps_vocabulary_classes_and_every_kind_of_layer(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    (large / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma3_text",
                "architectures": ["Gemma3ForCausalLM"],
                "hidden_size": 2048,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 512,
                "sliding_window": 64,
                "layer_types": kinds * 4,
            }
        )
    )
    (large / "tokenizer.json").write_text("{}")
    said = shrink(large, tmp_path / "small", seed=0)
    small = json.loads((tmp_path / "small" / "config.json").read_text())
    assert said.startswith("6 of 24 layers")
    assert small["architectures"] == ["Gemma3ForCausalLM"]
    assert small["vocab_size"] == 512
    assert small["layer_types"] == kinds
    assert small["sliding_window"] == 64
    assert small["num_attention_heads"] == 2 * small["num_key_value_heads"]
    assert (tmp_path / "small" / "tokenizer.json").exists()
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 4e6


def test_the_first_and_the_longest_rows_are_read(files: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "chosen": "yes", "rejected": "no"} for number in range(300)]
    for number in range(LONGEST):
        rows[100 + 20 * number]["chosen"] = "yes " * (100 + number)
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = Base(files, ExitStack()).tree()
    tree["data"]["preference"] = [{"path": str(file)}]
    derived = derive(files, config_from_tree(tree), tmp_path / "place")
    cut = Path(derived.config.data.preference[0].path).read_text().splitlines()
    assert [json.loads(line) for line in cut] == rows[:ROWS] + rows[100 : 100 + 20 * LONGEST : 20]


def test_a_model_that_is_not_here_is_refused_with_what_is_enough(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.path: mistralai/.* give --model FOLDER with its config"):
        Derivation(load_config(CONFIGS["entry"]), tmp_path, None)


def test_a_source_that_is_not_here_is_refused_with_a_fix(files: Path, tmp_path: Path) -> None:
    given = config_from_tree(Base(files, ExitStack()).tree())
    given = given.with_values({"data.prompts": (Source(path=str(tmp_path / "none.jsonl")),)})
    with pytest.raises(InputError, match=r"data\.prompts\.0\.path: .* give a copy of some rows"):
        derive(files, given, tmp_path)


def found_in(files: Path, place: Path, case: Case, run: list[str], seconds: float = 60) -> list[str]:
    place.mkdir()
    with ExitStack() as servers:
        tree = case.make(Base(files, servers))
        tree["tracking"] = {"uri": f"sqlite:///{files / 'mlflow.db'}"}
        file = place / "case.yaml"
        file.write_text(yaml.safe_dump(tree))
        return rehearse(str(file), (), place, run, seconds=seconds).problems


SOME = (
    "a template that cuts answers",
    "a doubled BOS",
    "a reward that is always the same",
    "a loss that raises",
)


@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_named_with_field_and_fix(files: Path, tmp_path: Path, name: str) -> None:
    case = next(case for case in FAULTS if case.name == name)
    problems = found_in(files, tmp_path / "place", case, [])
    assert any(problem.startswith(case.field) and ";" in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["PPO with a rule", "a reward that compares"])
def test_a_sound_configuration_passes_and_leaves_the_home_of_the_user_alone(
    files: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_OF_RUNS, str(tmp_path / "users"))
    case = next(case for case in SOUND if case.name == name)
    assert found_in(files, tmp_path / "place", case, []) == []
    assert not (tmp_path / "users").exists()


def test_the_probe_of_the_registry_is_one_that_a_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.server.handlers import _validate_source_run

    sources = []
    create = Mlflow.create_version

    def recorded(mlflow: Mlflow, name: str, *, source: str, **rest: Any) -> Any:
        sources.append(source)
        return create(mlflow, name, source=source, **rest)

    monkeypatch.setattr(Mlflow, "create_version", recorded)
    assert list(check_registry(PipelineConfig().with_values({"run.home": str(tmp_path)}))) == []
    _validate_source_run(sources[0], "")


def test_a_reward_may_mask_a_few_answers(files: Path, tmp_path: Path) -> None:
    body = "return [len(s.response) if s.response.strip() else float('nan') for s in samples]"
    case = Case("masked", lambda base: base.python(body, on_error="mask"))
    assert found_in(files, tmp_path / "place", case, []) == []


@pytest.mark.parametrize(
    ("problems", "line"), [([], "would run: run.yaml"), (["a: b; c"], "1 problem: run.yaml")]
)
def test_the_first_line_says_whether_it_would_run(problems: list[str], line: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    found = Rehearsal([Change("run.device", "cuda", "cpu", "GPUs")], problems, {"registered": "once"})
    _show_rehearsal(found, "run.yaml", "would run", console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith(line)
    place = {word: index for index, text in enumerate(lines) for word in text.split()}
    assert place.get("b;", 0) < place["run.device=cpu"] < place["once"]


def test_a_store_that_ignores_conditional_puts_is_named(files: Path, tmp_path: Path) -> None:
    case = next(case for case in FAULTS if case.name == "a store that ignores conditional puts")
    assert found_in(files, tmp_path / "place", case, [])[0].startswith("store.url: ")


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("import sys; print('failed: the disk is full'); sys.exit(3)", 60, "failed: the disk is full"),
        ("import time; time.sleep(60)", 1, "run: it did not end within 1 s"),
    ],
)
def test_a_run_that_fails_or_hangs_is_reported(
    files: Path, tmp_path: Path, program: str, seconds: float, said: str
) -> None:
    run = [sys.executable, "-c", program]
    problems = found_in(files, tmp_path / "place", SOUND[0], run, seconds)
    assert len(problems) == 1
    assert problems[0].startswith(said)


def test_the_checks_do_not_claim_to_score_with_a_model_that_is_not_trained(tmp_path: Path) -> None:
    rewards = 'ppo.rewards=[{"type": "model"}, {"type": "repetition"}]'
    found = rehearse("tests/assets/tiny.yaml", [rewards], tmp_path, [])
    assert found.exercised["rewards on answers of the rows"] == "repetition"
