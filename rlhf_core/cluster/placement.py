"""Which processes PPO runs, as plain data: no Ray here.

group      ranks x roles in one process each; the ranks of a group are one torch.distributed world
engines    one process each, `tensor_parallel` GPUs each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core.config.ppo import PPOConfig

Role = Literal["policy", "reference", "critic", "reward"]


@dataclass(frozen=True)
class Group:
    """Training ranks that host the same roles."""

    roles: tuple[Role, ...]
    ranks: int

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True)
class PlacementPlan:
    """All processes of PPO besides the controller."""

    groups: tuple[Group, ...]
    engines: int
    gpus_per_rank: float
    gpus_per_engine: float

    def group_of(self, role: Role) -> Group:
        return next(group for group in self.groups if role in group.roles)

    @property
    def processes(self) -> int:
        return sum(group.ranks for group in self.groups) + self.engines

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{group.ranks} x {group.name}" for group in self.groups]
        return ", ".join([*parts, f"{self.engines} x engine"])


def plan(ppo: PPOConfig, *, critic: bool, reward_model: bool, device: str) -> PlacementPlan:
    """`critic`, `reward_model`: whether those models exist in this run. `device`: "cpu" or "cuda"."""
    wanted: list[tuple[tuple[Role, ...], int]] = []
    policy, critics = ppo.policy_deepspeed.ranks, ppo.critic_deepspeed.ranks
    if ppo.colocate == "all":
        wanted = [(("policy", "reference", "critic", "reward"), policy)]
    else:
        if ppo.colocate in ("policy_reference", "pairs"):
            wanted += [(("policy", "reference"), policy)]
        else:
            wanted += [(("policy",), policy), (("reference",), ppo.reference_ranks)]
        if ppo.colocate in ("critic_reward", "pairs"):
            wanted += [(("critic", "reward"), critics)]
        else:
            wanted += [(("critic",), critics), (("reward",), ppo.reward_ranks)]
    absent = {role for role, exists in (("critic", critic), ("reward", reward_model)) if not exists}
    kept = [(tuple(role for role in roles if role not in absent), ranks) for roles, ranks in wanted]
    groups = tuple(Group(roles, ranks) for roles, ranks in kept if roles)
    if device == "cpu":
        return PlacementPlan(groups, ppo.engine.count, 0, 0)
    if ppo.colocate == "all":
        # Trainers and engines take turns on the same devices.
        return PlacementPlan(groups, ppo.engine.count, 0.5, 0.5 * ppo.engine.tensor_parallel)
    return PlacementPlan(groups, ppo.engine.count, 1, ppo.engine.tensor_parallel)
