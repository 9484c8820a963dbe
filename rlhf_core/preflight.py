"""Preflight: what can be checked before anything is started.

Each part of the pipeline has its own checks, next to what they check. They examine files, folders, addresses,
devices and arithmetic, and neither import nor execute anything of the user: reward functions and models are
only read. Nothing heavy is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from rlhf_core.cluster.connect import check_cluster
from rlhf_core.config.consistency import check_consistency, unusual_settings
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import credential_problem, shown, texts
from rlhf_core.data.check import check_data, with_assumed_limits
from rlhf_core.errors import ConfigError, Finding, InputError, guarded
from rlhf_core.evaluation.check import check_evaluation
from rlhf_core.executors.check import check_executors
from rlhf_core.models.architectures import check_architecture, check_packages_of_engines
from rlhf_core.models.check import check_adapters, check_model, check_tensor_parallel
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.check import check_devices, check_disk, check_memory, small_model_rates
from rlhf_core.rewards.check import check_rewards
from rlhf_core.stages.benchmark import check_benchmark
from rlhf_core.storage.store import check_storage
from rlhf_core.system.failpoints import is_well_formed
from rlhf_core.system.files import unwritable
from rlhf_core.system.home import home_problem
from rlhf_core.tracking.check import check_tracking

_UNSAFE_VARIABLES = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "allows engines to execute received code",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "allows checkpoints to execute code",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "allows models of the registry to execute code",
    "PYTHONOPTIMIZE": "removes checks from the libraries",
}
"""Environment variables that disable a guarantee of SECURITY.md, and the effect of each."""
_PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables of proxies, in capitals or small letters."""


Check = Callable[[PipelineConfig], Iterator[Finding]]
"""The check of one part of the pipeline."""


def check(
    config: PipelineConfig,
    *,
    stages: Collection[StageName] = tuple(STAGES),
    this_machine: bool = True,
    memory: Check | None = None,
) -> list[str]:
    """Return the warnings of all parts, one sentence each.

    Args:
        config: The configuration. Length limits that follow from the data are estimated.
        stages: The stages of the run. Devices that only others need are a warning.
        this_machine: False for a plan for other machines: folders, environment, executors, devices and disk
            of this one are not checked.
        memory: Checks the memory; by default that of this machine.

    Raises ConfigError, DataError or ModelError (the class of the first problem). Its message lists every
    problem, one per line.
    """
    config = with_assumed_limits(config)
    # Each with the name of what it checks, for the message if the check itself fails. Messages are in this
    # order.
    addresses: tuple[tuple[str, Check], ...] = (
        ("run.home", check_addresses),
        ("store", check_storage),
        ("tracking", check_tracking),
        ("environment", check_environment),
        ("RAY_ADDRESS", check_cluster),
    )
    contents: tuple[tuple[str, Check], ...] = (
        ("data", check_data),
        ("model.path", check_model),
        ("model.path", check_architecture),
        ("lora", check_adapters),
        ("ppo.rewards", check_rewards),
        ("evaluate", lambda config: check_evaluation(config, stages)),
        ("configuration", unusual_settings),
        ("model.path", small_model_rates),
        ("configuration", check_consistency),
        ("ppo.engine.tensor_parallel", check_tensor_parallel),
    )
    devices: tuple[tuple[str, Check], ...] = (
        ("run.device", lambda config: check_devices(config, stages)),
        ("model.path", check_packages_of_engines),
        ("run.home", check_disk),
        ("run.executor", check_executors),
        ("benchmark", lambda config: check_benchmark(config, stages)),
    )
    # Last, because it suggests changes of a configuration that is otherwise right.
    last = ("memory", memory or (lambda config: check_memory(config, stages)))
    parts = (*addresses, *contents, *devices, last) if this_machine else (*contents, last)
    # By message: two checks that read the same file can find the same problem.
    errors: dict[str, InputError] = {}
    warnings: dict[str, None] = {}  # a set in the order of insertion
    for field, part in parts:
        for finding in guarded(field, part(config)):
            if isinstance(finding, InputError):
                errors.setdefault(finding.message, finding)
            else:
                warnings[finding] = None
    if errors:
        first = next(iter(errors.values()))
        raise type(first)("\n".join(errors))
    return list(warnings)


def check_addresses(config: PipelineConfig) -> Iterator[Finding]:
    """Check that no address has credentials, and that `run.home` can be written to."""
    # By alias: the attribute `register_` is the section `register` in the file that the message is about.
    for path, text in texts(config.model_dump(mode="json", by_alias=True)):
        if problem := credential_problem(text, "give them by environment variables or a role"):
            yield ConfigError(f"{'.'.join(map(str, path))}: {problem}")
    problem = home_problem(Path(config.run.home))
    if problem is not None:
        home = shown(config.run.home, limit=200)
        yield ConfigError(f"run.home: the folder {home} cannot be used: {problem}; choose another")


def check_environment(config: PipelineConfig) -> Iterator[Finding]:
    """Check environment variables that cannot be used, or that disable a protection."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        folder = os.environ.get(name)
        # The stages create one that is missing.
        problem = unwritable(Path(folder)) if folder else None
        if problem is not None:
            yield ConfigError(
                f"{name}: {shown(folder, limit=200)} cannot be used: {problem}; choose another folder"
            )
    try:
        Path.home()
    except RuntimeError:  # Prefect and MLflow would raise it during their import
        yield ConfigError(
            f"HOME: must name a folder, because this machine has no user with the id {os.getuid()}; got"
            " nothing; set it"
        )
    yield from _check_http_variables()
    faults = os.environ.get("RLHF_FAIL")
    if faults and not is_well_formed(faults):
        yield ConfigError(
            f"RLHF_FAIL: must be name:nth:action, several by commas; got {shown(faults)}; correct or unset it"
        )
    for name, effect in _UNSAFE_VARIABLES.items():
        is_set = os.environ.get(name, "").lower() not in ("", "0", "false")
        # `python -O` has the effect of the variable without setting it.
        if is_set or (name == "PYTHONOPTIMIZE" and sys.flags.optimize):
            yield ConfigError(f"{name}: {effect}; got {shown(os.environ.get(name, 'python -O'))}; unset it")


def _check_http_variables() -> Iterator[Finding]:
    """Check that a client of httpx, which Prefect uses, can be created with the variables that it reads."""
    certificates = os.environ.get("SSL_CERT_FILE")
    proxies = [name for name, value in os.environ.items() if value and name.upper() in _PROXIES]
    # Creating a client takes a quarter of a second, and most machines have none of these variables.
    if not (certificates or proxies):
        return
    import httpx

    try:
        # httpx checks certificates and proxies only when it creates a client. Without this, Prefect would
        # fail with an error of httpx after the run has begun.
        httpx.Client().close()
    except OSError as error:
        yield ConfigError(
            f"SSL_CERT_FILE: must be a file of certificates; got {shown(certificates, limit=200)}"
            f" ({error.strerror or error}); correct or unset it"
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        yield ConfigError(
            f"{', '.join(proxies)}: must be http(s)://host:port, or socks5://host:port if the package socksio"
            f" is installed, or hosts in NO_PROXY; the HTTP client says {shown(str(error), limit=200)};"
            " correct or unset it"
        )
