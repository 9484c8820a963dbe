"""`rlhf serve`: the command of vLLM's OpenAI-compatible server for a registered policy."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.config.ppo_sections import engine_rank
from rlhf_core.data.tokenizer import TOKENIZER_FILES
from rlhf_core.errors import InputError
from rlhf_core.evaluation.policy_files import adapter_rank
from rlhf_core.run.registered_policies import RegisteredPolicy
from rlhf_core.system.home import Home
from rlhf_core.system.serving import API_KEY, is_loopback

_OWN_OPTIONS = (
    "host", "port", "uds", "model", "served-model-name", "lora-modules", "middleware", "api-key", "root-path",
    "allowed-origins", "config",
)  # fmt: skip
"""Options of vLLM that `rlhf serve` sets itself, and others that would bypass the rules about addresses."""


def serve_command(policy: RegisteredPolicy, host: str, port: int, more: Sequence[str] = ()) -> list[str]:
    """Return the command that serves the policy with vLLM's OpenAI-compatible server.

    The model is served as `NAME` and `NAME@VERSION`.

    Args:
        policy: The policy.
        host: Address to listen on. Others than loopback need VLLM_API_KEY.
        port: Port to listen on.
        more: Further arguments of vLLM.

    Raises:
        InputError: The address can be reached from other machines, and there is no key; or `more` has an
            option that is set here.
    """
    _check_options(more)
    names = [policy.name, f"{policy.name}@{policy.version.version}"]
    engine = policy.config["ppo"]["engine"]
    command = [
        # Not `vllm serve`, which fails with the package for CPUs: that one is not named `vllm`.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy.files.model),
        "--host", host, "--port", str(port), "--dtype", str(engine["dtype"]),
    ]  # fmt: skip
    if is_loopback(host):
        # Web pages in a browser on this machine could send requests otherwise.
        command += ["--middleware", "rlhf_core.system.serving.OwnAddressOnly"]
    elif not os.environ.get(API_KEY):
        raise InputError(
            f"--host must be a loopback address without a key; got {host}; set {API_KEY}, here and for the"
            " clients"
        )
    if os.environ.get(API_KEY):
        command += ["--middleware", "rlhf_core.system.serving.KeyOnly"]
    if policy.files.adapter is None:
        command += ["--served-model-name", *names]
    else:
        rank = adapter_rank(policy.files.adapter)
        adapters = [f"{name}={policy.files.adapter}" for name in names]
        command += ["--served-model-name", f"{policy.name}-sft", "--enable-lora"]
        command += ["--max-lora-rank", str(engine_rank(rank)), "--lora-modules", *adapters]
    return [*command, *more]


def tokenizer_alone(policy: RegisteredPolicy, home: str | Path) -> Path:
    """Return a folder in the cache of `home` with links to the tokenizer's files of a policy, for
    `--tokenizer`.

    Beside some config.json, such as that of qwen2, transformers replaces parts of tokenizer.json by its own.
    """
    model = policy.files.model.resolve()
    # One for each model folder, so that repeated starts do not add others.
    digest = hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
    folder = Home.of(home).make().cache / f"tokenizer-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        # The files behind the links may have moved since the last start.
        (folder / name).unlink(missing_ok=True)
        if (model / name).exists():
            (folder / name).symlink_to(model / name)
    return folder


def _check_options(more: Sequence[str]) -> None:
    for argument in more:
        if not argument.startswith("--"):
            continue
        # As vLLM reads it: `--served_model_name=x`, `--host.x` and abbreviations are options as well.
        option = argument.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-")
        own = [name for name in _OWN_OPTIONS if name.startswith(option)]
        if own:
            raise InputError(
                f"--vllm must not contain --{own[0]}, which rlhf serve decides; got --{option}; leave it out"
                " (--host and --port are options of rlhf serve, the key is in VLLM_API_KEY)"
            )


def serve_environment() -> dict[str, str]:
    """Return the variables of a vLLM server, where the environment does not have them."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    import torch

    if not torch.cuda.is_available():
        # VLLM_CPU_KVCACHE_SPACE is in GiB.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return variables | dict(os.environ)
