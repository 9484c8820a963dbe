"""Every program in `tests/benchmarks`, `tests/chaos` and `tests/gpu` has a test that calls its `main`.

Only `tests.gpu.against_wheels` has none: it needs the CUDA wheels.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
PROGRAMS = sorted(
    file.relative_to(TESTS).with_suffix("").as_posix()
    for folder in ("benchmarks", "chaos", "gpu")
    for file in (TESTS / folder).glob("*.py")
    if '__name__ == "__main__"' in file.read_text()
)
TESTED_BY = {
    "benchmarks/adapter_agreement": "unit/benchmarks/test_programs_of_runs.py",
    "benchmarks/alarm": "unit/benchmarks/test_programs_of_runs.py",
    "benchmarks/architectures": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/bad_rewards": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/bfloat16": "unit/benchmarks/test_bfloat16_program.py",
    "benchmarks/comparison": "unit/benchmarks/test_iteration_programs.py",
    "benchmarks/data_scale": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/driver_scale": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/driver_tokens": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/growth": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/inspect_record": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/law_differences": "integration/test_deepspeed_laws.py",
    "benchmarks/learning_curves": "unit/benchmarks/test_programs_of_runs.py",
    "benchmarks/learning_trl": "unit/benchmarks/test_learning_with_trl.py",
    "benchmarks/learning_with_trl": "unit/benchmarks/test_learning_with_trl.py",
    "benchmarks/overoptimization": "unit/benchmarks/test_programs_of_runs.py",
    "benchmarks/ppo_iteration": "integration/test_iteration_on_ray.py",
    "benchmarks/ppo_iteration_bare": "unit/benchmarks/test_iteration_programs.py",
    "benchmarks/ppo_iteration_trl": "unit/benchmarks/test_iteration_programs.py",
    "benchmarks/promotion": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/record_cost": "unit/benchmarks/test_programs_of_runs.py",
    "benchmarks/rehearsal_faults": "unit/benchmarks/test_scripted_programs.py",
    "benchmarks/rollout": "integration/test_iteration_on_ray.py",
    "benchmarks/run_processes": "unit/benchmarks/test_run_processes.py",
    "benchmarks/throughput": "integration/test_training_programs.py",
    "benchmarks/utilisation": "integration/test_training_programs.py",
    "benchmarks/year": "unit/benchmarks/test_scripted_programs.py",
    "chaos/__main__": "unit/test_chaos_programs.py",
    "chaos/servers": "unit/test_chaos_programs.py",
    "gpu/first_run": "unit/test_first_run.py",
    "gpu/resumable": "unit/test_first_run.py",
}
"""File below `tests` with the test of each program."""
CALLED_AS = {
    "benchmarks/ppo_iteration_trl": "trl_program.main(",
    "chaos/__main__": "chaos.main(",
    "gpu/first_run": "from tests.gpu.first_run import main; sys.exit(main(",
}
"""Calls that do not begin with the name of the module."""
NEEDS_CUDA_WHEELS = "gpu/against_wheels"


def test_every_program_is_in_the_list() -> None:
    assert sorted([*TESTED_BY, NEEDS_CUDA_WHEELS]) == PROGRAMS


@pytest.mark.parametrize("program", TESTED_BY)
def test_the_file_calls_the_program(program: str) -> None:
    call = CALLED_AS.get(program, f"{program.split('/')[1]}.main(")
    assert re.search(rf"\b{re.escape(call)}", (TESTS / TESTED_BY[program]).read_text())
