"""Check of the reward sources before anything is started.

The file of a reward function is parsed, but neither imported nor executed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import symtable
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from rlhf_core.config.base import host_of
from rlhf_core.config.keys import sources_read
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import (
    AnyReward,
    ChatServiceConfig,
    GoldReward,
    LanguageModelReward,
    PythonReward,
    RemoteReward,
    UserFunction,
)
from rlhf_core.errors import ConfigError, Finding, guarded
from rlhf_core.pipeline import STAGES
from rlhf_core.rewards.chat_service import api_key, read_rubric
from rlhf_core.rewards.post import clear_text_problem, reward_token
from rlhf_core.system.files import unfit


def check_rewards(config: PipelineConfig) -> Iterator[Finding]:
    """Check for each source its function, its rubric and key, or the token and addresses of its services."""
    for field, source in reward_fields(config).items():
        yield from guarded(field, _source(config, source, field))
    for field, function in functions_of_ppo(config).items():
        yield from guarded(field, _function(function, field))


def reward_fields(config: PipelineConfig) -> dict[str, AnyReward]:
    """Return all reward sources by field: those of PPO and those of regression sets."""
    fields = {f"ppo.rewards.{index}": source for index, source in enumerate(config.ppo.rewards)}
    for index, each in enumerate(config.evaluate.regression):
        fields[f"evaluate.regression.{index}.reward"] = each.reward
    return fields


def functions_of_ppo(config: PipelineConfig) -> dict[str, UserFunction]:
    """Return the user's functions of PPO that are no rewards, by field: its loss and its advantages."""
    given = {"ppo.loss": config.ppo.loss, "ppo.advantages": config.ppo.advantages}
    return {field: section for field, section in given.items() if isinstance(section, UserFunction)}


def _source(config: PipelineConfig, source: AnyReward, field: str) -> Iterator[Finding]:
    if isinstance(source, PythonReward):
        yield from _function(source, field)
    elif isinstance(source, RemoteReward):
        yield from _services(source.urls, f"{field}.urls", reward_token())
    elif isinstance(source, LanguageModelReward):
        if source.rubric is not None:
            try:
                read_rubric(source.rubric, f"{field}.rubric")
            except ConfigError as error:
                yield error
        yield from check_chat_service(config, source, field)
    elif isinstance(source, GoldReward) and field.startswith("ppo.") and _has_other_prompts(config):
        yield (
            f"{field}: type gold supports the demo task only, but data.prompts has other sources, whose true"
            " reward is unknown"
        )


def check_chat_service(config: PipelineConfig, settings: ChatServiceConfig, field: str) -> Iterator[Finding]:
    """Check the key of a language model's server, if a stage that asks it runs here, and its host."""
    stages = [name for name in STAGES if field.startswith(sources_read(config, name))]
    key = None
    if "local" in map(config.run.executor_of, stages):
        try:
            key = api_key(settings, field)
        except ConfigError as error:
            yield error
    # Where the stage runs elsewhere, the key is not known here.
    sent = key or settings.api_key_env
    yield from _services((str(settings.url),), f"{field}.url", sent)


def _has_other_prompts(config: PipelineConfig) -> bool:
    return any(part.path != "synthetic" for part in config.data.prompts)


def _services(urls: Sequence[str], field: str, token: str | None) -> Iterator[Finding]:
    """Check that the hosts of `urls` can be found, and that no `token` is sent in clear text to a public
    address. `field` is the name of the urls.
    """
    for url in urls:
        try:
            socket.getaddrinfo(host_of(url), None)
        except OSError as error:
            # No error: the stage that needs it may run on another host.
            yield f"{field}: {host_of(url)} cannot be found from here ({error}); its stage will need it"
            continue
        if token and (problem := clear_text_problem(url)):
            yield ConfigError(f"{field}: {problem}")


def _function(source: UserFunction, field: str) -> Iterator[Finding]:
    """Check that the function exists. Its module is not imported."""
    module, _, name = source.function.partition(":")
    if source.file is not None:
        file = Path(source.file)
        problem = unfit(source.file)
        if isinstance(problem, FileNotFoundError):
            yield ConfigError(
                f"{field}.file: file not found: {file}; correct the path"
                f" (relative ones start at the configuration or at {Path.cwd()})"
            )
            return
        if problem is not None:
            yield ConfigError(f"{field}.file: {problem}; give a *.py file")
            return
        if file.suffix != ".py":
            yield ConfigError(f"{field}.file: must be a *.py file; got {file}; rename it")
            return
    # The working folder is searched last: a file `test.py` in it is never found as `test`.
    elif module.partition(".")[0] in sys.stdlib_module_names:
        yield ConfigError(
            f"{field}.function: must be your own; got {source.function} of Python's standard library; name"
            f" your function, and its file as {field}.file"
        )
        return
    else:
        found = module_file(module)
        if found is None:
            yield ConfigError(
                f"{field}.function: module {module} not found; install it, or give its file as {field}.file"
            )
            return
        # Of compiled code, the names are not known without an import.
        if found.suffix != ".py":
            return
        file = found
    try:
        code = file.read_bytes()  # it can declare another encoding than UTF-8
        # Read and not imported: the import runs code, which belongs into the process of the function.
        symbols = symtable.symtable(code, str(file), "exec").get_symbols()  # type: ignore[arg-type]  # takes bytes
    except (SyntaxError, ValueError) as error:
        position = str(file)
        if line := getattr(error, "lineno", None):
            position += f":{line}"
        yield ConfigError(f"{field}.function: {position} is not valid Python ({error}); correct it")
        return
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    # These add names that only an import would show.
    adds_names = "__getattr__" in names or re.search(rb"^\s*from .* import \*", code, re.MULTILINE)
    if name not in names and not adds_names:
        known = ", ".join(sorted(names)[:8]) or "none"
        yield ConfigError(f"{field}.function: {file} has no function {name}; it has {known}")


def function_file(source: UserFunction) -> Path | None:
    """Return the file with the function of a user, or None if its module is not found."""
    if source.file:
        return Path(source.file)
    return module_file(source.function.partition(":")[0])


def module_file(module: str) -> Path | None:
    """Return the file of a module, or None if it is not found. The packages around it are not executed."""
    top, *rest = module.split(".")
    # In this order the process of the function searches (`PythonFunction._start`).
    spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    # Not `find_spec` of the whole name, which imports the packages around the module.
    for part in rest:
        if spec is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin)
