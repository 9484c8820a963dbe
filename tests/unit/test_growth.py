"""The arithmetic of `tests.benchmarks.growth`.

- an engine decodes as many sequences as it has room for; ranks wait for the slowest in each optimizer step
- equal devices and lengths take the ideal time and that of the communication, with and without overlap
- with staleness n, the sync is a part of every n-th step
- the slowest device determines the time of a step, but stalls of devices that are independent do so less with
  more staleness
"""

from __future__ import annotations

import pytest

from tests.benchmarks.growth import (
    EQUAL,
    PROMPT,
    RESPONSES,
    SCENARIOS,
    Meeting,
    Scenario,
    Speeds,
    decode_seconds,
    ideal_seconds,
    step_seconds,
)

SPEEDS = Speeds(all_reduce=0.1, sync=0.5)


def test_an_engine_decodes_as_computed_by_hand() -> None:
    speeds = Speeds(decode_step=1.0, decode_sequence=0.1)
    # Tokens of 3 and 1, then the rest of 3 and tokens of 2.
    assert decode_seconds([3, 1, 2], 2, speeds) == pytest.approx(1 * 1.2 + 2 * 1.2)
    assert decode_seconds([3, 1, 2], 9, speeds) == pytest.approx(1.3 + 1.2 + 1.1)


def test_ranks_meet_after_each_optimizer_step() -> None:
    meeting = Meeting(0.5, starts=[1.0, 2.0], seconds=[[1.0, 4.0], [3.0, 1.0]])
    assert meeting.end() == 2.0 + 3.5 + 4.5


@pytest.mark.parametrize("staleness", [0, 1])
def test_equal_devices_take_the_ideal_time_and_that_of_the_communication(staleness: int) -> None:
    ideal = ideal_seconds(staleness, SPEEDS)
    assert step_seconds(1, staleness, SCENARIOS[0], SPEEDS) == pytest.approx(ideal + 0.5)
    # Four optimizer steps, half of the all-reduce each. Training is a part of the longer phase.
    assert step_seconds(2, staleness, SCENARIOS[0], SPEEDS) == pytest.approx(ideal + 0.5 + 4 * 0.05)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_sync_is_a_part_of_every_nth_step(staleness: int) -> None:
    seconds = step_seconds(1, staleness, SCENARIOS[0], SPEEDS, range(6, 12))
    assert seconds == pytest.approx(ideal_seconds(staleness, SPEEDS) + 0.5 / staleness)


def test_more_staleness_averages_stalls() -> None:
    def seconds(staleness: int, stalls: float) -> float:
        scenario = Scenario("", lognormal=True, stalls=stalls)
        return step_seconds(8, staleness, scenario, SPEEDS, range(4, 16))

    assert seconds(1, 0.0) < seconds(4, 0.1) < 0.9 * seconds(1, 0.1)


def test_the_ideal_step_is_the_one_computed_by_hand() -> None:
    tokens = RESPONSES * (PROMPT + EQUAL)
    rollout = EQUAL * (SPEEDS.decode_step + RESPONSES * SPEEDS.decode_sequence)
    rest = 2 * tokens / SPEEDS.scoring + tokens / SPEEDS.training
    assert (ideal_seconds(0, SPEEDS), ideal_seconds(1, SPEEDS)) == pytest.approx((rollout + rest, rest))


def test_the_slowest_device_determines_the_time() -> None:
    seconds = step_seconds(2, 0, Scenario("slow", slowest=0.5), SPEEDS)
    assert seconds == pytest.approx(2 * ideal_seconds(0, SPEEDS) + 0.5 + 4 * 0.05)
