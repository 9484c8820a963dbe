"""The processes of PPO as plain data, without Ray, and what they read of the configuration.

group      ranks x roles in one process each; the ranks of a group are one torch.distributed world
engines    one process each, `tensor_parallel` GPUs each: their own, or with `colocate: all` those of ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core.config.pipeline import ModelConfig, PipelineConfig, RunConfig, runs_on_gpu
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.pipeline import STAGES, StageName

Role = Literal["policy", "reference", "critic", "reward", "judge"]
TRAINED: tuple[Role, ...] = ("policy", "critic")
"""Roles whose models are trained. Those of the others are frozen."""

# The critic starts from the reward model: with adapter and trained head off it is that model (decision 7).
_ADAPTED_FROM: dict[Role, Role] = {"reference": "policy", "reward": "critic"}


@dataclass(frozen=True)
class PPOSettings:
    """What the controller, the ranks and the engines of PPO read of the configuration."""

    ppo: PPOConfig
    model: ModelConfig
    run: RunConfig
    max_sequence_tokens: int
    """Tokens of a prompt and its response, at most."""

    @classmethod
    def of(cls, config: PipelineConfig) -> PPOSettings:
        """Return the settings of a configuration."""
        return cls(config.ppo, config.model, config.run, config.max_sequence_tokens)


@dataclass(frozen=True)
class Group:
    """Training ranks that host the same roles."""

    roles: tuple[Role, ...]
    ranks: int

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def label(self) -> str:
        """The roles in words: `critic + reward model`."""
        return " + ".join(self.roles).replace("reward", "reward model")

    @property
    def trains(self) -> bool:
        """Whether one of its models is trained."""
        return any(role in TRAINED for role in self.roles)

    def deepspeed(self, role: Role, ppo: PPOConfig) -> DeepSpeedConfig:
        """Return how the model of `role` is distributed over the ranks of this group."""
        settings = ppo.policy_deepspeed if role in ("policy", "reference") else ppo.critic_deepspeed
        if settings.ranks == self.ranks:
            return settings
        # Only a group of frozen models has another number of ranks, and each of them holds a whole copy.
        return DeepSpeedConfig(ranks=self.ranks, dtype=settings.dtype)

    def adapted_from(self, role: Role, ppo: PPOConfig) -> Role | None:
        """Return the role whose model is that of `role` while its adapter is disabled.

        None if `role` has its own weights.
        """
        trained = _ADAPTED_FROM.get(role)
        # A teacher is another model than the policy before its training.
        if ppo.lora is None or trained not in self.roles or (role == "reference" and ppo.teacher is not None):
            return None
        return trained


@dataclass(frozen=True)
class PlacementPlan:
    """All processes of PPO except the controller."""

    groups: tuple[Group, ...]
    engines: int
    tensor_parallel: int
    colocated: bool
    """Whether the engines use the devices of the training ranks (`colocate: all`)."""

    @property
    def ranks(self) -> int:
        """Training ranks of all groups."""
        return sum(group.ranks for group in self.groups)

    @property
    def processes(self) -> int:
        return self.ranks + self.engines

    @property
    def concurrent(self) -> int:
        """Processes that compute at the same time. Engines and training ranks take turns."""
        return max(self.engines, self.ranks)

    @property
    def devices(self) -> int:
        """GPUs needed at the same time."""
        engines = self.engines * self.tensor_parallel
        return max(self.ranks, engines) if self.colocated else self.ranks + engines

    @property
    def gpus_per_rank(self) -> float:
        """Share of a GPU that Ray reserves for one training rank. Colocated engines have the other half."""
        return 0.5 if self.colocated else 1

    @property
    def gpus_per_engine(self) -> float:
        """GPUs that Ray reserves for the process of one engine.

        Colocated, it is half of the first one. The others belong to the ranks whose GPUs the engine uses.
        """
        return 0.5 if self.colocated else self.tensor_parallel

    def cores(self, *, gpus: bool) -> int:
        """Return the cores that Ray reserves: one for each process; with a colocated engine on GPUs, one for
        the rank of each GPU and one for the engine's worker there.
        """
        return 2 * self.ranks if self.colocated and gpus else self.processes

    def describe(self) -> str:
        """Return the plan in words: `2 policy + reference, 2 critic + reward model, 4 engines = 8`."""
        engines = f"{self.engines} engines"
        if self.tensor_parallel > 1:
            engines += f" ({self.tensor_parallel} GPUs each)"
        parts = [f"{group.ranks} {group.label}" for group in self.groups]
        shared = ", on the same GPUs" if self.colocated else ""
        return f"{', '.join([*parts, engines])}{shared} = {self.devices}"


def devices_of(config: PipelineConfig, stage: StageName) -> int:
    """Return the GPUs that a stage uses at a time; 1 on the CPU, and for stages without a model."""
    if not runs_on_gpu(config):
        return 1
    return needed_devices(config, stage)


def needed_devices(config: PipelineConfig, stage: StageName) -> int:
    """Return the number of devices of the ranks and engines of a stage; 1 for stages without."""
    if stage in config.training_sections:
        return config.training_sections[stage].deepspeed.ranks
    if stage == "ppo":
        return plan(config.ppo).devices
    row = STAGES[stage]
    if not (row.loads_model or row.uses_engines):
        return 1
    return max(config.evaluate.ranks, config.evaluate.engines * config.ppo.engine.tensor_parallel)


def plan(ppo: PPOConfig) -> PlacementPlan:
    """Return the processes for `ppo.colocate`, without those of models that do not exist."""
    candidates: list[tuple[tuple[Role, ...], int]] = []
    policy, critic = ppo.policy_deepspeed.ranks, ppo.critic_deepspeed.ranks
    if ppo.colocate == "all":
        # A rule of `PPOConfig` makes the ranks of the critic equal to those of the policy.
        candidates = [(("policy", "reference", "critic", "reward"), policy)]
    else:
        if ppo.colocate in ("policy_reference", "pairs"):
            candidates += [(("policy", "reference"), policy)]
        else:
            candidates += [(("policy",), policy), (("reference",), ppo.reference_ranks)]
        if ppo.colocate in ("critic_reward", "pairs") and ppo.uses_critic:
            candidates += [(("critic", "reward"), critic)]
        else:
            candidates += [(("critic",), critic), (("reward",), ppo.reward_ranks)]
    # Not the judge: it has no ranks of its own, those of the reward model hold it as well.
    exists = {"policy": True, "reference": True, "critic": ppo.uses_critic, "reward": ppo.uses_reward_model}
    groups = []
    for roles, ranks in candidates:
        present = tuple(role for role in roles if exists[role])
        if present:
            groups.append(Group(present, ranks))
    return PlacementPlan(
        tuple(groups), ppo.engine.count, ppo.engine.tensor_parallel, colocated=ppo.colocate == "all"
    )
