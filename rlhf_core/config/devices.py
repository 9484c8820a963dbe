"""What this machine offers and what a configuration asks of it, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.pipeline import PipelineConfig

_DRIVER = Path("/proc/driver/nvidia/gpus")


def cpu_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """CUDA devices that a process started now would see; 0 with a torch built for the CPU."""
    if _torch_is_cpu_build():
        return 0
    present = _installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or present == 0:
        return present
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if "-1" in names:
        names = names[: names.index("-1")]
    return len([name for name in names if not name.isdigit() or int(name) < present])


def runs_on_gpu(config: PipelineConfig) -> bool:
    """Where `run.device` leads on this machine."""
    return config.run.device == "cuda" or (config.run.device == "auto" and visible_gpus() > 0)


@dataclass(frozen=True)
class Placement:
    """The processes of PPO and how they share devices."""

    parts: tuple[tuple[str, int], ...]
    """(what, how many devices), for example ("policy + reference", 2); the engines come last."""
    engines_share: bool
    """True where engines use the devices of the training ranks (`colocate: all`)."""

    @property
    def devices(self) -> int:
        """GPUs needed at the same time."""
        counts = [count for _, count in self.parts]
        return max(counts) if self.engines_share else sum(counts)

    @property
    def processes(self) -> int:
        """Training ranks and engines that run at the same time."""
        return sum(count for _, count in self.parts)

    @property
    def busy(self) -> int:
        """Processes that compute at the same moment: engines and training ranks take turns."""
        engines = self.parts[-1][1]
        return max(engines, self.processes - engines)

    @property
    def arithmetic(self) -> str:
        """`2 policy + reference, 2 critic + reward, 4 engines = 8`"""
        parts = ", ".join(f"{count} {what}" for what, count in self.parts)
        return f"{parts}, on the same GPUs = {self.devices}" if self.engines_share else f"{parts} = {self.devices}"


def placement(config: PipelineConfig) -> Placement:
    """The groups of PPO under `ppo.colocate`. With `all`, engines share the GPUs of the four models."""
    ppo = config.ppo
    policy, critic = ppo.policy_deepspeed.ranks, ppo.critic_deepspeed.ranks
    with_reference = ppo.colocate in ("policy_reference", "pairs", "all")
    with_reward = ppo.colocate in ("critic_reward", "pairs", "all") or not ppo.uses_reward_model
    reward_name = "critic + reward model" if ppo.uses_reward_model and with_reward else "critic"
    parts: list[tuple[str, int]] = []
    if ppo.colocate == "all":
        parts.append((f"policy + reference + {reward_name}", policy))
    else:
        parts.append(("policy + reference" if with_reference else "policy", policy))
        if not with_reference:
            parts.append(("reference", ppo.reference_ranks))
        parts.append((reward_name, critic))
        if not with_reward:
            parts.append(("reward model", ppo.reward_ranks))
    tensor_parallel = ppo.engine.tensor_parallel
    name = "engines" if tensor_parallel == 1 else f"engines ({ppo.engine.count} x {tensor_parallel} GPUs)"
    parts.append((name, ppo.engine.count * tensor_parallel))
    return Placement(tuple(parts), engines_share=ppo.colocate == "all")


def _torch_is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _installed_gpus() -> int:
    if _DRIVER.is_dir():
        return len(list(_DRIVER.iterdir()))
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
