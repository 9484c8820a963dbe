"""`evaluate.language_model`: settings that cannot be meant are refused with field and fix.

- it has a folder, or an address on the allow-list with a model, and not both
- its key is the name of a variable whose value logs hide
- it needs pairs, not only of models, and `evaluate.judge` or `sample.judge` must ask it
- rubric, folder, key and host are checked before the run, and nothing is asked
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import check_consistency
from rlhf_core.evaluation.check import check_language_model

SERVER = {"url": "http://judge.example/v1", "model": "m"}
OF_PEOPLE: dict[str, Any] = {"path": "synthetic"}
OF_MODEL = OF_PEOPLE | {"labelled_by": "reward"}


def config_of(judge: dict[str, Any], **sections: Any) -> PipelineConfig:
    evaluate = {"language_model": judge} | sections.pop("evaluate", {})
    return PipelineConfig.model_validate_json(json.dumps({"evaluate": evaluate} | sections))


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({}, "needs either path or url; got neither"),
        (SERVER | {"path": "judge"}, "needs either path or url; got both"),
        ({"path": "judge", "api_key_env": "MY_KEY"}, "path is run here; got model or api_key_env"),
        ({"url": "http://a/v1"}, r"url needs evaluate\.language_model\.model"),
        (SERVER | {"url": "ftp://judge.example"}, r"must be http\(s\)://host"),
        (SERVER | {"url": "http://judge.example/v1?key=1"}, "no user, password, query or fragment"),
        (SERVER | {"api_key_env": "HOME"}, "api_key_env must have a name whose value logs hide"),
        (SERVER | {"api_key_env": "sk-123"}, "String should match pattern"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judge: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config_of(judge)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"evaluate": {"judge": "gold"}}, "is not asked, because evaluate.judge is gold"),
        ({"data": {"preference": []}, "reward": {"enabled": False}, "ppo": {"rewards": [{"type": "gold"}]}},
            "held-out pairs, but data.preference is empty"),
        ({"data": {"preference": [OF_MODEL]}}, "all sources of data.preference have labelled_by; add"),
        ({"data": {"preference": [OF_MODEL, OF_PEOPLE]}}, None),
        ({"data": {"preference": [OF_MODEL]}, "evaluate": {"judge": "gold"},
            "sample": {"judge": "language_model"}}, "all sources of data.preference have labelled_by"),
        ({"evaluate": {"judge": "language_model", "language_model": None}}, "needs evaluate.language_model"),
        ({"evaluate": {"judge": "language_model"}}, None),
        ({"evaluate": {"judge": "gold"}, "sample": {"judge": "language_model"}}, None),
        ({"evaluate": {"judge": "gold"}, "sample": {}}, "is not asked, because evaluate.judge is gold"),
        ({"evaluate": {"language_model": None}, "sample": {"judge": "language_model"}},
            "sample.judge: language_model needs evaluate.language_model; got none; add it, or use reward"),
        ({}, None),
    ],
)  # fmt: skip
def test_a_judge_needs_pairs_and_a_use(sections: dict[str, Any], words: str | None) -> None:
    found = [str(finding) for finding in check_consistency(config_of(SERVER, **sections))]
    assert any(words in text for text in found) if words else not any("evaluate." in text for text in found)


def test_files_key_and_host_are_checked_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(judge: dict[str, Any]) -> list[str]:
        return [str(finding) for finding in check_language_model(config_of(judge))]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: [(2, 1, 6, "", ("10.1.2.3", 0))])
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    assert findings(SERVER | {"api_key_env": "JUDGE_API_KEY", "rubric": str(tmp_path / "r")}) == [
        f"evaluate.language_model.rubric: cannot be read: {tmp_path}/r does not exist; give a UTF-8 text"
        " file",
        "evaluate.language_model.api_key_env: JUDGE_API_KEY is not set; set it, or leave it out",
    ]
    (tmp_path / "r").write_text("Shorter is better.")
    with_rubric = SERVER | {"rubric": str(tmp_path / "r")}
    assert findings(with_rubric) == []
    assert findings(with_rubric | {"api_key_env": "JUDGE_API_KEY"}) == [
        "evaluate.language_model.api_key_env: JUDGE_API_KEY is not set; set it, or leave it out"
    ]
    [problem] = findings({"path": str(tmp_path)})
    assert problem.startswith("evaluate.language_model.path: must be a folder with config.json")
