"""The PPO controller: one driver, everything else is called.

    prompts -> rollout -> score -> advantages -> update -> sync -> log -> checkpoint
               engines    policy,                policy    policy
                          reference,             critic    -> engines
                          critic, reward         (both at once)

Consumes the prompts of the data artifact; produces `metrics.jsonl`, sample tables, checkpoints and, at the end, the
policy. Waits for every engine and rank with a timeout. A step's engines hold the weights of the step before: with
synchronous steps the policy version of every rollout is the number of steps done.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.algo.kl import AdaptiveKL, FixedKL
from rlhf_core.algo.losses import step_denominator
from rlhf_core.cluster.fleet import Fleet, WorkerGroup
from rlhf_core.cluster.placement import Role
from rlhf_core.cluster.records import OptimizerStep, TrainSample
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import NonFiniteError, RLHFError, WeightSyncError
from rlhf_core.failpoints import failpoint
from rlhf_core.models.batching import plan_ranks
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.rollout.dispatch import assign, prompts_of_step
from rlhf_core.rollout.experience import Experience, make_experience
from rlhf_core.seeds import derive_seed
from rlhf_core.training.sft import epoch_batches
from rlhf_core.types import PromptExample, RewardInput, Rollout, Services

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class PPOController:
    """Runs the loop over a started `Fleet`."""

    def __init__(
        self,
        config: PipelineConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: RewardComposer,
        services: Services,
        *,
        cpu_seconds: Callable[[], float] | None = None,
    ) -> None:
        """`cpu_seconds`: CPU time of all processes so far; given, each phase's share is measured too."""
        self._config = config
        self._ppo = config.ppo
        self._fleet = fleet
        self._prompts = prompts
        self._decode = decode
        self._composer = composer
        self._services = services
        self._cpu_seconds = cpu_seconds
        self._seed = derive_seed(config.run.seed, "ppo")
        kl = self._ppo.kl
        self._kl: FixedKL | AdaptiveKL = (
            FixedKL(kl.coef) if kl.target is None else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        )
        self._metrics_file = services.out / "metrics.jsonl"
        self._timing: Metrics = {}
        self._high_kl = 0
        self.done = 0
        """Steps finished: the policy version."""

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the last step, from the last checkpoint if there is one."""
        self._restore()
        self.sync()
        while self.done < self._ppo.steps:
            metrics = self.iterate()
            self._log(metrics)
            if self.done % self._ppo.checkpoint_every == 0 and self.done < self._ppo.steps:
                self._checkpoint(metrics["objective/rlhf_reward"])

    def iterate(self) -> Metrics:
        """One PPO step; returns its metrics."""
        started = time.monotonic()
        step = self.done + 1
        self._timing = {}
        with self._timed("rollout"):
            rollouts, prompts = self.rollout(step)
        failpoint("ppo.after_rollout")
        with self._timed("scoring"):
            experience, by_source = self.score(rollouts, prompts)
        self._guard(experience, step)
        with self._timed("training"):
            update = self._update(rollouts, experience, step)
        failpoint("ppo.after_update")
        self._kl.update(experience.metrics["objective/kl"], len(rollouts))
        self.done = step
        with self._timed("sync"):
            sync = self.sync()
        failpoint("ppo.after_sync")
        if step % self._ppo.samples_every == 0 or step in (1, self._ppo.steps):
            self._log_samples(rollouts, prompts, experience, step)
        tokens = sum(len(r.response_ids) for r in rollouts)
        return {
            **experience.metrics,
            **{f"rewards/{name}": float(np.mean(values)) for name, values in by_source.items()},
            **update,
            **sync,
            "objective/kl_coef": self._kl.coef,
            "rollout/tokens_per_s": tokens / self._timing["timing/rollout"],
            "timing/step": time.monotonic() - started,
            **self._timing,
        }

    # -- steps of the loop --------------------------------------------------------------------------------------

    def rollout(self, step: int) -> tuple[list[Rollout], list[PromptExample]]:
        """`samples_per_prompt` responses to this step's prompts, in the order of prompts; the prompts repeated alike."""
        ppo, fleet = self._ppo, self._fleet
        indices = prompts_of_step(len(self._prompts), ppo.prompts_per_step, self._seed, step)
        prompts = [self._prompts[i] for i in indices]
        # The position joins the seed: a prompt that comes twice in a step is answered twice, not copied.
        seeds = [derive_seed(self._seed, "rollout", step, p.prompt_id, i) for i, p in enumerate(prompts)]
        shares = assign([len(p.input_ids) for p in prompts], len(fleet.engines))
        calls = [
            engine.generate.remote(
                [prompts[i] for i in share],
                ppo.samples_per_prompt,
                ppo.max_new_tokens,
                ppo.temperature,
                [seeds[i] for i in share],
            )
            for engine, share in zip(fleet.engines, shares, strict=True)
        ]
        answers = fleet.wait(calls, f"the engines' rollouts of step {step}", ppo.engine.timeout)
        by_prompt: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, answers, strict=True):
            for place, i in enumerate(share):
                by_prompt[i] = rollouts[place * ppo.samples_per_prompt : (place + 1) * ppo.samples_per_prompt]
        ordered = [rollout for i in range(len(prompts)) for rollout in by_prompt[i]]
        stale = {r.policy_version for r in ordered} - {self.done}
        if stale:
            raise WeightSyncError(f"step {step} was sampled from policy version {sorted(stale)}, not {self.done}")
        return ordered, [p for p in prompts for _ in range(ppo.samples_per_prompt)]

    def score(self, rollouts: list[Rollout], prompts: list[PromptExample]) -> tuple[Experience, dict[str, list[float]]]:
        """All four models at once, then the rules, then experience."""
        fleet = self._fleet
        sequences = [(r.prompt_ids, r.response_ids) for r in rollouts]
        old = self._spread("policy", "logprobs", sequences, ("policy",), (True,))
        ref = self._spread("reference", "logprobs", sequences, ("reference",), (False,))
        values = self._spread("critic", "values", sequences)
        scores = self._spread("reward", "scores", sequences) if "reward" in fleet.groups else None

        inputs = [
            RewardInput(
                prompt_id=r.prompt_id,
                prompt=p.prompt,
                response=self._decode(r.response_ids),
                prompt_ids=r.prompt_ids,
                response_ids=r.response_ids,
                finished=r.finished,
                meta=p.meta,
            )
            for r, p in zip(rollouts, prompts, strict=True)
        ]
        model_scores = None if scores is None else scores.gather(lambda result: result)
        rewards = self._composer.score(inputs, model_scores)
        experience = make_experience(
            rollouts,
            old_logprobs=old.gather(lambda result: result.logprobs),
            ref_logprobs=ref.gather(lambda result: result.logprobs),
            values=values.gather(lambda result: result),
            entropy=old.gather(lambda result: result.entropy),
            scores=rewards.total,
            ppo=self._ppo,
            kl_coef=self._kl.coef,
        )
        return experience, rewards.by_source

    def _spread(
        self,
        role: Role,
        method: str,
        sequences: Sequence[Any],
        before: tuple[Any, ...] = (),
        after: tuple[Any, ...] = (),
    ) -> _Spread:
        """Cut a list over the ranks of a role's group and start the call."""
        group = self._fleet.groups[role]
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        plan = plan_ranks(lengths, group.ranks, self._ppo.micro_batch_tokens)
        shares = [[i for micro in micros for i in micro] for micros in plan]
        arguments = [
            (*before, [sequences[i] for i in share], _renumber(micros), *after)
            for share, micros in zip(shares, plan, strict=True)
        ]
        return _Spread(self._fleet, f"{role}.{method}", shares, group.submit_each(method, arguments))

    def _guard(self, experience: Experience, step: int) -> None:
        """Stop before bad numbers reach the weights."""
        for name in ("objective/kl", "objective/rlhf_reward", "policy/entropy"):
            if not np.isfinite(experience.metrics[name]):
                raise NonFiniteError(f"ppo step {step}: {name} is {experience.metrics[name]}")
        gap = experience.metrics["rollout/logprob_gap_mean"]
        sync = self._ppo.weight_sync
        exact = self._ppo.engine.dtype == self._ppo.policy_deepspeed.dtype == "float32"
        # Kernels in low precision differ by more than a stale weight would in float32.
        limit = sync.canary_tolerance if exact else max(sync.canary_tolerance, 0.05)
        if sync.canary and gap > limit:
            raise WeightSyncError(
                f"ppo step {step}: engines and trainer differ by {gap:.2g} in mean log-probability for the same weights "
                f"(ppo.weight_sync.canary_tolerance allows {limit:g}); the engines hold other weights"
            )
        if gap > self._ppo.logprob_gap_limit:
            log.warning("step %d: engine and trainer log-probabilities differ by %.3g on average", step, gap)
        self._high_kl = self._high_kl + 1 if experience.metrics["objective/kl"] > self._ppo.max_kl else 0
        if self._high_kl >= 3:
            raise RLHFError(
                f"ppo step {step}: KL {experience.metrics['objective/kl']:.1f} has been above ppo.max_kl="
                f"{self._ppo.max_kl:g} for three steps; raise ppo.kl.coef or lower ppo.policy.learning_rate"
            )

    def _update(self, rollouts: list[Rollout], experience: Experience, step: int) -> Metrics:
        """Epochs x minibatches optimizer steps on policy and critic, at the same time."""
        samples = _train_samples(rollouts, experience)
        batches = [
            batch
            for epoch in range(self._ppo.epochs)
            for batch in epoch_batches(
                len(samples), self._ppo.minibatch_size, derive_seed(self._seed, "minibatches", step), epoch
            )
        ]
        roles: list[Role] = ["critic"] if step <= self._ppo.critic_warmup_steps else ["policy", "critic"]
        running = {role: self._start_update(role, samples, batches) for role in roles}
        metrics: Metrics = {}
        tokens = sum(len(samples[i].response_ids) for batch in batches for i in batch)
        for role, references in running.items():
            ranks = self._fleet.wait(references, f"the {role}'s update of step {step}")
            sums = {name: sum(rank.get(name, 0.0) for rank in ranks) for name in ranks[0]}
            prefix = "policy" if role == "policy" else "value"
            metrics[f"loss/{prefix}"] = sums["loss"] / len(batches)
            metrics[f"{prefix}/clipfrac"] = sums["clipped"] / tokens
            metrics[f"{prefix}/grad_norm"] = sums["grad_norm"] / len(batches) / len(ranks)
            if role == "policy":
                metrics["policy/approxkl"] = sums["approx_kl"] / tokens
        return metrics

    def _start_update(self, role: Role, samples: list[TrainSample], batches: list[list[int]]) -> list[Any]:
        group = self._fleet.groups[role]
        mine: list[list[TrainSample]] = [[] for _ in range(group.ranks)]
        steps: list[list[OptimizerStep]] = [[] for _ in range(group.ranks)]
        for batch in batches:
            chosen = [samples[i] for i in batch]
            tokens = sum(len(s.response_ids) for s in chosen)
            denominator = step_denominator(self._ppo.aggregation, tokens, len(chosen))
            lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
            for rank, micros in enumerate(plan_ranks(lengths, group.ranks, self._ppo.micro_batch_tokens)):
                offset = len(mine[rank])
                mine[rank] += [chosen[i] for micro in micros for i in micro]
                numbered = [[offset + i for i in micro] for micro in _renumber(micros)]
                steps[rank].append(OptimizerStep(numbered, denominator, tokens))
        return group.submit_each("update", [(role, mine[r], steps[r]) for r in range(group.ranks)])

    def sync(self) -> Metrics:
        """Weights of `done` into all engines, acknowledged."""
        references = self._fleet.groups["policy"].submit("send_weights", self.done)
        report = self._fleet.wait(references, "the weight sync", self._ppo.weight_sync.timeout)[0]
        return {
            "sync/seconds": report.seconds,
            "sync/gb_per_s": report.bytes / 1e9 / report.seconds,
            "sync/version": float(report.version),
        }

    # -- log, checkpoint ----------------------------------------------------------------------------------------

    def _log(self, metrics: Metrics) -> None:
        with self._metrics_file.open("a") as file:
            file.write(json.dumps({"step": self.done, **metrics}) + "\n")
        self._services.metrics.log_metrics(metrics, self.done)
        self._services.progress(
            "ppo",
            self.done,
            self._ppo.steps,
            "steps",
            score=metrics["objective/scores"],
            kl=metrics["objective/kl"],
        )

    def _log_samples(
        self, rollouts: list[Rollout], prompts: list[PromptExample], experience: Experience, step: int
    ) -> None:
        rows = [
            {
                "step": step,
                "prompt": p.prompt,
                "response": self._decode(r.response_ids),
                "score": score,
                "kl": kl,
                "tokens": len(r.response_ids),
                "finished": r.finished,
            }
            for r, p, score, kl in zip(
                rollouts[:16], prompts, experience.scores_B.tolist(), experience.kl_B.tolist(), strict=False
            )
        ]
        self._services.metrics.log_table(f"samples/step_{step:06d}", rows)

    def _checkpoint(self, score: float) -> None:
        """Both engines, the KL controller and the metrics so far, as one folder. `score`: what the best are kept by."""
        folder = self._services.work / f"checkpoint-{self.done:08d}"
        saving, sizes = [], []
        for role in self._trained:
            sizes.append(self._fleet.groups[role].submit("checkpoint_bytes", role)[0])
        self._services.checkpoints.prepare(self.done, folder, sum(self._fleet.wait(sizes, "the checkpoint's size")))
        for role in self._trained:
            saving += self._fleet.groups[role].submit("save_checkpoint", role, str(folder / role))
        self._fleet.wait(saving, "the checkpoint")
        shutil.copy(self._metrics_file, folder / "metrics.jsonl")
        state = {"done": self.done, "kl": self._kl.state_dict(), "high_kl": self._high_kl}
        (folder / "controller.json").write_text(json.dumps(state))
        self._services.metrics.flush()
        self._services.checkpoints.save(self.done, folder, score)
        failpoint("ppo.after_checkpoint")

    def _restore(self) -> None:
        latest = self._services.checkpoints.latest()
        if latest is None:
            return
        _, folder = latest
        loading = []
        for role in self._trained:
            loading += self._fleet.groups[role].submit("load_checkpoint", role, str(folder / role))
        self._fleet.wait(loading, "the checkpoint to load")
        state = json.loads((folder / "controller.json").read_text())
        self.done, self._high_kl = int(state["done"]), int(state["high_kl"])
        self._kl.load_state_dict(state["kl"])
        shutil.copy(folder / "metrics.jsonl", self._metrics_file)
        log.info("ppo continues after step %d", self.done)

    def save_policy(self, folder: Path) -> None:
        """The policy in Hugging Face layout."""
        group: WorkerGroup = self._fleet.groups["policy"]
        self._fleet.wait(group.submit("save_model", "policy", str(folder)), "the policy to be saved")

    @property
    def _trained(self) -> tuple[Role, ...]:
        return ("policy", "critic")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        cpu = self._cpu_seconds
        before = cpu() if cpu is not None else 0.0
        started = time.monotonic()
        yield
        self._timing[f"timing/{name}"] = time.monotonic() - started
        if cpu is not None:
            self._timing[f"cpu/{name}"] = cpu() - before


class _Spread:
    """A call that runs on all ranks of a group; `gather` puts the results back in the order of the sequences."""

    def __init__(self, fleet: Fleet, what: str, shares: list[list[int]], references: list[Any]) -> None:
        self._fleet = fleet
        self._what = what
        self._shares = shares
        self._references = references

    def gather(self, pick: Callable[[Any], Sequence[Any]]) -> list[Any]:
        results: dict[int, Any] = {}
        for share, answer in zip(self._shares, self._fleet.wait(self._references, self._what), strict=True):
            results.update(zip(share, pick(answer), strict=True))
        return [results[i] for i in range(len(results))]


def _renumber(micros: list[list[int]]) -> list[list[int]]:
    """Indices into the concatenation of the micro-batches."""
    numbered = []
    start = 0
    for micro in micros:
        numbered.append(list(range(start, start + len(micro))))
        start += len(micro)
    return numbered


def _train_samples(rollouts: list[Rollout], experience: Experience) -> list[TrainSample]:
    def row(tensor: Any, i: int) -> Any:
        return tensor[i, : len(rollouts[i].response_ids)].numpy()

    return [
        TrainSample(
            r.prompt_ids,
            r.response_ids,
            row(experience.old_logprobs_BT, i),
            row(experience.advantages_BT, i),
            row(experience.returns_BT, i),
            row(experience.values_BT, i),
            row(experience.weights_BT, i),
        )
        for i, r in enumerate(rollouts)
    ]
