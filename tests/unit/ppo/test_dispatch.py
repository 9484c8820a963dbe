"""Dispatch: which prompts a step uses and which engine samples them.

- steps walk over one permutation after the other: every prompt once before any comes again
- prompts go to the least loaded engine, every prompt to exactly one, the same way each time
- what is sampled again keeps its engine and its batch; only that of an engine that is given up moves, as a
  whole
"""

from __future__ import annotations

from rlhf_core.ppo.dispatch import assign, prompts_of_step, reassign


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    # 6 prompts, 4 per step: three steps are two passes.
    drawn = [i for step in (1, 2, 3) for i in prompts_of_step(6, 4, 0, step)]
    assert sorted(drawn[:6]) == list(range(6))
    assert sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]


def test_a_step_is_a_function_of_seed_and_step_alone() -> None:
    late = prompts_of_step(50, 8, 3, 9)
    prompts_of_step(50, 8, 4, 1)
    assert prompts_of_step(50, 8, 3, 9) == late
    assert prompts_of_step(50, 8, 4, 9) != late


def test_the_least_loaded_engine_gets_the_next_longest_prompt() -> None:
    # 9 to engine 0, 5 to engine 1, 4 to engine 1 (5 < 9), 1 to engine 0 (9 = 9, the first).
    assert assign([1, 9, 5, 4], 2) == [[0, 1], [2, 3]]


def test_one_engine_gets_all_prompts_in_order() -> None:
    assert assign([3, 1, 2], 1) == [[0, 1, 2]]


def test_what_is_sampled_again_stays_where_its_engine_came_back() -> None:
    assert reassign({1: [0, 2], 2: [1]}, serving=[0, 1, 2]) == {1: [0, 2], 2: [1]}


def test_the_share_of_an_engine_that_is_given_up_goes_whole_to_who_has_least_to_do() -> None:
    # Engine 0 has answered and is free; then 2 has fewer prompts than 0.
    assert reassign({1: [0, 2], 2: [1]}, serving=[0, 2]) == {0: [0, 2], 2: [1]}
    assert reassign({1: [0, 2], 3: [3], 2: [1]}, serving=[0, 2]) == {0: [0, 2], 2: [1, 3]}
