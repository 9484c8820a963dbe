"""Every bad configuration gives one clear message, before anything heavy starts.

Rules: `rlhf run` ends with exit code 2 for each input of the tables. The message names the file and
line (or the override), the field, the value if it may be shown, the rule and a fix. It has no traceback and
no word of the validation library. Secrets are never shown. `test_bad_values` has the fields.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from tests.support import demo_data
from tests.support.parsed_config import parse_config
from tests.support.users import as_unprivileged_user
from tests.unit.bad_input.bad_inputs import Bad, Command

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)

SYNTAX = (
    Bad("an empty file", "", ("c.yaml", "is empty", "section")),
    Bad("only comments", "# nothing\n", ("is empty",)),
    Bad("a list at the top", "- a\n", ("c.yaml:1", "must hold sections", "a list")),
    Bad("a single word", "hello\n", ("must hold sections", "a single value")),
    Bad(
        "a duplicate key",
        "sft:\n  epochs: 1\n  epochs: 2\n",
        ("c.yaml:3", "duplicate key sft.epochs", "keep one"),
    ),
    Bad("a duplicate section", "run: {seed: 1}\nrun: {seed: 2}\n", ("c.yaml:2", "duplicate key run")),
    Bad(
        "a python tag",
        "run: !!python/object/apply:os.system ['id']\n",
        ("c.yaml:1", "unsupported tag", "plain value"),
    ),
    Bad("a string tag", "run:\n  name: !!str 5\n", ("c.yaml:2", "unsupported tag")),
    Bad("a local tag", "run: !secret x\n", ("unsupported tag", "!secret")),
    Bad("an alias bomb", BOMB, ("more than 20000 values with aliases expanded",)),
    Bad("a recursive alias", "run: &r\n  name: *r\n", ("c.yaml:1", "an alias in itself")),
    Bad("a recursive list", "a: &a [*a]\n", ("an alias in itself",)),
    Bad("an alias of nothing", "run: {name: *x}\n", ("c.yaml:1", "undefined alias 'x'", "quote")),
    Bad(
        "a merge key", "a: &a {seed: 1}\nrun:\n  <<: *a\n", ("c.yaml:3", "merge keys", "write the fields out")
    ),
    Bad("a tab as indent", "run:\n\tname: x\n", ("c.yaml:2", "tab", "spaces")),
    Bad(
        "a tab deeper down",
        "run:\n  name: x\nppo:\n  kl:\n  \t coef: 1\n   x: 1\n",
        ("c.yaml:5", "tab", "spaces"),
    ),
    Bad("an open bracket", "run: {name: x\nppo: 1\n", ("c.yaml:", "not valid YAML")),
    Bad("two colons", "run:\n  name: a: b\n", ("c.yaml:2", "not valid YAML", "quote")),
    Bad(
        "two documents",
        "run: {seed: 1}\n---\nrun: {seed: 2}\n",
        ("c.yaml:2", "another document", "one document"),
    ),
    Bad("a list as key", "[a, b]: 1\n", ("c.yaml:1", "key must be a single word")),
    Bad("UTF-16", "run: {seed: 1}".encode("utf-16"), ("c.yaml:1", "UTF-16", "save it as UTF-8")),
    Bad("UTF-16 without a mark", "run: {seed: 1}".encode("utf-16-le"), ("NUL byte", "not UTF-8")),
    Bad("a NUL byte", b"run:\n  name: a\0b\n", ("c.yaml:2", "NUL byte")),
    Bad("Latin-1", "run:\n  name: caf\xe9\n".encode("latin-1"), ("c.yaml:2", "0xe9", "not UTF-8")),
    Bad("a control character", b"run:\n  name: a\x07\n", ("c.yaml:2", "control characters")),
    Bad("half a surrogate pair", 'run: {name: "\\ud800"}\n', ("c.yaml:1", "not valid YAML")),
    Bad("a megabyte and more", "# " + "x" * 1_000_001, ("larger than 1000000 bytes",)),
    Bad("a megabyte of nesting", "a: " + "[" * 500_000, ("nested deeper than 40",)),
    Bad("a hundred thousand items", "a: [" + "1," * 100_000 + "1]", ("more than 20000 values",)),
)


OVERRIDES = (
    Bad("no equals sign", "run: {seed: 1}", ("override ppo.steps", "section.field=value"), ("ppo.steps",)),
    Bad(
        "no value",
        "run: {seed: 1}",
        ("override ppo.steps=", "has no value", "ppo.steps=null"),
        ("ppo.steps=",),
    ),
    Bad("no key", "run: {seed: 1}", ("override", "section.field=value"), ("=3",)),
    Bad(
        "an unknown key",
        "run: {seed: 1}",
        ("ppo.stpes: unknown key", "did you mean ppo.steps?"),
        ("ppo.stpes=3",),
    ),
    Bad("an unknown section", "run: {seed: 1}", ("pp: unknown key", "did you mean ppo?"), ("pp.steps=3",)),
    Bad(
        "a wrong type",
        "run: {seed: 1}",
        ("override ppo.steps=abc: ppo.steps", "an integer", "'abc'"),
        ("ppo.steps=abc",),
    ),
    Bad(
        "a fraction",
        "ppo: {steps: 3}",
        ("override ppo.steps=2.5: ppo.steps", "use 2 or 3"),
        ("ppo.steps=2.5",),
    ),
    Bad("fields of a value", "run: {seed: 1}", ("run.seed is a value",), ("run.seed.x=3",)),
    Bad(
        "a name as index",
        "run: {seed: 1}",
        ("ppo.rewards is a list", "'x'", "ppo.rewards.0"),
        ("ppo.rewards.x.weight=1",),
    ),
    Bad(
        "an index too high",
        "run: {seed: 1}",
        ("ppo.rewards has 1 items", "index 7"),
        ("ppo.rewards.7.weight=1",),
    ),
    Bad("a section that is text", "ppo: fast", ("ppo is no section", "'fast'"), ("ppo.steps=3",)),
    Bad(
        "an alias",
        "run: {seed: 1}",
        ("override run.name=*a", "undefined alias 'a'", "quote"),
        ("run.name=*a",),
    ),
    Bad("a tag", "run: {seed: 1}", ("override run.name=!!int 3", "unsupported tag"), ("run.name=!!int 3",)),
    Bad("an open bracket", "run: {seed: 1}", ("override data.sft=[", "not valid YAML"), ("data.sft=[",)),
    Bad(
        "arithmetic that an override breaks",
        "ppo:\n  minibatches: 4\n",
        ("override ppo.minibatches=5: ppo.minibatches must divide", "got 5"),
        ("ppo.minibatches=5",),
    ),
    Bad(
        "a new reward without type",
        "ppo:\n  rewards: [{type: model}]\n",
        ("override ppo.rewards.1.target=20: ppo.rewards.1.type", "is required"),
        ("ppo.rewards.1.target=20",),
    ),
)


@pytest.mark.parametrize("bad", SYNTAX, ids=lambda bad: bad.title)
def test_bad_syntax_is_reported_with_its_line_and_a_fix(command: Command, bad: Bad) -> None:
    assert command.complaint(bad).startswith("c.yaml")


@pytest.mark.parametrize("bad", OVERRIDES, ids=lambda bad: bad.title)
def test_bad_override_is_named_in_the_message(command: Command, bad: Bad) -> None:
    assert command.complaint(bad).startswith("override ")


def test_missing_unreadable_and_folder_have_different_messages(command: Command, tmp_path: Path) -> None:
    assert "nowhere.yaml: configuration file not found" in command.message("run", "nowhere.yaml")
    assert "is a directory" in command.message("run", str(tmp_path))
    assert "cannot be read" in command.message("run", "a\0b.yaml")
    assert "cannot be read" in command.message("run", "x" * 5000)

    (tmp_path / "closed.yaml").write_text("run: {seed: 1}")
    (tmp_path / "closed.yaml").chmod(0)
    with as_unprivileged_user():
        assert "closed.yaml: permission denied" in command.message("run", "closed.yaml")


SECRET = "hunter2hunter2"


PLACES = {
    "a pipe": ("is a pipe (FIFO), not a regular file", "write it to a file"),
    "a device": ("/dev/zero is a device", "write it to a file"),
    "a link to itself": ("loop.yaml is a link that leads to itself",),
    "a dangling link": ("configuration file not found",),
}


@pytest.mark.parametrize("title", PLACES)
def test_configuration_must_be_a_regular_file(command: Command, title: str) -> None:
    os.mkfifo(command.folder / "pipe.yaml")
    (command.folder / "loop.yaml").symlink_to("loop.yaml")
    (command.folder / "gone.yaml").symlink_to("nowhere")
    names = {
        "a pipe": "pipe.yaml",
        "a device": "/dev/zero",
        "a link to itself": "loop.yaml",
        "a dangling link": "gone.yaml",
    }
    message = command.message("run", names[title])
    assert [word for word in PLACES[title] if word not in message] == [], message


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_model_shape_must_be_a_regular_file(command: Command, target: str) -> None:
    os.mkfifo(command.folder / "pipe")
    (command.folder / "c.yaml").write_text("run: {device: cpu}\n")
    message = command.message("plan", "c.yaml", "--model-config", target)
    assert f"{target} is a " in message and "not a regular file" in message


@pytest.mark.parametrize("gpus", ["\u0668xA100-80G", "1000000000xA100-80G", "0xA100-80G"])
def test_invalid_count_of_gpus_is_refused(command: Command, gpus: str) -> None:
    (command.folder / "c.yaml").write_text("run: {seed: 1}\n")
    assert "--gpus: must be a count and a device" in command.message("plan", "c.yaml", "--gpus", gpus)


BROKEN_CHECKS = {
    "rlhf_core.data.check.address_of": (
        "data: {sft: [{path: ./a.jsonl}], preference: [{path: synthetic}], prompts: [{path: synthetic}]}",
        "data.sft.0.path: cannot be checked (RecursionError: ",
    ),
    "rlhf_core.config.address.is_hub_model": (
        f"model: {{path: ./x}}\n{demo_data.YAML}",
        "model.path: cannot be checked (RecursionError: ",
    ),
    "rlhf_core.config.load.adapter_rate": (
        "sft: {lora: {r: 8}}",
        "c.yaml: the configuration: cannot be checked (RecursionError: ",
    ),
    "rlhf_core.config.rewards.pattern_problem": (
        "run: {seed: 1}\nppo:\n  steps: 3\n  rewards:\n  - {type: format, pattern: a}",
        "c.yaml: the configuration: cannot be checked (RecursionError: ",
    ),
    "rlhf_core.preflight.check_memory": (
        "run: {seed: 1}",
        "c.yaml: cannot be checked (RecursionError: too deep)",
    ),
}


@pytest.mark.parametrize("check", BROKEN_CHECKS)
def test_exception_of_a_check_is_reported_with_its_field(
    command: Command, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(check, fail)
    text, words = BROKEN_CHECKS[check]
    command.complaint(Bad("a check that fails", text, (words, "correct")))


SECRETS = (
    Bad("a store's user", f"store: {{url: 's3://key:{SECRET}@bucket/x'}}",
        ("store.url", "credentials", "environment")),
    Bad("a slash in a password", f"store: {{url: 's3://AKIA:ab/{SECRET}@bucket'}}", ("credentials",)),
    Bad("an endpoint's user", f"store: {{endpoint: 'http://a:{SECRET}@127.0.0.1:9000'}}",
        ("store.endpoint", "credentials")),
    Bad("a tracker's user", f"tracking: {{uri: 'https://{SECRET}@host'}}", ("tracking.uri", "credentials")),
    Bad("a key in a query", f"tracking: {{uri: 'http://h/?api_key={SECRET}'}}",
        ("tracking.uri", "credentials")),
    Bad("a signature of a store", f"store: {{endpoint: 'https://h/?X-Goog-Signature={SECRET}'}}",
        ("store.endpoint", "credentials")),
    Bad("a token in a fragment", f"tracking: {{uri: 'http://h/#token={SECRET}'}}",
        ("tracking.uri", "credentials")),
    Bad("a token by percent signs", f"tracking: {{uri: 'http://h/?%74oken={SECRET}'}}",
        ("tracking.uri", "credentials")),
    Bad("a user after backslashes", f"tracking: {{uri: 'https:/\\u:{SECRET}@h'}}",
        ("tracking.uri", "credentials")),
    Bad("a user without a scheme", f"store: {{url: '//u:{SECRET}@h'}}", ("store.url", "credentials")),
    Bad("a token in a query", f"tracking: {{uri: 'https://host/?token={SECRET}'}}",
        ("tracking.uri", "credentials")),
    Bad("a signed address", f"store: {{url: 's3://bucket/x?X-Amz-Signature={SECRET}'}}",
        ("store.url", "credentials")),
    Bad("a service's user",
        f"ppo: {{rewards: [{{type: remote, urls: ['http://me:{SECRET}@a/x']}}]}}",
        ("ppo.rewards.0", "RLHF_REWARD_TOKEN")),
    Bad("a password as a field", f"tracking: {{password: {SECRET}}}", ("tracking.password", "unknown key")),
    Bad("a key as a field", f"model: {{api_key: {SECRET}}}", ("model.api_key", "unknown key")),
    Bad("a token for a number", f"ppo: {{steps: hf_{SECRET}}}", ("ppo.steps", "(hidden)")),
    Bad("an address for a number", f"ppo: {{steps: 'https://host/?token={SECRET}'}}",
        ("ppo.steps", "(hidden)")),
    Bad("an override with a user", "run: {seed: 1}", ("override", "credentials"), (f"tracking.uri=https://a:{SECRET}@host",)),
    Bad("an override of a secret", "run: {seed: 1}", ("override", "unknown key"),
        (f"store.secret={SECRET}",)),
    Bad("a strange override", "run: {seed: 1}", ("override", "credentials"), (f"store.url=s3://a:{SECRET}@b/[",)),
    Bad("a broken override", "run: {seed: 1}", ("override", "not valid YAML"), (f"store.url=[s3://a:{SECRET}@b/",)),
    Bad("an address as key", f"? 'https://a:{SECRET}@host'\n: 1\n", ("unknown key",)),
)  # fmt: skip


@pytest.mark.parametrize("bad", SECRETS, ids=lambda bad: bad.title)
def test_secret_is_not_shown(command: Command, bad: Bad) -> None:
    assert SECRET not in command.complaint(bad)


def test_error_is_not_chained_to_one_with_the_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"tracking: {{password: {SECRET}}}".encode())
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message
