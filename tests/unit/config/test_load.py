"""Loading a configuration.

Rules: the values of unquoted words (numbers, booleans, null, text), files with a BOM or CRLF, aliases,
overrides of fields, lists and items, the defaults of a section given in part, and that a configuration can be
dumped and loaded without a change.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.config.rewards import KeywordsReward, LengthReward, ModelReward
from rlhf_core.config.yaml import dump, parse, scalar
from rlhf_core.errors import ConfigError
from tests.support.demo_data import config_with_demo_data
from tests.support.parsed_config import parse_config
from tests.support.sampled import examples


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("3", 3), ("-3", -3), ("+3", 3), ("0", 0), ("1e-5", 1e-5), ("1E5", 1e5), ("2.5", 2.5), (".5", 0.5),
        ("5.", 5.0),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), (".inf", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"), ("on", "on"), ("y", "y"), ("012", "012"), ("0x1f", "0x1f"), ("0o17", "0o17"),
        ("22:30", "22:30"),
        ("1_000", "1_000"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), (".", "."), ("-", "-"),
        ("nan", "nan"),
    ],
)  # fmt: skip
def test_value_of_an_unquoted_word(word: str, value: object) -> None:
    found = scalar(word)
    assert found == value
    assert type(found) is type(value)


def test_quoted_word_is_text() -> None:
    assert parse(b"a: '1'\nb: \"true\"\nc: ''\n", "x").tree == {"a": "1", "b": "true", "c": ""}


def test_numbers_for_int_and_float_fields() -> None:
    config = parse_config(b"sft: {optimizer: {learning_rate: 1e-5, weight_decay: 1}}\nppo: {steps: 7}\n")
    assert config.sft.optimizer.learning_rate == 1e-5
    assert config.sft.optimizer.weight_decay == 1.0
    assert config.ppo.steps == 7


def test_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tree = {
        "run": {"home": "~/runs"},
        "store": {"url": "~/store"},
        "model": {"path": "~/m"},
        "data": {"sft": [{"path": "~/d.jsonl"}], "chat_template": "~/t.jinja"},
        "ppo": {"rewards": [{"type": "python", "function": "r:score", "file": "~/r.py"}]},
    }
    text = config_with_demo_data(tree, "test").model_dump_json()
    assert "~" not in text
    assert all(
        f'"{tmp_path}/{name}"' in text for name in ("runs", "store", "m", "d.jsonl", "t.jinja", "r.py")
    )
    urls = {"s3://b/~x": "s3://b/~x", "file://~/s": f"file://{tmp_path}/s"}
    assert [config_from_tree({"store": {"url": url}}, "test").store_url for url in urls] == list(
        urls.values()
    )


@pytest.mark.parametrize("path", ["~nobody_here/x", "file://~nobody_here/x"])
def test_the_home_folder_of_an_unknown_user_is_refused(path: str) -> None:
    fix = r"~nobody_here is no user of this machine; correct the name, or write \./~nobody_here/x"
    for tree in ({"run": {"home": path}}, {"store": {"url": path}}):
        [(section, fields)] = tree.items()
        with pytest.raises(ConfigError, match=rf"test: {section}\.{next(iter(fields))}: {fix}"):
            config_from_tree(tree, "test")


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbfrun: {seed: 5}\n", b"run:\r\n  seed: 5\r\n", b"\n\n# x\nrun: {seed: 5}"]
)
def test_bom_and_windows_line_ends_are_accepted(data: bytes) -> None:
    assert parse_config(data).run.seed == 5


def test_override_does_not_change_aliases() -> None:
    text = b"sft: {deepspeed: &d {ranks: 2}}\nreward: {deepspeed: *d}\n"
    config = parse_config(text, overrides=["reward.deepspeed.ranks=4"])
    assert (config.sft.deepspeed.ranks, config.reward.deepspeed.ranks) == (2, 4)


def test_override_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override .*: is not UTF-8 text"):
        config_from_tree({}, overrides=["run.home=\udc80"])


def test_section_given_in_part_keeps_its_defaults() -> None:
    config = parse_config(b"ppo: {policy: {weight_decay: 0.1}}\n")
    assert config.ppo.policy.weight_decay == 0.1
    assert config.ppo.policy.learning_rate == PipelineConfig().ppo.policy.learning_rate == 1e-6
    assert config.ppo.policy.schedule == "constant"


def test_lines_of_keys_and_items() -> None:
    document = parse(b"a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "f")
    assert document.lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
    }
    assert document.place(("a", "c", 1, "missing")) == "f:5"
    assert document.place(("z",)) == "f"


def test_overrides_set_fields_lists_maps_and_items(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {seed: 1}\nppo:\n  rewards:\n    - {type: length, target: 20, tolerance: 10}\nreward: {enabled:"
        " false}\n"
    )
    config = load_config(
        file,
        [
            "run.seed=2",
            "ppo.kl.coef=1e-3",
            "ppo.kl.target=null",
            "sft.optimizer.betas=[0.5, 0.6]",
            "ppo.rewards.0.weight=2",
            "ppo.rewards.1={type: keywords, words: [sun, moon]}",
            "data.prompts.0.path=synthetic",
            "data.sft.0.path=a=b.jsonl",
            "data.sft.0.rename={question: prompt}",
            "store.url=s3://bucket/prefix",
            "register.model=m",
        ],
    )
    assert config.run.seed == 2
    assert config.ppo.kl.coef == 1e-3
    assert config.sft.optimizer.betas == (0.5, 0.6)
    assert config.ppo.rewards == (
        LengthReward(target=20, tolerance=10, weight=2.0),
        KeywordsReward(words=("sun", "moon")),
    )
    assert config.data.sft[0].path == "a=b.jsonl"
    assert config.data.sft[0].rename == {"question": "prompt"}
    assert config.store.url == "s3://bucket/prefix"
    assert config.registered_model == "m"


def test_items_of_a_default_list_can_be_overridden_and_added() -> None:
    added = [
        "ppo.rewards.0.weight=0.5",
        "ppo.rewards.1.type=length",
        "ppo.rewards.1.target=9",
        "ppo.rewards.1.tolerance=3",
    ]
    config = config_from_tree({}, overrides=added)
    assert config.ppo.rewards == (ModelReward(weight=0.5), LengthReward(target=9, tolerance=3))


def test_the_last_of_two_overrides_wins() -> None:
    assert config_from_tree({}, overrides=["run.seed=1", "run.seed=2"]).run.seed == 2


def test_overrides_do_not_change_the_given_tree() -> None:
    tree: dict[str, Any] = {"ppo": {"kl": {"coef": 0.1}}}
    config_from_tree(tree, overrides=["ppo.kl.coef=0.2"])
    assert tree == {"ppo": {"kl": {"coef": 0.1}}}


# Not the control characters and line separators that YAML itself gives a meaning or refuses.
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Zl", "Zp"]), min_size=1, max_size=9)
REWARDS = st.lists(
    st.one_of(
        st.just({"type": "model"}),
        st.builds(
            lambda n, weight: {"type": "length", "target": n, "tolerance": 5, "weight": weight},
            st.integers(1, 99),
            st.floats(-9, 9),
        ),
        st.builds(
            lambda words: {"type": "keywords", "words": words},
            st.lists(WORDS, min_size=1, max_size=3),
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda reward: str(reward["type"]),
)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    parts = draw(st.integers(1, 8))
    return {
        "run": {
            "name": draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)),
            "seed": draw(st.integers(0, 10**9)),
        },
        "sft": {
            "optimizer": {
                "learning_rate": draw(st.floats(1e-12, 1e2)),
                "betas": [draw(st.floats(0, 1, exclude_max=True)), draw(st.floats(0, 1, exclude_max=True))],
            },
            "pack": draw(st.booleans()),
        },
        "ppo": {
            "minibatches": parts,
            "prompts_per_step": parts * draw(st.integers(1, 9)),
            "kl": {"target": draw(st.none() | st.floats(0.1, 100))},
            "rewards": draw(REWARDS),
        },
        "tracking": {
            "experiment": draw(
                st.none() | st.sampled_from(["no", "012", "1e5", "22:30", " ", "null", "a: b", "#x", "é"])
            )
        },
    }


@examples(60, 3)
@given(tree=trees())
def test_dumping_and_loading_gives_the_same_configuration(tree: dict[str, Any]) -> None:
    config = config_from_tree(tree)
    plain = config.model_dump(mode="json", by_alias=True)
    # The library's YAML writer follows YAML 1.1, so its quoting differs from ours: JSON is YAML whatever the
    # version.
    assert parse_config(json.dumps(plain, ensure_ascii=False).encode()) == config
    assert config_from_tree(plain) == config


def test_output_of_yaml_safe_dump_is_read_unchanged() -> None:
    tree = PipelineConfig().model_dump(mode="json", by_alias=True)
    assert parse_config(yaml.safe_dump(tree).encode()) == PipelineConfig()


@examples(100, 2)
@given(st.text(alphabet="0123456789eE+-._:xob~# nulyestrfaIN", max_size=8))
@example("1e3")
@example("12e45678")
@example("+.5")
def test_written_text_stays_text(text: str) -> None:
    assert parse(dump({"a": text, "b": [text]}).encode(), "c.yaml").tree == {"a": text, "b": [text]}


def test_written_numbers_stay_numbers() -> None:
    tree: dict[str, Any] = {"a": [0, -3, 1e-05, 1e300, 0.1, True, None, {}], "b": {"1e3": "1e3", "é": "é"}}
    assert parse(dump(tree).encode(), "c.yaml").tree == tree


def test_rlhf_home_is_the_home_unless_an_override_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("run: {home: /of/the/file}\n")
    monkeypatch.setenv("RLHF_HOME", "/1e3: {")
    assert load_config(file).run.home == "/1e3: {"
    assert load_config(file, ["run.home=/given"]).run.home == "/given"
    monkeypatch.delenv("RLHF_HOME")
    assert load_config(file).run.home == "/of/the/file"
