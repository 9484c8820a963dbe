"""The documentation matches the code.

- relative links lead to files, and their anchors to headings
- `rlhf` commands parse, and their overrides are fields with allowed values
- `python -m tests....` commands, and those of make that run such a program, have arguments that it knows
- targets of make, modules of `python -m` and paths of files exist
- configurations in the pages are valid, and the examples in Python run, new files in diffs too
- six pages of at most 60 kB are the path; every other page is in the list of reference
- every decision is in an index, has the date of its last check, and there are at most 25
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlhf_cli.main  # noqa: F401 it adds the commands
from rlhf_cli.app import app
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.errors import ConfigError
from rlhf_core.testing import reward_input, run_reward

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern)
)
DECISIONS = [page for page in PAGES if page.startswith("docs/decisions/0")]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROGRAMS = dict(
    re.findall(
        r"^([a-z-]+): setup\n\t\$\(BIN\)/python -m (tests\S+) \$\(ARGS\)$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
)
"""Targets of make that run a program with `ARGS`, and its module."""
assert {"bench", "bench-training", "chaos"} <= set(PROGRAMS)
NEED_ARGUMENTS = (
    "init",
    "data",
    "run",
    "rounds",
    "plan",
    "check-reward",
    "rehearse",
    "why",
    "compare",
    "serve-reward",
    "rollback",
    "promote",
    "serve",
    "chat",
    "publish",
    "rescore",
    "replay",
    "blame",
)
REFUSED_ON_PURPOSE = "sft.optimzer"
"""The README shows the message for this misspelled field."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"(?:rlhf_core|rlhf_cli|flows|tests|deployments|requirements|docs|\.ci)/[\w./*-]*[\w*]")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as code hosts compute it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def shell_lines(text: str) -> Iterator[str]:
    """Yield the command lines of code blocks, without comments.

    In a `bash` block every line is a command. In other blocks a command follows `$ `, and the lines after it
    are its output.
    """
    for language, block in _FENCE.findall(text):
        joined = re.sub(r"\s*\\\n\s*", " ", block)
        for line in joined.splitlines():
            is_prompt = line.startswith("$ ")
            if language == "bash" or is_prompt:
                command = line.removeprefix("$ ").split(" #")[0].strip()
                if command and not command.startswith("#"):
                    yield command


def inline_commands(text: str) -> Iterator[str]:
    """Yield inline code that begins like a command."""
    for code in _INLINE.findall(_FENCE.sub("", text)):
        if re.match(r"(\.venv/bin/)?(rlhf|make|python|pytest|OMP_NUM_THREADS=\d+ python) ", code):
            yield code


def commands(page: str) -> list[list[str]]:
    """Return the words of all commands of a page, without variables and the folder of the environment."""
    found = []
    for line in [*shell_lines(read(page)), *inline_commands(read(page))]:
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for target in _LINK.findall(_FENCE.sub("", read(page))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = read(page)
    missing = []
    for code in [*_INLINE.findall(_FENCE.sub("", text)), *(block for _, block in _FENCE.findall(text))]:
        for match in re.finditer(rf"(?<![\w/.{{}}]){_FILE.pattern}", code):
            if not list(ROOT.glob(match.group())):
                missing.append(match.group())
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_targets_and_modules_of_commands_exist(page: str) -> None:
    missing = []
    for words in commands(page):
        if words[0] == "make":
            given = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
            missing += [f"make {word}" for word in given if word not in TARGETS]
        if words[0].startswith("python") and words[1:2] == ["-m"] and words[2].startswith(("tests", "rlhf")):
            module = ROOT / words[2].replace(".", "/")
            if not module.with_suffix(".py").exists() and not (module / "__main__.py").exists():
                missing.append(words[2])
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_rlhf_commands_parse(page: str) -> None:
    for words in commands(page):
        if words[0] != "rlhf":
            continue
        if any(word.startswith("[") or word == "..." for word in words):
            # a synopsis such as `rlhf plan CONFIG [--json]`
            words = words[: next(i for i, word in enumerate(words) if word.startswith("[") or word == "...")]
        if ">" in words:
            words = words[: words.index(">")]
        if len(words) == 2 and words[1] in NEED_ARGUMENTS:
            continue  # the name of the command
        _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
        config, overrides = bound.arguments.get("config"), bound.arguments.get("overrides", ())
        if config is None or not config.startswith("deployments/"):
            continue
        if any(REFUSED_ON_PURPOSE in override for override in overrides):
            with pytest.raises(ConfigError, match=r"did you mean sft\.optimizer"):
                load_config(ROOT / config, overrides)
        else:
            load_config(ROOT / config, overrides)


class _Parsed(Exception):
    """A program has parsed its arguments."""


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_programs_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
        parse(parser, arguments)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for words in commands(page):
        # `make bench ARGS="..."` is the program of the target `bench`.
        if words[0] == "make" and words[1:2] and words[1] in PROGRAMS:
            given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            words = ["python", "-m", PROGRAMS[words[1]], *(word for text in given for word in text.split())]
        if not words[0].startswith("python") or words[1:2] != ["-m"] or not words[2].startswith("tests."):
            continue
        name, arguments = words[2], words[3:]
        if ">" in arguments:
            arguments = arguments[: arguments.index(">")]
        program: Any = importlib.import_module(f"{name}.__main__" if name == "tests.chaos" else name)
        with pytest.raises(_Parsed):
            program.main(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_configurations_in_pages_are_valid(page: str) -> None:
    for language, block in _FENCE.findall(read(page)):
        if language == "yaml":
            tree = yaml.safe_load(block)
            # A file of `rlhf rescore` has the rewards alone.
            config_from_tree({"ppo": tree} if list(tree) == ["rewards"] else tree)


@pytest.mark.parametrize("page", ["docs/own-loss.md", "docs/rewards.md", "docs/testing.md"])
def test_python_examples_run(page: str) -> None:
    blocks = [block for language, block in _FENCE.findall(read(page)) if language == "python"]
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "example"})


def test_new_files_in_diffs_are_valid_python() -> None:
    found: dict[str, dict[str, Any]] = {}
    for block in re.findall(r"^ *```diff\n(.*?)^ *```$", read("docs/change-it.md"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^--- ", textwrap.dedent(block), flags=re.MULTILINE):
            if part.startswith("/dev/null"):
                _, name, *lines = part.splitlines()
                code = compile("\n".join(line.removeprefix("+") for line in lines), name, "exec")
                exec(code, found.setdefault(name, {"__name__": "example", "__annotations__": {}}))
    assert {"+++ b/one_sentence.py", "+++ b/my_loss.py"} <= set(found)
    score = found["+++ b/one_sentence.py"]["score"]
    assert run_reward(score, [reward_input("Q", "One. Two."), reward_input("Q", "One.")]) == [0.5, 1.0]


def test_the_readme_is_about_8_kb() -> None:
    assert len(read("README.md")) < 9_000


def test_the_path_is_six_pages_of_at_most_60_kb() -> None:
    path, reference = read("docs/README.md").split("## Reference\n")
    pages = [ROOT / "docs" / target for target in _LINK.findall(path)]
    assert len(pages) == 6
    assert sum(page.stat().st_size for page in pages) <= 60_000
    assert not set(_LINK.findall(path)) & set(_LINK.findall(reference))


def test_every_page_is_in_an_index() -> None:
    index = read("docs/README.md") + read("README.md")
    records = read("docs/decisions/README.md")
    missing = [
        page
        for page in PAGES
        if f"({Path(page).name})" not in (records if page in DECISIONS else index)
        and f"({page})" not in index
        and f"(../{page})" not in index
        and page not in ("README.md", "docs/decisions/README.md")
    ]
    assert missing == []


def test_there_are_at_most_25_decisions() -> None:
    assert len(DECISIONS) <= 25


@pytest.mark.parametrize("page", DECISIONS)
def test_a_decision_has_status_dates_and_three_parts(page: str) -> None:
    text = read(page)
    assert re.search(r"^- Status: accepted$", text, re.MULTILINE)
    assert re.search(r"^- Date: 20\d\d-\d\d-\d\d$", text, re.MULTILINE)
    assert re.search(r"^- Last check: 20\d\d-\d\d-\d\d$", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]
