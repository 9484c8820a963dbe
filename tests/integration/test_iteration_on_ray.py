"""The benchmarks of a PPO iteration and of rollouts, on the real stack, with few short responses.

- each ends with its table, and with the file that it names, which has a number for each part
- the costs of Ray's calls and of a wait, for `driver_scale`, can be measured
- so can those of the objects of a step, for `driver_tokens`

All of them use one fleet, because its start takes most of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlhf_core.ppo.fleet.fleet import Fleet
from tests.benchmarks import driver_scale, driver_tokens, ppo_iteration, rollout
from tests.support.tiny_llama import save_tiny_benchmark_model

PROMPTS, PROMPT, RESPONSE = 8, 6, 4


@pytest.fixture
def shared_fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fleet]]:
    """Let the programs share the fleet of the first one, with one engine and two ranks."""
    started: list[Fleet] = []
    with ExitStack() as stack:

        @contextmanager
        def shared(*arguments: Any) -> Iterator[Fleet]:
            if not started:
                started.append(stack.enter_context(Fleet(*arguments)))
            yield started[0]

        tree_of = ppo_iteration.iteration_tree

        def smaller(*arguments: Any, **options: Any) -> dict[str, Any]:
            tree = tree_of(*arguments, **options)
            tree["ppo"] |= {"colocate": "pairs", "engine": {**tree["ppo"]["engine"], "count": 1}}
            return tree

        monkeypatch.setattr(ppo_iteration, "iteration_tree", smaller)
        for name, value in (("PROMPTS", PROMPTS), ("PROMPT", PROMPT), ("RESPONSE", RESPONSE)):
            monkeypatch.setattr(ppo_iteration, name, value)
        for program in (rollout, driver_scale, driver_tokens):
            # Actors have no working folder on their path, so that they cannot import these modules.
            cloudpickle.register_pickle_by_value(program)
            stack.callback(cloudpickle.unregister_pickle_by_value, program)
        for program in (ppo_iteration, rollout):
            monkeypatch.setattr(program, "Fleet", shared)
            monkeypatch.setattr(program, "make_model", save_tiny_benchmark_model)
        yield started


def test_the_programs_end_with_their_tables_and_files(
    shared_fleet: list[Fleet],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    iteration(tmp_path / "new" / "iteration.json", capsys)
    rollouts(tmp_path / "new" / "rollout.json", capsys)
    assert len(shared_fleet) == 1
    costs_of_ray()


def iteration(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for staleness in ("0", "1"):
        options = ["--iterations", "2", "--warm-up", "1", "--staleness", staleness]
        ppo_iteration.main([*options, "--out", str(out)])
        shown = capsys.readouterr().out
        assert shown.splitlines()[-1] == f"json: {out}"
        assert "PPO iteration, median of 2" in shown
        found = json.loads(out.read_text())["ppo_iteration"]
        assert found["iterations"] == 2
        assert found["rollout_tokens_per_s"] > 0
        # Rollouts of an older policy differ from the present one.
        assert staleness == "1" or found["logprob_gap"] < 1e-4
        assert all(part["seconds"] > 0 for part in found["parts"].values())
        assert all((part["cpu_seconds"] > 0) == (staleness == "0") for part in found["parts"].values())
        assert "utilisation/data_wait" in found["utilisation"]


def rollouts(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "4", "--samples", "2", "--prompt-tokens", "6", "--new-tokens", "4"]
    rollout.main([*sizes, "--engines", "1", "--rounds", "1", "--eos-share", "0.02", "--out", str(out)])
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"json: {out}"
    found = json.loads(out.read_text())
    assert list(found["rollout"]) == ["bare", "seeds", "seeds, logprobs", "rollout"]
    for name, row in found["rollout"].items():
        assert min(row.values()) > 0
        assert f"│ {name} │ {row['tokens_per_s']:.0f} │" in " ".join(shown.split())
    assert found["rollout"]["bare"]["share_of_bare"] == 1.0


def costs_of_ray() -> None:
    """Measure with the Ray of the fleet, which has a CPU that no rank and no engine uses."""
    # Undone before the fleet ends, which shuts Ray down.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.init", lambda **_options: None)
        patch.setattr("ray.shutdown", lambda: None)
        patch.setattr(driver_scale, "START_SECONDS", 0.5)
        patch.setattr(driver_scale, "WAIT_SECONDS", 2.0)
        per_call, per_reference = driver_scale.ray_costs()
        waiting = driver_scale.waiting_cost(ranks=2, processes=16)
        for name, value in (("ROUNDS", 1), ("IDLE_SECONDS", 0.5), ("ROWS_OF_RANK", 32)):
            patch.setattr(driver_tokens, name, value)
        found = driver_tokens.measure_ray(1, 512)
    assert 0 < per_call < 0.05 and abs(per_reference) < 0.001
    assert 0 < waiting < 2
    assert list(found) == ["put", "ranks", "experience", "scores", "texts", "driver", "freed"]
    assert all(set(part) == {"driver", "actors", "daemons"} for part in found.values())
    # One short round: what idle processes need, which is subtracted, can be more.
    assert all(abs(seconds) < 5 for part in found.values() for seconds in part.values())
