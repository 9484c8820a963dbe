"""Check of the reward sources before anything is started.

The file of a reward function is parsed, but neither imported nor executed.
"""

from __future__ import annotations

import ast
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rlhf_core.config.allowed_hosts import forbidden, host_of
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
from rlhf_core.rewards.access_token import reward_token
from rlhf_core.rewards.chat_service import api_key
from rlhf_core.rewards.rubric import read_rubric
from rlhf_core.system.files import unfit


def check_rewards(config: PipelineConfig) -> Iterator[Finding]:
    """Check the token, and for each source its function, its rubric and key, or the addresses of its
    services.
    """
    sources = reward_fields(config)
    if any(isinstance(source, RemoteReward) for source in sources.values()):
        try:
            reward_token()
        except ConfigError as error:
            yield error
    for field, source in sources.items():
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


def _function(source: UserFunction, field: str) -> Iterator[Finding]:
    problem = _function_problem(source, field)
    if problem is not None:
        yield ConfigError(problem)


def _source(config: PipelineConfig, source: AnyReward, field: str) -> Iterator[Finding]:
    if isinstance(source, PythonReward):
        yield from _function(source, field)
    elif isinstance(source, RemoteReward):
        yield from check_hosts(source.urls, source.allowed_hosts, f"{field}.urls", _user(config, field))
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
    if "local" in map(config.run.executor_of, stages):
        try:
            api_key(settings, field)
        except ConfigError as error:
            yield error
    yield from check_hosts((str(settings.url),), settings.allowed_hosts, f"{field}.url", _user(config, field))


def _user(config: PipelineConfig, field: str) -> str:
    return "PPO" if field.startswith("ppo.") and config.ppo.enabled else "the evaluation"


def _has_other_prompts(config: PipelineConfig) -> bool:
    return any(part.path != "synthetic" for part in config.data.prompts)


def check_hosts(
    urls: Sequence[str], allowed_hosts: Sequence[str], field: str, user: str
) -> Iterator[Finding]:
    """Check that the hosts of `urls` can be found, and are public or in `allowed_hosts`.

    For messages, `field` is the name of the urls, and `user` that of the stage that sends the requests.
    """
    for host in dict.fromkeys(map(host_of, urls)):
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            # No error: the stage that needs it may run on another host.
            yield f"{field}: {host} cannot be found from here ({error}); {user} will need it"
            continue
        addresses = [str(entry[4][0]) for entry in entries]
        address = forbidden(host, addresses, allowed_hosts)
        if address is not None:
            yield ConfigError(
                f"{field}: must lead to public addresses or to listed ones; got {host}, which is"
                f" {address}; if that is meant, add the address or its network to"
                f" {field.rpartition('.')[0]}.allowed_hosts"
            )


def _function_problem(source: UserFunction, field: str) -> str | None:
    """Return why the function of `source` cannot be used, or None. The function is not imported."""
    module, _, name = source.function.partition(":")
    if source.file is not None:
        file = Path(source.file)
        problem = unfit(source.file)
        if isinstance(problem, FileNotFoundError):
            return (
                f"{field}.file: file not found: {file}; correct the path"
                f" (relative ones start at {Path.cwd()})"
            )
        if problem is not None:
            return f"{field}.file: {problem}; give a *.py file"
        if file.suffix != ".py":
            return f"{field}.file: must be a *.py file; got {file}; rename it"
    elif module.partition(".")[0] in sys.stdlib_module_names:
        return (
            f"{field}.function: must be your own; got {source.function} of Python's standard library; name"
            f" your function, and its file as {field}.file"
        )
    else:
        location = module_file(module)
        if location is None:
            return (
                f"{field}.function: module {module} not found; install it, or give its file as {field}.file"
            )
        file = location
    if file.suffix != ".py":
        return None
    try:
        names = _names(ast.parse(file.read_bytes(), str(file)).body)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        position = f"{file}:{line}" if line else str(file)
        return f"{field}.function: {position} is not valid Python ({error}); correct it"
    if names is not None and name not in names:
        known = ", ".join(sorted(names)[:8]) or "none"
        return f"{field}.function: {file} has no function {name}; it has {known}"
    return None


def function_file(source: UserFunction) -> Path | None:
    """Return the file with the function of a user, or None if its module is not found."""
    return Path(source.file) if source.file else module_file(source.function.partition(":")[0])


def module_file(module: str) -> Path | None:
    """Return the file of a module, or None if it is not found. The packages around it are not executed."""
    paths: list[str] | None = None
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        try:
            spec = _find_spec(".".join(parts[: depth + 1]), paths)
        except (ImportError, ValueError, TypeError):
            return None
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None


def _find_spec(name: str, paths: list[str] | None) -> ModuleSpec | None:
    """Return what an import of the module finds in `paths` of the package around it; None for no package."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            # The order in which the process of the function searches (`PythonFunction._start`). Without the
            # names of the packages around it, because a namespace package would need them to be imported.
            where = [*sys.path, os.getcwd()] if paths is None else paths
            spec = PathFinder.find_spec(name.rpartition(".")[2], where)
        else:
            spec = finder.find_spec(name, paths)
        if spec is not None:
            return spec
    return None


def _names(body: list[ast.stmt]) -> set[str] | None:
    """Return the names at a module's top level that may be functions.

    None if a star import or `__getattr__` may add others.
    """
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if isinstance(node.value, ast.Constant):
                continue  # no function
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(
                part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            # The name of a star import is `*`.
            names.update(alias.asname or alias.name for alias in node.names)
        else:
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            inner_names = _names([*inner, *handlers])
            names.update({"*"} if inner_names is None else inner_names)
    return None if names & {"*", "__getattr__"} else names
