"""Which processes PPO runs, as plain data: no Ray here.

group      ranks x roles in one process each; the ranks of a group are one torch.distributed world
engines    one process each, `tensor_parallel` GPUs each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig

Role = Literal["policy", "reference", "critic", "reward"]

_WORDS: dict[Role, str] = {
    "policy": "policy",
    "reference": "reference",
    "critic": "critic",
    "reward": "reward model",
}

_ADAPTED_FROM: dict[Role, Role] = {"reference": "policy", "reward": "critic"}


@dataclass(frozen=True)
class Group:
    """Training ranks that host the same roles."""

    roles: tuple[Role, ...]
    ranks: int

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def words(self) -> str:
        return " + ".join(_WORDS[role] for role in self.roles)

    def deepspeed(self, role: Role, ppo: PPOConfig) -> DeepSpeedConfig:
        """How the model of `role` lies over the ranks."""
        settings = ppo.policy_deepspeed if role in ("policy", "reference") else ppo.critic_deepspeed
        # Groups of frozen models only, with a size of their own: whole copies.
        return (
            settings
            if settings.ranks == self.ranks
            else DeepSpeedConfig(ranks=self.ranks, dtype=settings.dtype)
        )

    def adapted_from(self, role: Role, ppo: PPOConfig) -> Role | None:
        """The trained model beside it that is `role` while its adapter is off; None where `role` has its own
        weights.
        """
        trained = _ADAPTED_FROM.get(role)
        return trained if ppo.lora is not None and trained in self.roles else None


@dataclass(frozen=True)
class PlacementPlan:
    """All processes of PPO besides the controller."""

    groups: tuple[Group, ...]
    engines: int
    tensor_parallel: int
    colocated: bool
    """True where engines use the devices of the training ranks (`colocate: all`)."""

    @property
    def ranks(self) -> int:
        """Training ranks of all groups."""
        return sum(group.ranks for group in self.groups)

    @property
    def processes(self) -> int:
        return self.ranks + self.engines

    @property
    def busy(self) -> int:
        """Processes that compute at the same moment: engines and training ranks take turns."""
        return max(self.engines, self.ranks)

    @property
    def devices(self) -> int:
        """GPUs needed at the same time."""
        engines = self.engines * self.tensor_parallel
        return max(self.ranks, engines) if self.colocated else self.ranks + engines

    @property
    def gpus_per_rank(self) -> float:
        """Ray's share of a GPU for one training rank; colocated trainers and engines take turns."""
        return 0.5 if self.colocated else 1

    @property
    def gpus_per_engine(self) -> float:
        return 0.5 * self.tensor_parallel if self.colocated else self.tensor_parallel

    def describe(self) -> str:
        """`2 policy + reference, 2 critic + reward model, 4 engines = 8`"""
        engines = f"{self.engines} engines"
        if self.tensor_parallel > 1:
            engines += f" ({self.tensor_parallel} GPUs each)"
        parts = ", ".join([*(f"{group.ranks} {group.words}" for group in self.groups), engines])
        return (
            f"{parts}, on the same GPUs = {self.devices}" if self.colocated else f"{parts} = {self.devices}"
        )


def plan(ppo: PPOConfig) -> PlacementPlan:
    """Return the processes for `ppo.colocate`. Models that the configuration does not have have none."""
    wanted: list[tuple[tuple[Role, ...], int]] = []
    policy, critic = ppo.policy_deepspeed.ranks, ppo.critic_deepspeed.ranks
    if ppo.colocate == "all":
        wanted = [(("policy", "reference", "critic", "reward"), policy)]
    else:
        if ppo.colocate in ("policy_reference", "pairs"):
            wanted += [(("policy", "reference"), policy)]
        else:
            wanted += [(("policy",), policy), (("reference",), ppo.reference_ranks)]
        if ppo.colocate in ("critic_reward", "pairs") and ppo.uses_critic:
            wanted += [(("critic", "reward"), critic)]
        else:
            wanted += [(("critic",), critic), (("reward",), ppo.reward_ranks)]
    absent = {
        role
        for role, exists in (("critic", ppo.uses_critic), ("reward", ppo.uses_reward_model))
        if not exists
    }
    kept = [(tuple(role for role in roles if role not in absent), ranks) for roles, ranks in wanted]
    groups = tuple(Group(roles, ranks) for roles, ranks in kept if roles)
    return PlacementPlan(groups, ppo.engine.count, ppo.engine.tensor_parallel, ppo.colocate == "all")
