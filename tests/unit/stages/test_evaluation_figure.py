"""The figure of the evaluations during PPO and the time of the inputs, in the report of the stage `evaluate`.

- its caption says in words where a measure falls while the training score rises
- the order of lines is that of the versions, and metrics that are missing are left out
- the best version is marked in both panels, and the largest KL of a best version is a line
- without evaluations there is no figure
- the time is the sum over the inputs that have one, which manifests store as text
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.evaluation.plots import to_png
from rlhf_core.ppo.watching.selection import HeldOutResult, Selection
from rlhf_core.stages.evaluate import _minutes, evaluation_figures
from rlhf_core.testing import stage_context
from rlhf_core.types import ArtifactRef


def test_the_caption_names_where_the_judge_falls(tmp_path: Path) -> None:
    config = config_from_tree({"ppo": {"publish": "best", "publish_max_kl": 9}}, "test")
    chosen = Selection(config.ppo)
    for version, score, judge, kl in ((0, 0.0, 0.1, 0.0), (10, 1.0, 0.6, 4.0), (20, 1.5, 0.2, 30.0)):
        found = {"eval/score": score, "eval/judge": judge, "eval/kl": kl, "eval/objective": judge}
        chosen.add(version, HeldOutResult(found, [judge, judge]))
    chosen.write(tmp_path / "evaluations.jsonl")
    assert [json.loads(line)["best"] for line in (tmp_path / "evaluations.jsonl").open()] == [
        False, True, False,
    ]  # fmt: skip
    ((name, _, caption, figure),) = evaluation_figures(
        config, stage_context(tmp_path, inputs={"ppo": tmp_path})
    )
    assert name == "evaluations"
    assert (
        "From step 10 to step 20, the judge's score falls by 0.40 while the training score rises" in caption
    )
    assert "true reward" not in caption
    left, right = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in right.get_lines()}
    assert lines.pop("largest KL") == [0, 1]
    assert list(right.get_lines()[-1].get_xdata()) == [3.0, 3.0] and "KL of a best version, 9 nats" in caption
    diamonds = [line for line in right.get_lines() if line.get_marker() == "D"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in diamonds] == [(2.0, 1.0), (2.0, 0.6)]
    lines = {label: values for label, values in lines.items() if len(values) > 1}
    assert lines == {"score (maximised)": [0.0, 1.0, 1.5], "score of the judge": [0.1, 0.6, 0.2]}
    assert list(right.get_lines()[0].get_xdata()) == [0.0, 2.0, 30.0**0.5]
    assert [list(line.get_xdata()) for line in left.get_lines()][-1] == [10, 10]
    assert to_png(figure).startswith(b"\x89PNG")


def test_without_evaluations_there_is_no_figure(tmp_path: Path) -> None:
    assert evaluation_figures(PipelineConfig(), stage_context(tmp_path, inputs={"ppo": tmp_path})) == []


def test_the_time_of_the_inputs_is_the_sum_of_texts() -> None:
    timed = ArtifactRef("sft", "a" * 16, "d", "/x", {}, None, {"seconds": "90.0"})
    untimed = ArtifactRef("data", "b" * 16, "d", "/y", {})
    assert _minutes([timed, untimed, timed]) == "3.0 min"
    assert _minutes([untimed]) == ""
