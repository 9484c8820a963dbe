"""The benchmarks that simulate devices or histories, at their smallest size.

- they end with tables that have a row for each case
- the controller's time is measured for each number of ranks, in a process of its own
- the pages of a record are measured while its texts are decoded and after that
- the cost of data is measured for each part
- a bad reward counts as flagged, and a sound one passes
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.ops.prune import DAY
from rlhf_core.ops.retention import KINDS
from tests.benchmarks import (
    architectures,
    bad_rewards,
    data_scale,
    driver_scale,
    driver_tokens,
    growth,
    inspect_record,
    promotion,
    rehearsal_faults,
    year,
)


def cells(text: str) -> list[list[str]]:
    """Return the rows of printed tables, without their titles and lines."""
    rows = [line for line in text.splitlines() if line.lstrip().startswith(("│", "|"))]
    return [[cell.strip() for cell in row.replace("│", "|").strip().strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("rules", [False, True])
def test_the_controller_is_measured_for_each_number_of_ranks(
    rules: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def in_this_process(command: Sequence[str], **_options: Any) -> SimpleNamespace:
        arguments = list(command[command.index("tests.benchmarks.driver_scale") + 1 :])
        started.append(arguments)
        with redirect_stdout(io.StringIO()) as output:
            driver_scale.main(arguments)
        return SimpleNamespace(stdout=output.getvalue())

    waiting: list[tuple[int, int]] = []

    def waiting_cost(ranks: int, processes: int) -> float:
        waiting.append((ranks, processes))
        return 0.01

    monkeypatch.setattr(driver_scale, "CASES", ((1, 32, 16), (2, 64, 16)))
    monkeypatch.setattr(driver_scale, "ray_costs", lambda: (250e-6, 1e-6))
    monkeypatch.setattr(driver_scale, "waiting_cost", waiting_cost)
    monkeypatch.setattr(driver_scale, "subprocess", SimpleNamespace(run=in_this_process))
    options = ["--rules"] if rules else []
    driver_scale.main(options)
    shown = capsys.readouterr().out
    assert started == [["--case", *case, *options] for case in (["1", "32", "16"], ["2", "64", "16"])]
    assert [ranks for ranks, _ in waiting] == [1, 2]
    rows = cells(shown)
    assert [row[:2] for row in rows] == [["1", "32"], ["2", "64"]]
    # The wait of 600 s at 0.01 CPU seconds a second.
    assert [row[7] for row in rows] == ["6.00"] * 2
    assert "Ray: 250 us a call, 1.0 us a reference" in shown


@pytest.mark.parametrize(
    "parts",
    [
        {"drift": 1, "steps": 2, "encode": 3, "digest": 2},
        # `memory`, `open` and `bucket` start processes.
        pytest.param({"memory": 4, "open": 4, "digest": 2, "bucket": 4}, marks=pytest.mark.slow),
    ],
)
def test_the_cost_of_data_is_measured_for_each_part(
    parts: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tables of 80 columns would fold their cells.
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FEW_ROWS", "STEPS", "MEGABYTES"):
        monkeypatch.setattr(data_scale, name, 10)
    data_scale.main([*parts, "--rows", "200"])
    rows = cells(capsys.readouterr().out)
    assert [row[0] for row in rows] == [part for part, lines in parts.items() for _ in range(lines)]
    assert all(float(row[2].split()[0]) > 0 for row in rows)
    read = [float(row[1].partition(": ")[2].split()[0]) for row in rows if "bytes are read" in row[1]]
    assert [round(times) for times in read[:4]] == [1, 0, 2, 1][: len(read)], "digest, again, publish, fetch"


@pytest.mark.slow
def test_parts_of_data_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(data_scale, "KILLS", 1)
    data_scale.main(["parts", "--short", "--rows", "200"])
    rows = cells(capsys.readouterr().out)
    assert len(rows) == 6
    new, every = rows[-1][2].split(" of ")
    assert 0 < int(new) <= int(every)


def test_a_year_has_less_of_each_kind_that_is_pruned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(year, "SHOWN", 1)
    monkeypatch.setattr(year, "PAGE", 300_000)
    monkeypatch.setattr(year, "POLICIES", {
        "never": None, "all": (7 * DAY, dict.fromkeys(KINDS, 7 * DAY)),
    })  # fmt: skip
    year.main(["--weeks", "4", "--every", "4", "--points", "60"])
    rows = [(row[0], float(row[1])) for row in cells(capsys.readouterr().out)]
    half = len(rows) // 2
    never, pruned = dict(rows[:half]), dict(rows[half:])
    assert len(never) == half == 9
    for kind in never.keys() - {"claims", "MLflow's database", "all"}:
        assert 0 < pruned[kind] < never[kind], kind
    assert pruned["all"] < never["all"]


def test_growth_ends_with_its_two_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller: dict[str, Any] = {
        "SIZES": (1, 2), "STALENESS": (1, 2), "STEPS": 1, "MORE_STEPS": 2, "RESPONSES": 32,
        "SCENARIOS": growth.SCENARIOS[:2], "VARYING": growth.VARYING[:1],
    }  # fmt: skip
    for name, value in smaller.items():
        monkeypatch.setattr(growth, name, value)
    growth.main([])
    shown = capsys.readouterr().out
    rows = cells(shown)
    assert [row[:2] for row in rows] == [
        ["equal lengths", "1"], ["", "2"], ["lognormal lengths", "1"], ["", "2"],
        ["lognormal lengths", "1"], ["", "2"],
    ]  # fmt: skip
    assert all(0 < float(row[3]) <= 1 and 0 < float(row[5]) <= 1 for row in rows[:4])
    assert all(row[2].endswith("(1.00)") for row in rows[4:])


def test_the_pages_of_a_record_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_record.main(["--responses", "40", "--per-step", "4"])
    shown = capsys.readouterr().out
    assert "40 responses" in shown and "peak memory of the server" in shown
    rows = [row for row in cells(shown) if row[0] in inspect_record.PAGES]
    assert [row[0] for row in rows] == list(inspect_record.PAGES)
    assert all(float(cell.removesuffix(" s")) >= 0 for row in rows for cell in row[1:])


def test_promotion_ends_with_its_eight_tables(capsys: pytest.CaptureFixture[str]) -> None:
    promotion.main(["--histories", "2"])
    shown = capsys.readouterr().out
    tables = shown.split("\n\n")
    assert [len(cells(table)) - 2 for table in tables] == [5, 9, 4, 8, 12, 8, 8, 10]
    assert "share of 2 histories" in tables[0]
    shares = [float(cell) for table in tables for row in cells(table)[2:] for cell in row[-2:]]
    assert all(0 <= share <= 1 for share in shares)


def test_the_page_of_architectures_has_a_row_for_each_and_names_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    architectures.main(["llama", "gpt2", "no_such_model"])
    page = capsys.readouterr().out
    assert page.startswith("# Architectures\n")
    assert "This page lists 2 causal language models" in page
    assert "python -m tests.benchmarks.architectures llama gpt2 no_such_model" in page
    llama, gpt2 = cells(page)[2:]
    assert llama == ["`llama`", "LlamaForCausalLM", *["packed"] * 4, "vLLM", "yes", "all"]
    assert all(cell.startswith("refused [") for cell in gpt2[2:6]) and gpt2[-1] == "nothing"
    assert "\n1. " in page
    assert (
        "Not tested, because a small model could not be created with generic sizes: `no_such_model`" in page
    )


def test_a_case_of_the_controller_is_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver_scale, "waiting_cost", lambda _ranks, _processes: 0.5)
    driver_scale.main(["--case", "2", "32", "16"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["responses"], found["tokens"], found["waiting"]) == (2, 32, 16, 0.5)
    assert found["calls"] > 0 and found["references"] > 0 and found["pickled_mb"] > 0


@pytest.mark.parametrize("part", driver_tokens.PARTS)
def test_a_part_of_the_driver_is_measured(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    driver_tokens.main(["--case", part, "16", "64"])
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"] >= 0 and found["peak"] >= 0 and found["peak_of_child"] >= 0


def test_the_parts_of_the_driver_are_those_of_a_whole_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str], **_options: Any) -> SimpleNamespace:
        part, number, length = command[command.index("--case") + 1 :]
        found: dict[str, Any] = {"cpu": 0.5, "peak": 1e6, "peak_of_child": 2e6}
        if part == "ray":
            # 56 more chunks for 56 us each; 256 x 24,576 tokens more for 1 ns each.
            daemons = (int(number) - 1) * 8 * 56e-6 + (int(length) - 8192) * 256e-9
            found = {"put": {"driver": 0.01, "actors": 0.02, "daemons": daemons}}
        return SimpleNamespace(stdout=json.dumps(found))

    monkeypatch.setattr(driver_tokens, "subprocess", SimpleNamespace(run=run))
    driver_tokens.main(["--responses", "16384", "--tokens", "2097152"])
    rows = {(row[0], row[1]): row[2:] for row in cells(capsys.readouterr().out)}
    assert rows["text rewards", "32768"][:3] == ["1/256", "128.00", "0.238"]
    assert rows["function", "8192"] == ["1/64", "32.00", "0.238", "0.06", "0.1"]
    assert rows["samples", "8192"][:3] == ["1/1", "0.50", ""]
    assert rows["put", "8192"] == ["0.64", "1.28", "0.00", "1.92", "1.00", "56"]
    assert rows["put", "32768"][:4] == ["0.64", "1.28", "0.40", "2.32"]


def test_a_planted_fault_is_named_and_a_sound_configuration_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the program, which would leave it set
    assert rehearsal_faults.main(["--only", "needs a field", "adapters of a hub model"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^named .* a reward that needs a field that no row has: ppo.rewards.0", shown, re.MULTILINE
    )
    assert re.search(r"^passed .* adapters of a hub model", shown, re.MULTILINE)


def test_a_bad_reward_is_flagged_and_a_sound_one_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bad_rewards, "ROWS", 24)
    assert bad_rewards.main(["--only", "exact_text,same_words", "--cards"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^bad +exact_text .* flagged +.*whitespace", shown, re.MULTILINE)
    assert re.search(r"^sound same_words .* passes", shown, re.MULTILINE)
    assert "1 of 1 bad rewards flagged; 0 sound ones flagged" in shown
    assert "a line feed after it changes the value" in shown
