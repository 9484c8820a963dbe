"""Checks the code for GPUs against the CUDA wheels, on a machine without a GPU.

    uv venv --python 3.11 gpu-env
    uv pip sync --python gpu-env/bin/python --require-hashes requirements/gpu.txt requirements/bootstrap.txt
    uv pip install --python gpu-env/bin/python hypothesis pytest-timeout pytest-xdist "moto[server]" boto3
    PYTHONPATH=. gpu-env/bin/python -m tests.gpu.against_wheels

The first two commands need a gigabyte of downloads and nine of disk. Parts, each in a process of its own:

    modules        every module of `rlhf_core` is imported
    imports        every name that `rlhf_core` imports from torch, vLLM, DeepSpeed, Ray, transformers and PEFT
                   exists, also where the import is inside a function
    signatures     every call of such a name gives arguments that it accepts
    methods        the same for the methods of `LLM`, vLLM's engine and DeepSpeed's engine
    engine         vLLM makes its whole configuration for each kind of engine, with its CUDA platform and a
                   described device of 80 GB
    rollouts       each token of a scripted model gets its log-probability and version from vLLM's scheduler
                   and sampler for GPUs, in Triton's interpreter
    deepspeed      DeepSpeed accepts each kind of configuration, and knows all its fields
    tests          the unit tests of engines, weight sync and models pass with these packages

No kernel runs. `python -m tests.gpu.first_run` is the check on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"torch", "vllm", "deepspeed", "ray", "transformers", "peft", "safetensors", "accelerate"}
OPTIONAL = {"kubernetes"}
"""Extras that the lock for GPUs does not have: they submit jobs, and do not run in them."""
VLLM = "rlhf_core/engines/vllm.py"
ACTOR = "rlhf_core/ppo/fleet/engine_actor.py"
LLM = ("vllm", "LLM")
TRAINER = ("deepspeed.runtime.engine", "DeepSpeedEngine")
OBJECTS = {
    (VLLM, "self.llm"): LLM,
    (ACTOR, "self._engine.llm"): LLM,
    (ACTOR, "llm"): LLM,
    (VLLM, "self.llm.llm_engine"): ("vllm.v1.engine.llm_engine", "LLMEngine"),
    (VLLM, "self.llm.llm_engine.engine_core"): ("vllm.v1.engine.core_client", "EngineCoreClient"),
    ("rlhf_core/engines/deepspeed.py", "self.engine"): TRAINER,
    ("rlhf_core/engines/deepspeed.py", "engine"): TRAINER,
}
"""The class of an object whose methods a file calls, by the file and the object in it."""
UNDESCRIBED = {"AutoModelForCausalLM.from_config"}
"""Calls that are not checked: transformers describes this one without its first argument."""
TESTS = ("tests/unit/engines", "tests/unit/models", "tests/unit/algo")
PART_SECONDS = 1800.0


def check_modules() -> Iterator[str]:
    """Import every module of `rlhf_core`."""
    for file in sorted((ROOT / "rlhf_core").rglob("*.py")):
        name = _module_of(file)
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                yield f"{name}: {error}"
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"


def check_imports() -> Iterator[str]:
    """Look up every name that is imported from the packages."""
    count = 0
    for file, tree in _sources():
        for node in ast.walk(tree):
            for module, name in _imported(node):
                count += 1
                if _look_up(module, name) is None:
                    yield f"{file}:{getattr(node, 'lineno', 0)}: {module} has no {name or 'such module'}"
    print(f"{count} imported names")


def check_signatures() -> Iterator[str]:
    """Compare the arguments of each call of an imported name with its parameters."""
    count = 0
    for file, tree in _sources():
        known = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_checked(node.module):
                for alias in node.names:
                    known[alias.asname or alias.name] = _look_up(node.module or "", alias.name)
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_checked(alias.name):
                        first = alias.asname or alias.name.partition(".")[0]
                        known[first] = _look_up(alias.name if alias.asname else first, "")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = _called(node.func, known)
            if called is None or ast.unparse(node.func) in UNDESCRIBED:
                continue
            count += 1
            if problem := refused(called, node):
                yield f"{file}:{node.lineno}: {ast.unparse(node.func)}: {problem}"
    print(f"{count} calls")


def check_methods() -> Iterator[str]:
    """Compare the arguments of each call of a method of `OBJECTS` with its parameters."""
    found: set[tuple[str, str]] = set()
    methods = set()
    for file, tree in _sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            place = file.as_posix(), ast.unparse(node.func.value)
            if place not in OBJECTS:
                continue
            found.add(place)
            methods.add((OBJECTS[place], node.func.attr))
            kind = _look_up(*OBJECTS[place])
            if problem := refused(getattr(kind, node.func.attr, None), node, of_object=True):
                yield f"{file}:{node.lineno}: {ast.unparse(node.func)}: {problem}"
    yield from (f"{file}: calls no method of {name}" for file, name in OBJECTS.keys() - found)
    print(f"{len(methods)} methods")


def check_engine() -> Iterator[str]:
    """Have vLLM make the configuration of each kind of engine."""
    from tests.support.small_ppo import save_small_model

    with tempfile.TemporaryDirectory() as folder:
        model = save_small_model(Path(folder), vocabulary=8192)
        with _described_device():
            # After the device is described: vLLM looks at it when it is imported.
            from rlhf_core.config.ppo_sections import EngineConfig
            from rlhf_core.engines.vllm import Engine

            kinds = list(_kinds_of_engines())
            for settings, options in kinds:
                engine = EngineConfig.model_validate({"gpu_memory_utilization": 0.5, **settings})
                try:
                    with mock.patch("vllm.LLM", _configure):
                        Engine(model, engine, device="cuda", max_model_len=64, seed=0, **options)
                except _Configured:
                    continue
                except Exception as error:
                    yield f"{settings} {options}: {type(error).__name__}: {error}"
            print(f"{len(kinds)} kinds of engines")


def _kinds_of_engines() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for dtype, eager, backend in itertools.product(
        ("bfloat16", "float32"), (True, False), ("ipc", "nccl", "gloo")
    ):
        settings = {"dtype": dtype, "enforce_eager": eager}
        yield settings, {"weight_transfer": backend}
    common: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": False}
    yield common, {}
    yield {**common, "prefix_caching": True}, {"weight_transfer": "nccl"}
    yield common, {"weight_transfer": "ipc", "sleep_level": 1}
    yield common, {"weight_transfer": "ipc", "sleep_level": 2}
    yield common, {"weight_transfer": "ipc", "adapter_rank": 16}
    yield common, {"weight_transfer": "ipc", "head_dtype": "float32"}
    for level in (0, 1, 2):
        yield {**common, "tensor_parallel": 2}, {"weight_transfer": "ipc", "sleep_level": level}


def check_rollouts() -> Iterator[str]:
    """Sample with vLLM's scheduler and sampler for GPUs (`tests.gpu.scripted_runner`)."""
    from tests.gpu import scripted_runner

    scripted_runner.prepare()
    from tests.support.small_ppo import VOCABULARY, save_small_model

    with tempfile.TemporaryDirectory() as folder, _described_device():
        yield from scripted_runner.check_rollouts(save_small_model(Path(folder)), VOCABULARY)


class _Configured(Exception):
    """vLLM has made its configuration, and nothing was started."""


def _configure(**options: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(**options).create_engine_config()
    raise _Configured


def _described_device() -> ExitStack:
    """Describe two devices of 80 GB to torch, and have vLLM choose its CUDA platform."""
    import torch

    properties = SimpleNamespace(
        name="described", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132,
        shared_memory_per_block_optin=232_448, warp_size=32,
    )  # fmt: skip
    described = _all_of(
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _device=None: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_name", lambda _device=None: properties.name),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _device=None: properties),
        mock.patch.object(torch.cuda, "mem_get_info", lambda _device=None: (79 << 30, 80 << 30)),
    )
    # After torch is patched, because vLLM looks at the devices when these modules are imported.
    # Kernels need the library of the driver, and a configuration needs no kernel.
    kernels = {name: ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}
    allocator: Any = ModuleType("vllm.cumem_allocator")
    for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
        setattr(allocator, name, None)
    # Tensor parallelism: vLLM asks this module, which looks up kernels, for the sizes of messages.
    reduction: Any = ModuleType("vllm.compilation.passes.fusion.allreduce_rms_fusion")
    reduction.FI_ALLREDUCE_FUSION_MAX_SIZE_MB = {}
    described.enter_context(
        mock.patch.dict(sys.modules, {**kernels, **{each.__name__: each for each in (allocator, reduction)}})
    )
    platforms = importlib.import_module("vllm.platforms")
    cuda = importlib.import_module("vllm.platforms.cuda")
    described.enter_context(mock.patch.object(platforms, "_current_platform", cuda.NonNvmlCudaPlatform()))
    return described


def check_deepspeed() -> Iterator[str]:
    """Have DeepSpeed read each kind of configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from rlhf_core.config.training import DeepSpeedConfig as Settings
    from rlhf_core.engines.sharding import deepspeed_config

    count = 0
    for stage, dtype, offload in itertools.product(
        (0, 1, 2, 3), ("float32", "bfloat16", "float16"), ("none", "optimizer", "all")
    ):
        try:
            settings = Settings.model_validate({"zero_stage": stage, "dtype": dtype, "offload": offload})
        except ValueError:
            continue  # this project refuses the combination
        count += 1
        made = deepspeed_config(settings, trained=10**8, clip=1.0, overlap=True)
        unknown = set(made.get("zero_optimization", {})) - _names(DeepSpeedZeroConfig)
        if unknown:
            yield f"stage {stage}, {dtype}, {offload}: zero_optimization has no {sorted(unknown)}"
        try:
            DeepSpeedConfig(made)
        except Exception as error:
            yield f"stage {stage}, {dtype}, {offload}: {type(error).__name__}: {error}"
    print(f"{count} configurations")


def check_tests() -> Iterator[str]:
    """Run the unit tests of the code that calls these packages."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *TESTS]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_SECONDS
    )
    yield from (line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    if ended.returncode and "FAILED" not in ended.stdout:
        yield f"pytest ended with code {ended.returncode}: {ended.stdout[-500:]}{ended.stderr[-500:]}"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "modules": check_modules,
    "imports": check_imports,
    "signatures": check_signatures,
    "methods": check_methods,
    "engine": check_engine,
    "rollouts": check_rollouts,
    "deepspeed": check_deepspeed,
    "tests": check_tests,
}


# -- shared --


def _module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted((ROOT / "rlhf_core").rglob("*.py")):
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def _is_checked(module: str | None) -> bool:
    return (module or "").partition(".")[0] in PACKAGES


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and not node.level and _is_checked(node.module):
        yield from ((node.module or "", alias.name) for alias in node.names)
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if _is_checked(alias.name))


def _look_up(module: str, name: str) -> Any:
    """Return the object, or None if it does not exist."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    if not name:
        return found
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        return None


def _called(function: ast.expr, known: dict[str, Any]) -> Any:
    """Return the object that `a.b.c` stands for; None if it is none of the packages'."""
    path = []
    while isinstance(function, ast.Attribute):
        path.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return None
    found = known.get(function.id)
    for name in reversed(path):
        found = getattr(found, name, None)
    return found


def refused(called: Any, node: ast.Call, *, of_object: bool = False) -> str | None:
    """Return why `called` does not accept the arguments of a call; None if it does, or has no signature.

    Args:
        called: A function or class, or a method of a class.
        node: The call. What `*` and `**` add to its arguments is not known.
        of_object: Whether `called` is a method, whose first argument is the object.
    """
    if called is None:
        return "does not exist"
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    is_static = len(positional) == len(node.args) and len(keywords) == len(node.keywords)
    bind = signature.bind if is_static else signature.bind_partial
    try:
        bind(*[None] * of_object, *positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def _names(model: Any) -> set[str]:
    """Return the names and aliases of the fields of a pydantic model."""
    return {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def _all_of(*managers: Any) -> ExitStack:
    stack = ExitStack()
    for manager in managers:
        stack.enter_context(manager)
    return stack


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, or one of them, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="one part, in this process")
    part = parser.parse_args(arguments).part
    if part is not None:
        problems = list(PARTS[part]())
        for problem in problems:
            print(f"  {problem}")
        return 1 if problems else 0
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
    failed = []
    for name in PARTS:
        command = [sys.executable, "-m", "tests.gpu.against_wheels", name]
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_SECONDS,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )  # fmt: skip
        print(f"{name}: {'ok' if ended.returncode == 0 else 'FAILED'}\n{ended.stdout.rstrip()}", flush=True)
        if ended.returncode:
            failed.append(name)
            print(ended.stderr[-1500:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
