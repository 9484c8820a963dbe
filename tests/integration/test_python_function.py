"""Locks the user's reward function in its own process.

- lists, tuples and arrays of numbers are accepted; prints do not disturb; state lives on between batches;
- a function that hangs, dies, raises or returns anything else is tried again, then the samples at fault are
  found;
- a sample that hangs is searched for only where the others are to be saved (`mask`);
- a file or function that cannot be loaded is the user's configuration error, found before the first batch;
- every process of it runs the source that was read first; a source that a run is not known by is refused
- closing ends the process, and what it started.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards import PythonReward
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.types import RewardInput

CODE = """
import json, os, subprocess, sys, time
import numpy as np

calls = 0

def lengths(samples):
    print("a line on standard output")
    return [len(s.response) + s.meta.get("bonus", 0) for s in samples]

def array(samples):
    return np.arange(len(samples), dtype=np.float32)

def counting(samples):
    global calls
    calls += 1
    return tuple([calls, os.getpid()])

def by_text(samples):
    text = next((s.response for s in samples if s.response != "good"), "good")
    if text == "raise":
        raise KeyError("no such story")
    if text == "hang":
        child = subprocess.Popen(["sleep", "60"])
        open(next(s for s in samples if s.response == text).meta["pid"], "w").write(str(child.pid))
        while True:
            pass
    if text == "die":
        os._exit(7)
    return {"good": [1.0] * len(samples), "text": ["a"] * len(samples), "short": [], "none": None,
        "number": 3.0, "nested": [[1.0]],
            "nan": [0.0, float("nan")], "string": "0.5"}[text]

def in_library(samples):
    return json.loads(samples[0].response)

def wrong_field(samples):
    return [len(sample.respons) for sample in samples]

def flaky(samples):
    marker = samples[0].meta["marker"]
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    return [1.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def by_text(file: Path) -> Iterator[PythonFunction]:
    with closing(PythonFunction(source(file, "by_text", timeout=0.5, retries=0))) as function:
        yield function


def source(file: Path, name: str, **fields: Any) -> PythonReward:
    return PythonReward(type="python", function=f"x:{name}", file=str(file), **fields)


def sample(response: str, prompt_id: str = "p0", **meta: object) -> RewardInput:
    return RewardInput(prompt_id, "prompt", response, (1, 2), (3,), True, meta)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_it_returns_one_float_per_response_and_may_print(file: Path) -> None:
    with closing(PythonFunction(source(file, "lengths"))) as function:
        assert function([sample("four"), sample("to", bonus=10)]).values == [4.0, 12.0]
        assert function([]).values == []


def test_arrays_count_and_state_lives_on_between_batches(file: Path) -> None:
    with closing(PythonFunction(source(file, "array"))) as function:
        assert function([sample("a"), sample("b")]).values == [0.0, 1.0]
    with closing(PythonFunction(source(file, "counting"))) as function:
        first, second = (function([sample("a"), sample("b")]).values for _ in range(2))
    assert (first[0], second[0]) == (1.0, 2.0)
    assert first[1] == second[1] != os.getpid()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", r"it raised KeyError: 'no such story' \(my_reward.py:\d+\)"),
        ("die", "its process ended with exit status 7"),
        ("text", "returned str 'a' for response 0"),
        ("short", "returned 0 values for 1 responses"),
        ("none", "returned NoneType None"),
        ("number", "returned float 3.0"),
        ("nested", r"returned list \[1.0\] for response 0"),
        ("string", "returned str '0.5'"),
    ],
)
def test_a_failure_shows_the_returned_value(by_text: PythonFunction, text: str, message: str) -> None:
    assert re.search(message, by_text([sample(text)]).reasons[0])


def test_an_error_in_the_code_is_shown_once_and_not_retried(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = [sample(str(number)) for number in range(32)]
    said = r"fails for each response: it raised AttributeError: .*respons.* \(my_reward.py:\d+\); correct it"
    with closing(PythonFunction(source(file, "wrong_field"))) as function:
        for _ in range(2):
            with pytest.raises(InputError, match=said):
                function(batch)
    assert capfd.readouterr().err.count("Traceback") == 1
    with closing(PythonFunction(source(file, "wrong_field", on_error="mask"))) as function:
        assert len(function(batch).reasons) == 32


def test_an_error_of_a_library_is_named_by_the_line_of_the_users_file(file: Path) -> None:
    line = CODE.splitlines().index("    return json.loads(samples[0].response)") + 1
    with closing(PythonFunction(source(file, "in_library", retries=0))) as function:
        assert function([sample("{")]).reasons[0].endswith(f"(my_reward.py:{line})")
    by_module = PythonReward(type="python", function="my_reward:in_library", retries=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        with closing(PythonFunction(by_module)) as function:
            assert function([sample("{")]).reasons[0].endswith(f"(my_reward.py:{line})")


def test_an_error_in_the_code_of_a_function_of_groups_ends_the_run_too(file: Path) -> None:
    batch = [sample(str(number), f"p{number // 2}") for number in range(6)]
    with closing(PythonFunction(source(file, "wrong_field", needs_group=True))) as function:
        with pytest.raises(InputError, match=r"fails for each response: it raised AttributeError"):
            function(batch)
        assert len(function(batch[:4]).reasons) == 4, "two groups are too few to know"
    batch[2] = sample("good", "p1", bonus=None)
    with closing(PythonFunction(source(file, "lengths", needs_group=True))) as function:
        assert list(function(batch).reasons) == [2, 3], "the error is in the data of one group"


def test_a_value_that_is_not_finite_is_none(by_text: PythonFunction) -> None:
    outcome = by_text([sample("nan", "p6"), sample("nan", "p7")])
    assert outcome.values[0] == 0.0
    assert outcome.reasons == {1: "it returned nan, but rewards must be finite"}


@pytest.mark.parametrize("text", ["raise", "die", "none"])
def test_bad_sample_is_found_and_others_keep_values(by_text: PythonFunction, text: str) -> None:
    outcome = by_text([sample("good"), sample("good"), sample(text), sample("good")])
    assert list(outcome.reasons) == [2]
    assert [outcome.values[i] for i in (0, 1, 3)] == [1.0, 1.0, 1.0]


def test_hanging_sample_is_searched_for_only_with_mask(file: Path, tmp_path: Path) -> None:
    batch = [sample("hang", pid=str(tmp_path / "pid")), sample("good")]
    for on_error, failed in (("mask", [0]), ("abort", [0, 1])):
        hanging = source(file, "by_text", timeout=0.7, retries=0, on_error=on_error)
        with closing(PythonFunction(hanging)) as function:
            assert list(function(batch).reasons) == failed


def test_hanging_function_is_killed_with_its_children(by_text: PythonFunction, tmp_path: Path) -> None:
    outcome = by_text([sample("hang", pid=str(tmp_path / "pid"))])
    assert outcome.reasons == {0: "it gave no answer within 0.5 s"}
    assert wait_until_gone(int((tmp_path / "pid").read_text()))
    assert by_text([sample("good")]).values == [1.0]


def test_a_process_that_dies_once_is_started_again(file: Path, tmp_path: Path) -> None:
    with closing(PythonFunction(source(file, "flaky"))) as function:
        assert function([sample("a", marker=str(tmp_path / "marker"))]).values == [1.0]


def test_closing_ends_the_process(file: Path) -> None:
    function = PythonFunction(source(file, "counting"))
    pid = int(function([sample("a"), sample("b")]).values[1])
    function.close()
    function.close()
    assert wait_until_gone(pid)


@pytest.mark.parametrize("by_file", [True, False])
def test_an_edit_during_the_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "import os\n\ndef f(samples):\n    if samples[0].response == 'die': os._exit(1)\n    return [1.0] *"
        " len(samples)\n"
    )
    module = tmp_path / "edited_reward.py"
    module.write_text(code)
    one = PythonReward(
        type="python", function="edited_reward:f", file=str(module) if by_file else None, retries=0
    )
    with closing(PythonFunction(one, hashlib.sha256(code.encode()).hexdigest())) as function:
        module.write_text(code.replace("1.0", "2.0"))
        assert function([sample("die")]).reasons
        assert function([sample("a")]).values == [1.0]
    with pytest.raises(InputError, match=r"edited_reward\.py has changed since this run began"):
        PythonFunction(one, hashlib.sha256(code.encode()).hexdigest())


def test_what_cannot_be_loaded_is_a_configuration_error(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo\.rewards\.python\.file must be an existing"):
        PythonFunction(source(tmp_path / "missing.py", "lengths"))
    with pytest.raises(ConfigError, match="has no function nothing"):
        PythonFunction(source(file, "nothing"))
    with pytest.raises(ConfigError, match=r"got no_such_package\.rewards:score: ModuleNotFoundError"):
        PythonFunction(PythonReward(type="python", function="no_such_package.rewards:score"))
    (tmp_path / "broken.py").write_text("1 +")
    with pytest.raises(ConfigError, match="SyntaxError"):
        PythonFunction(source(tmp_path / "broken.py", "f"))
