"""The benchmark of a PPO iteration, `tests.benchmarks.ppo_iteration`, with scripted processes.

- the CPU time of each phase is that of all processes during the phase
- the summary has medians over the iterations, and the table shows it
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typing_extensions import override

from rlhf_core.testing import stage_context
from tests.benchmarks.ppo_iteration import PHASES, MeasuredController, _summary, _table, limits
from tests.unit.ppo.test_controller import Controller, _Experience


class Measured(MeasuredController, Controller):
    """Each question for the CPU time of the processes is answered with one more second."""

    asked = 0

    @override
    def _cpu_seconds(self) -> float:
        assert super()._cpu_seconds() > 0
        self.asked += 1
        return float(self.asked)


def test_each_phase_has_the_cpu_time_of_all_processes(tmp_path: Path) -> None:
    controller = Measured(stage_context(tmp_path), [_Experience()] * 2)
    controller.sync()
    row = controller.iterate()
    measured = {name.removeprefix("cpu/") for name in row if name.startswith("cpu/")}
    assert measured == {"rollout", "scoring", "training", "sync"} == set(PHASES)
    assert all(row[f"cpu/{phase}"] == 1.0 for phase in PHASES)


def test_the_summary_has_medians() -> None:
    rows = []
    for seconds in (1.0, 9.0, 2.0):
        row = {f"timing/{phase}": seconds for phase in PHASES} | {f"cpu/{phase}": seconds for phase in PHASES}
        others = ("rollout/tokens_per_s", "sync/gb_per_s", "rollout/logprob_gap_mean", "timing/step")
        rows.append(row | dict.fromkeys(others, seconds))
    result = _summary(rows, [2**30, 2**31])
    iteration = result["ppo_iteration"]
    rates = {"operations": 1e9, "bytes": 1e9}
    iteration |= {"rates": rates, "limits": limits(rates, "float32")}
    assert iteration["seconds"] == 2.0 and iteration["cpu_seconds"] == 2.0 * len(PHASES)
    assert iteration["parts"]["training"] == {"seconds": 2.0, "cpu_seconds": 2.0}
    console = Console(width=100)
    with console.capture() as shown:
        console.print(_table(result))
    assert "3.00 GiB in all workers" in " ".join(shown.get().split())
    assert iteration["fastest_seconds"] == pytest.approx(1.0)


def test_the_limit_of_a_part_is_that_of_its_operations_or_of_its_bytes() -> None:
    slow_memory = limits({"operations": 1e12, "bytes": 1e6}, "float32")
    slow_core = limits({"operations": 1e6, "bytes": 1e12}, "float32")
    weights = 4 * (4 * 256 * 256 + 3 * 256 * 688) + 256 * 2048
    assert slow_memory["rollout"] == pytest.approx(64 * 2 * 4 * weights / 1e6), "of both engines"
    assert slow_core["training"] == pytest.approx(slow_core["  forward"] * 3, rel=1e-3)
    rest = slow_memory["training"] - 3 * slow_memory["  forward"]
    assert slow_memory["  optimizer"] == pytest.approx(rest)
    halved = limits({"operations": 1e12, "bytes": 1e6}, "bfloat16")
    assert halved["sync"] == slow_memory["sync"] / 2
