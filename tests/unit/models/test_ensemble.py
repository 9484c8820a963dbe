"""An ensemble of reward models: its scores, its folder, and the code that scores with it.

- mean, worst case and mean - penalty * variance, by hand and by numpy, whatever the size of the batch
- a score that is not a number stays so, and a single model's scores are returned as they are
- the folder of the ensemble names its members; a file that cannot be used is refused by field
- evaluation and service return the combined score of all members, each normalised by its own statistics
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import EnsembleConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.evaluation.scoring import ResponseScorer
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import (
    combined,
    deviations,
    load_ensemble,
    member_folder,
    member_folders,
    save_ensemble,
    sequence_scores,
    single_process_batches,
)
from rlhf_core.rewards.scorer import Scorer
from rlhf_core.types import RewardInput
from tests.support.tiny_llama import save_tiny_llama

SCORES = [[1.0, -2.0], [3.0, 0.0], [2.0, 5.0]]
"""Of three members. First sequence: mean 2, variance 2/3. Second: mean 1, variance (9 + 1 + 16) / 3."""


def ensemble(combine: str, penalty: float = 0.5, members: int = 3) -> EnsembleConfig:
    return EnsembleConfig.model_validate({"members": members, "combine": combine, "penalty": penalty})


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (ensemble("mean"), [2.0, 1.0]),
        (ensemble("worst_case"), [1.0, -2.0]),
        (ensemble("uncertainty"), [2.0 - 0.5 * 2 / 3, 1.0 - 0.5 * 26 / 3]),
        (ensemble("uncertainty", penalty=0.0), [2.0, 1.0]),
        (None, [1.0, -2.0]),
    ],
)
def test_combined_score_is_that_by_hand(settings: EnsembleConfig | None, wanted: list[float]) -> None:
    assert combined(settings, SCORES) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("members", range(2, 9))
def test_combined_score_is_that_of_numpy_for_every_size_of_the_batch(members: int) -> None:
    scores_MS = np.random.default_rng(members).normal(size=(members, 50)) * 3
    wanted = {
        "mean": scores_MS.mean(0),
        "worst_case": scores_MS.min(0),
        "uncertainty": scores_MS.mean(0) - 0.7 * scores_MS.var(0),
    }
    for combine, values_S in wanted.items():
        settings = ensemble(combine, 0.7, members)
        found = combined(settings, scores_MS.tolist())
        np.testing.assert_allclose(found, values_S, rtol=1e-12, atol=1e-12)
        one_by_one = [combined(settings, [[row[s]] for row in scores_MS])[0] for s in range(50)]
        assert one_by_one == found, "the same bits for one response as for fifty"
    np.testing.assert_allclose(deviations(scores_MS.tolist()), scores_MS.std(0), rtol=1e-12)


@pytest.mark.parametrize("combine", ["mean", "worst_case", "uncertainty"])
def test_score_that_is_not_a_number_stays_so(combine: str) -> None:
    by_member = [[math.nan, 1.0], [0.0, 1.0]]
    found = combined(ensemble(combine, members=2), by_member)
    assert math.isnan(found[0]) and found[1] == 1.0
    assert math.isnan(deviations(by_member)[0]) and deviations(by_member)[1] == 0.0


def test_folder_names_its_members(tmp_path: Path) -> None:
    assert load_ensemble(tmp_path) is None and member_folders(tmp_path) == [tmp_path]
    save_ensemble(tmp_path, ensemble("uncertainty", 0.25))
    assert load_ensemble(tmp_path) == ensemble("uncertainty", 0.25)
    assert member_folders(tmp_path) == [tmp_path, tmp_path / "member-1", tmp_path / "member-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": 900}, r"members"),
        ({"combine": "product"}, r"combine"),
        ({"path": "/etc"}, r"path"),
        (None, r"content"),
    ],
)
def test_file_that_cannot_be_used_is_refused(
    change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    content = {"members": 3, "combine": "mean", "penalty": 0.5}
    text = "{" if change is None else json.dumps(content | change)
    (tmp_path / "ensemble.json").write_text(text)
    with pytest.raises(ModelError, match=rf"ensemble\.json: {message}: .*; use the folder as the stage"):
        load_ensemble(tmp_path)


def test_penalty_without_use_is_refused() -> None:
    used: dict[str, Any] = {"combine": "uncertainty", "penalty": 0.7}
    assert config_from_tree({"reward": {"ensemble": used}}, "test").reward.ensemble == ensemble(**used)
    assert ensemble("mean", penalty=0.5) == EnsembleConfig(combine="mean"), "the default may be written"
    for combine in ("mean", "worst_case"):
        message = rf"reward\.ensemble\.penalty has no effect .*combine={combine}; got 0\.7; leave it out, or"
        with pytest.raises(ConfigError, match=message):
            config_from_tree({"reward": {"ensemble": {"combine": combine, "penalty": 0.7}}}, "test")


def test_evaluation_and_service_return_the_combined_score(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["Tell me about the small cat.", "It is kind and warm."] * 4, 300)
    causal = save_tiny_llama(tmp_path / "causal", vocab_size=304, pad_token_id=tokenizer.pad_token_id)
    folder = tmp_path / "model"
    pairs = [(tuple(range(3, 5 + i)), tuple(range(40, 42 + i))) for i in range(5)]
    by_member = []
    for number in range(3):
        torch.manual_seed(number)
        model = load_score_model(causal, dtype="float32", attention="sdpa", device="cpu").eval()
        model.statistics = ScoreStatistics(mean=0.1 * number, std=0.5 + number)
        model.save(member_folder(folder, number))
        batches = single_process_batches(model, pairs, 1000, int(tokenizer.pad_token_id))
        by_member.append(sequence_scores(model, model.statistics, batches))
    tokenizer.save_pretrained(folder)
    save_ensemble(folder, ensemble("worst_case"))
    wanted = np.array(by_member).min(0)
    assert len(set(np.array(by_member).argmin(0))) > 1, "no member is the lowest on all responses"

    config = config_from_tree({"run": {"device": "cpu"}}, "test")
    samples = [RewardInput("p", "", "", *pair, True, {}) for pair in pairs]
    found = ResponseScorer(config, int(tokenizer.pad_token_id), "cpu").reward_model("reward", folder, samples)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert Scorer(folder).scores(pairs) == pytest.approx(wanted, abs=1e-6)
    assert config.reward.members == 1
