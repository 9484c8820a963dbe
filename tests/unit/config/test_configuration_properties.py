"""Properties of all configurations.

Rules:
- any YAML file, bytes, tree of data or override gives a PipelineConfig or a ConfigError that names the file
  or the override and has no word of the validation library;
- a valid configuration that is written as YAML or JSON and loaded again is the same, with the same keys;
- the same holds for any single value of any field.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import HealthCheck, assume, event, example, given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import pipeline_key
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.messages import Schema, all_fields, fields, is_section, locate
from rlhf_core.errors import ConfigError
from tests.support.parsed_config import parse_config
from tests.support.sampled import examples

NOT_FOR_USERS = ("Traceback", "pydantic", "input_value", "<class", "object at 0x", "NoneType")

BASE = """run: {name: base, seed: 3}
data:
  sft:
    - {path: a.jsonl, rename: {question: prompt}}
  max_prompt_tokens: 32
sft: {optimizer: {learning_rate: 1e-5, betas: [0.9, 0.99]}, pack: true}
ppo:
  steps: 10
  kl: {coef: 0.05, target: 6.0}
  rewards:
    - {type: length, target: 20, tolerance: 10, weight: 0.5}
    - {type: keywords, words: [happy, sun], name: words}
reward: {enabled: false}
"""

QUIET = examples(80, 4, suppress_health_check=[HealthCheck.too_slow])

NASTY = st.sampled_from(
    ["\t", "\0", ": ", "- ", "[", "]", "{", "}", "&a ", "*a", "!!int ", "'", '"', "#", "|", ">", "~", "\n",
        "  ", ".nan",
     "1e400", "012", "no", "\ufeff", "\u2028", "\x85", "<<: *a", "? ", "---\n", "...\n", "%YAML 1.1\n", "@",
     "`", "é"]
)  # fmt: skip


@QUIET
@given(
    edits=st.lists(st.tuples(st.integers(0, len(BASE)), st.integers(0, 12), NASTY), min_size=1, max_size=4)
)
def test_edited_file_loads_or_raises_config_error(
    edits: list[tuple[int, int, str]],
) -> None:
    text = BASE
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    try:
        assert isinstance(parse_config(text.encode(), "c.yaml"), PipelineConfig)
    except ConfigError as error:
        assert error.message.startswith("c.yaml")
        assert not [word for word in NOT_FOR_USERS if word in error.message]


@QUIET
@given(data=st.binary(max_size=200))
def test_random_bytes_load_or_raise_config_error(data: bytes) -> None:
    try:
        parse_config(data, "c.yaml")
    except ConfigError as error:
        assert error.message.startswith("c.yaml")


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "path", "coef", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@QUIET
@given(
    tree=st.dictionaries(
        st.sampled_from([*json.loads(PipelineConfig().model_dump_json(by_alias=True)), "x"]),
        TREES,
        max_size=3,
    )
)
def test_random_tree_loads_or_raises_config_error(tree: dict[str, Any]) -> None:
    try:
        config_from_tree(tree, "tree")
    except ConfigError as error:
        assert error.message.startswith("tree")
        assert not [word for word in NOT_FOR_USERS if word in error.message]


def field_schema(path: tuple[str, ...]) -> Schema:
    schema = locate(path).schema
    assert schema is not None
    return schema


LEAVES = sorted(path for path in all_fields() if not is_section(field_schema(path)))


def values(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that the schema allows at a field, and that leave most other rules alone."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    some: st.SearchStrategy[Any]
    if "propertyNames" in schema:
        [(_, value)] = fields(schema)
        return st.dictionaries(st.sampled_from(sorted(schema["properties"])), values(value), max_size=2)
    if "enum" in schema or "const" in schema:
        some = st.sampled_from(schema.get("enum") or [schema["const"]])
    elif schema.get("type") == "boolean":
        some = st.booleans()
    elif schema.get("type") == "integer":
        some = st.integers(int(low or 0), min(int(high or 64), 64))
    elif schema.get("type") == "number":
        most = min(high, 1e6) if high is not None else below
        some = st.floats(
            low if low is not None else above, most, exclude_min=above is not None, exclude_max=high is None
        )
    elif "pattern" in schema:
        some = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
    elif schema.get("type") == "string":
        some = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=20)
    else:
        return st.nothing()  # lists and maps: below
    return st.none() | some if schema.get("nullable") else some


FIELD_VALUES = st.sampled_from([path for path in LEAVES if not values(field_schema(path)).is_empty]).flatmap(
    lambda path: st.tuples(st.just(path), values(field_schema(path)))
)
LISTS: dict[str, Any] = {
    "data.sft": [
        {"path": "a.jsonl", "rename": {"question": "prompt"}},
        {"path": "s3://bucket/key", "limit": 3},
    ],
    "ppo.rewards": [
        {"type": "length", "target": 20, "tolerance": 10},
        {"type": "format", "pattern": "a: \\d+ #b"},
    ],
    "sft.optimizer.betas": [0.5, 1e-05],
    "ppo.lora.targets": ["q_proj", "no"],
}


def planted(changes: list[tuple[tuple[str, ...], Any]], lists: set[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in [*changes, *((tuple(name.split(".")), LISTS[name]) for name in sorted(lists))]:
        here = tree
        for step in path[:-1]:
            here = here.setdefault(step, {})
        here[path[-1]] = value
    return tree


@QUIET
@given(st.lists(FIELD_VALUES, max_size=4), st.sets(st.sampled_from(sorted(LISTS))))
def test_dumped_configuration_loads_as_the_same_one(
    changes: list[tuple[tuple[str, ...], Any]], lists: set[str]
) -> None:
    try:
        config = config_from_tree(planted(changes, lists), "tree")
    except ConfigError as error:
        # Two fields that contradict each other; the message is for users all the same.
        assert not [word for word in NOT_FOR_USERS if word in error.message]
        event("contradicts itself")
        assume(False)
    dump = config.model_dump(mode="json", by_alias=True)
    # JSON's pairs of surrogates are no YAML.
    for text in (yaml.dump(dump, Dumper=yaml.CSafeDumper), json.dumps(dump, ensure_ascii=False)):
        again = parse_config(text.encode(), "again.yaml")
        assert again == config
        assert pipeline_key(again, {}) == pipeline_key(config, {})


@QUIET
@given(path=st.sampled_from(LEAVES), value=TREES)
def test_any_value_of_a_field_loads_or_is_reported(path: tuple[str, ...], value: Any) -> None:
    try:
        config_from_tree(planted([(path, value)], set()), "tree")
    except ConfigError as error:
        assert any(step in error.message for step in path)
        assert not [word for word in NOT_FOR_USERS if word in error.message]


NOT_OF_THE_DEMO = {"model.path", "data.sft", "data.preference", "data.prompts"}


@QUIET
@example(key="ppo.teacher.revision", value="main")
@example(key="evaluate.language_model.model", value="A")
@given(
    key=st.sampled_from([".".join(path) for path in LEAVES]) | st.text(max_size=12),
    value=st.text(max_size=16),
)
def test_random_override_is_applied_or_named_in_message(key: str, value: str) -> None:
    try:
        parse_config(b"run: {seed: 1}", "c.yaml", [f"{key}={value}"])
    except ConfigError as error:
        # A model or a set of one's own needs the other sets, which the file lacks.
        lacks_data = key in NOT_OF_THE_DEMO and error.message.startswith("c.yaml: data.")
        # The first field of a section needs those of its section that are required.
        section = key.rpartition(".")[0]
        in_section = error.message.startswith((f"c.yaml: {section}.", f"c.yaml: {section} "))
        lacks_field = in_section and ("is required" in error.message or "needs" in error.message)
        assert "override" in error.message or lacks_data or lacks_field
        assert not [word for word in NOT_FOR_USERS if word in error.message]
