"""The guards, each with a planted failure and with cases that must not raise an alarm.

- three failing steps in a row give one warning with the name of the guard, `warnings/<name>` = 1, and with
  `stop` the end of the run
- two failing steps, an interruption, and values within the limit give no alarm; a guard that is `off` is not
  checked
- counters and initial values survive a restart
- steps of the critic's warm-up do not count for the guard of the critic
- docs/diagnose.md has a row for each guard, with the failure of this test
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.ppo_sections import LIMITS, GuardName
from rlhf_core.errors import GateFailed
from rlhf_core.ppo.watching.guards import NAMES
from rlhf_core.ppo.watching.step_checks import StepChecks
from tests.unit.ppo.watching.test_step_checks import GOOD

PAGE = Path(__file__).resolve().parents[4] / "docs" / "diagnose.md"

Change = dict[str, float]
# Name, the failure that was planted, and what is just short of the limit. The first step is GOOD.
FAILURES: list[tuple[str, Change, Change]] = [
    ("eos_loss", {"rollout/eos_rate": 0.0}, {"rollout/eos_rate": 0.5}),
    ("eos_loss", {"rollout/eos_rate": 0.12}, {"rollout/eos_rate": 0.6}),
    ("entropy_collapse", {"policy/entropy": 1e-4}, {"policy/entropy": 0.1}),
    ("entropy_explosion", {"policy/entropy": 10.0}, {"policy/entropy": 3.0}),
    ("negative_kl", {"objective/kl": -80.0}, {"objective/kl": -1.0}),
    ("length_drift", {"rollout/length": 300.0}, {"rollout/length": 200.0}),
    ("length_drift", {"rollout/length": 33.0}, {"rollout/length": 50.0}),
    ("loops", {"rollout/repeating_rate": 0.3}, {"rollout/repeating_rate": 0.19}),
    ("score_length", {"rollout/score_length_correlation": 0.95}, {"rollout/score_length_correlation": 0.89}),
    ("score_length", {"rollout/score_length_correlation": -0.95}, {"rollout/score_length_correlation": -0.8}),
    ("blind_critic", {"value/explained_variance": -0.2}, {"value/explained_variance": 0.01}),
    ("score_clip", {"objective/score_clipfrac": 0.05}, {"objective/score_clipfrac": 0.01}),
]
EACH = pytest.mark.parametrize(("name", "failure", "short"), FAILURES, ids=[f[0] for f in FAILURES])


def checks_of(**options: Any) -> StepChecks:
    ppo = {"guards": options, "guard_limits": {"blind_critic": 3}}
    return StepChecks(config_from_tree({"ppo": ppo}, "test").ppo)


def look(checks: StepChecks, step: int, change: Change) -> dict[str, float]:
    metrics = GOOD | change
    checks.verify(metrics, step)
    return {name: value for name, value in metrics.items() if name.startswith("warnings/")}


@pytest.mark.parametrize(("action", "count"), [("warn", 1), ("stop", 1), ("off", 0)])
def test_responses_that_never_end_in_the_first_step_are_one_warning_at_once(
    action: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The condition of `eos_loss` compares with the first step, so it would never hold."""
    checks = checks_of(eos_loss=action)
    for step in range(5):
        look(checks, step, {"rollout/eos_rate": 0.0})
    found = [text for name, text in warnings_of(caplog) if name == "eos_loss"]
    assert len(found) == count
    for text in found:
        assert text.startswith("step 0: guard eos_loss: 0.0% of the responses of the SFT model end with EOS")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.guard, record.getMessage()) for record in caplog.records if hasattr(record, "guard")]


@EACH
def test_three_failing_steps_give_one_warning(
    name: str, failure: Change, short: Change, caplog: pytest.LogCaptureFixture
) -> None:
    checks = checks_of()
    seen = [look(checks, step, change) for step, change in enumerate([{}, *[failure] * 5, {}], start=1)]
    assert [alarms[f"warnings/{name}"] for alarms in seen] == [0, 0, 0, 1, 1, 1, 0]
    assert [alarm for alarms in seen for alarm, value in alarms.items() if value] == [f"warnings/{name}"] * 3
    ((guard, message),) = warnings_of(caplog)
    assert guard == name and message.startswith(f"step 4: guard {name}: ")


@EACH
def test_short_or_weak_deviations_give_no_alarm(
    name: str, failure: Change, short: Change, caplog: pytest.LogCaptureFixture
) -> None:
    checks = checks_of(**dict.fromkeys(NAMES, "stop"))
    with caplog.at_level(logging.WARNING):
        for step, change in enumerate([{}, failure, failure, {}, failure, failure, *[short] * 5], start=1):
            assert not any(look(checks, step, change).values())
    assert warnings_of(caplog) == []


@EACH
def test_stop_ends_the_run(name: str, failure: Change, short: Change) -> None:
    checks = checks_of(**{name: "stop"})
    for step, change in enumerate([{}, failure, failure], start=1):
        look(checks, step, change)
    with pytest.raises(GateFailed, match=f"^ppo step 4: guard {name}: .* ends the run$"):
        look(checks, 4, failure)


@EACH
def test_with_off_it_is_not_looked_at(name: str, failure: Change, short: Change) -> None:
    checks = checks_of(**{name: "off"})
    assert all(f"warnings/{name}" not in look(checks, step, failure) for step in range(1, 6))


@EACH
def test_counters_and_initial_values_survive_a_restart(name: str, failure: Change, short: Change) -> None:
    before, after = checks_of(), checks_of()
    for step, change in enumerate([{}, failure, failure], start=1):
        look(before, step, change)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert look(after, 4, failure)[f"warnings/{name}"] == 1.0


def test_missing_eos_from_the_start_is_no_alarm() -> None:
    checks = checks_of()
    for step in range(1, 6):
        assert not any(look(checks, step, {"rollout/eos_rate": 0.0}).values())


@pytest.mark.parametrize("explained", [{}, {"value/explained_variance": -40.0}])
def test_a_critic_is_not_judged_by_equal_scores(explained: Change) -> None:
    """With lambda below 1 or a KL in the reward, the returns of equal scores vary a little."""
    checks = checks_of(blind_critic="stop")
    usual = {name: value for name, value in GOOD.items() if name != "value/explained_variance"}
    for step in range(1, 6):
        metrics = usual | {"objective/scores_std": 0.0} | explained
        checks.verify(metrics, step)
        assert metrics["warnings/blind_critic"] == 0.0


def test_a_critic_is_not_judged_during_its_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    checks = checks_of(blind_critic="stop")
    blind = {"value/explained_variance": -0.2}
    for step in range(1, 9):
        assert not any(look(checks, step, blind | {"ppo/trains_policy": 0.0}).values())
    for step in (9, 10):
        assert not any(look(checks, step, blind | {"ppo/trains_policy": 1.0}).values())
    with pytest.raises(GateFailed, match=r"step 11: guard blind_critic: .*ppo\.critic_warmup_max_steps"):
        look(checks, 11, blind | {"ppo/trains_policy": 1.0})


def test_every_guard_is_configured_and_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(LIMITS) == set(get_args(GuardName)) == {*NAMES, "overoptimization", "diversity_loss"}
    assert "| `overoptimization` |" in page and "| `diversity_loss` |" in page
    assert set(NAMES) == {name for name, *_ in FAILURES}
    for name, failure, _ in FAILURES:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        for metric, value in failure.items():
            assert f"`{metric}` {value:g}" in row, (name, metric, value)
