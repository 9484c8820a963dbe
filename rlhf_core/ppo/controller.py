"""The PPO controller: one driver, everything else is called.

    prompts -> rollout -> score -> advantages -> update -> sync -> log -> checkpoint
               engines    policy,                policy    policy
                          reference,             critic    -> engines
                          critic, reward         (both at once)

Consumes the prompts of the data artifact; produces `metrics.jsonl`, sample tables, checkpoints and, at the
end, the policy. Waits for every engine and rank as long as it moves (`rlhf_core.system.heartbeat`); a dead engine is
replaced on the way. A step's engines hold the weights of the step before: with synchronous steps the policy
version of every rollout is the number of steps done.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.algo.kl import AdaptiveKL, FixedKL
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Role
from rlhf_core.errors import NonFiniteError
from rlhf_core.ppo.experience import Experience, make_experience, shaped_scores
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.ppo.journal import RolloutJournal
from rlhf_core.ppo.rollouts import Collector, RolloutBatch
from rlhf_core.ppo.samples import FloatArray
from rlhf_core.ppo.scatter import Spread
from rlhf_core.ppo.step_checks import StepGuards
from rlhf_core.ppo.update import Updater
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, clipped_share, weighted_sum
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptAndResponse, PromptExample, SFTExample, StageContext

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
        context: StageContext,
        *,
        demonstrations: Sequence[SFTExample] = (),
        cpu_seconds: Callable[[], float] | None = None,
    ) -> None:
        """`demonstrations`: for the pretraining loss. `cpu_seconds`: CPU time of all processes so far; given,
        each phase's share is measured too.
        """
        self._ppo = ppo = config.ppo.model_copy(update={"pack": fleet.packs})
        self._fleet = fleet
        self._decode = decode
        self._context = context
        self._cpu_seconds = cpu_seconds
        seed = derive_seed(config.run.seed, "ppo")
        self._collector = Collector(ppo, fleet, prompts, decode, composer, seed)
        self._journal = RolloutJournal(context.rollout_cache or context.scratch, prompts)
        self._updater = Updater(ppo, fleet, seed, demonstrations)
        kl = self._ppo.kl
        self._kl: FixedKL | AdaptiveKL = (
            FixedKL(kl.coef) if kl.target is None else AdaptiveKL(kl.coef, kl.target, self._ppo.kl_horizon)
        )
        self._metrics_file = context.output / "metrics.jsonl"
        self._clocked: Metrics = {}
        """Of the step in hand: what clocks said. It is shown, but is no part of the artifact, whose digest
        must be the same wherever and however fast it is made.
        """
        self._scores: dict[int, float] = {}
        """Scores of the checkpoints by step. A score is known after the checkpoint's policy has sampled the
        next step.
        """
        self._guards = StepGuards(ppo, lambda: context.checkpoints.best(self._scores))
        self.done = 0
        """Steps finished: the policy version."""
        self._last: Sequence[PromptAndResponse] = []
        """Prompts and responses of the last step."""
        self._restorable = 0
        """Step that another attempt would continue after."""

    # -- the loop --

    def run(self) -> None:
        """To the last step, from the last checkpoint if there is one. Asked to stop, it leaves after the step
        in hand.
        """
        self._restore()
        self.sync()
        stop = self._context.stop
        with stop.deferred():
            while self.done < self._ppo.steps:
                metrics = self.iterate()
                self._log(metrics)
                if self.done == self._ppo.steps:
                    break
                if self.done % self._ppo.checkpoint_every == 0 or stop.asked:
                    self._checkpoint()
                if stop.asked:
                    log.info("asked to stop: leaving after step %d", self.done)
                    stop.leave()

    def iterate(self) -> Metrics:
        """One PPO step; returns its metrics."""
        started = time.monotonic()
        step = self.done + 1
        self._clocked = {}
        with self._timed("rollout"):
            batch = self.collect()
        failpoint("ppo.after_rollout")
        self._last = batch.sequences
        with self._timed("scoring"):
            experience = self.score(batch)
        failpoint("ppo.after_scoring")
        self._note_score(experience.metrics)
        update = self._train(batch, experience, step)
        failpoint("ppo.after_update")
        self.done = step
        with self._timed("sync"):
            version = self.sync()
        failpoint("ppo.after_sync")
        if step % self._ppo.samples_every == 0 or step in (1, self._ppo.steps):
            self._log_samples(batch, experience, "samples", step)
        if not batch.kept:
            tokens = sum(len(r.response_ids) for r in batch.rollouts)
            self._clocked["rollout/tokens_per_s"] = tokens / self._clocked["timing/rollout"]
        self._clocked["timing/step"] = time.monotonic() - started
        self._clocked["sync/share"] = self._clocked["timing/sync"] / self._clocked["timing/step"]
        return {
            **{name: value for name, value in experience.metrics.items() if math.isfinite(value)},
            **update,
            "sync/version": float(version),
            "ppo/skipped_steps": float(not update),
            "objective/kl_coef": self._kl.coef,
            **self._clocked,
        }

    # -- steps of the loop --

    def collect(self) -> RolloutBatch:
        """The next step's rollouts; those of an earlier attempt, if it left the same step."""
        step, resumable = self.done + 1, self.done == self._restorable
        if resumable and (kept := self._journal.read(step)) is not None:
            log.info(
                "step %d: training on the %d rollouts that an earlier attempt left", step, len(kept.rollouts)
            )
            return kept
        batch = self._collector.collect(step, self.done)
        if resumable:
            self._journal.write(step, batch)
        return batch

    def score(self, batch: RolloutBatch) -> Experience:
        """All models at once, then the rules, then experience."""
        return self._fleet.insist(lambda: self._score(batch), "the scoring")

    def _score(self, batch: RolloutBatch) -> Experience:
        fleet, ppo, sequences = self._fleet, self._ppo, batch.sequences
        old = Spread(fleet, ppo, "policy", "logprobs", sequences, ("policy",), (True,))
        ref = Spread(fleet, ppo, "reference", "logprobs", sequences, ("reference",), (False,))
        values = Spread(fleet, ppo, "critic", "values", sequences) if ppo.uses_critic else None
        if batch.rewards is None:
            scores = self._collector.start_scores(batch).gather() if "reward" in fleet.groups else None
            batch.rewards = self._collector.rewards(batch, scores)
        experience = make_experience(
            batch.rollouts,
            old_logprobs=old.gather(lambda answer: answer.logprobs),
            ref_logprobs=ref.gather(lambda answer: answer.logprobs),
            values=None if values is None else values.gather(),
            entropy=old.gather(lambda answer: answer.entropy),
            scores=batch.rewards.total,
            ppo=ppo,
            kl_coef=self._kl.coef,
        )
        experience.metrics.update(self._of_rewards(batch, batch.rewards, experience.metrics["objective/kl"]))
        return experience

    def _of_rewards(self, batch: RolloutBatch, rewards: RewardBatch, kl: float) -> Metrics:
        ppo = self._ppo
        metrics = {f"rewards/{name}": value for name, value in rewards.metrics().items()}
        clipped = clipped_share(ppo.rewards, rewards.by_source, ppo.score_clip)
        if clipped is not None:
            metrics["objective/score_clipfrac"] = clipped
        if ppo.dynamic_filtering is not None:
            metrics["rollout/replaced_prompts"] = float(batch.replaced)
            if batch.scores_before is not None:
                metrics["objective/scores_before_filtering"] = batch.scores_before
        plain = weighted_sum(
            ppo.rewards, rewards.by_source, len(batch.rollouts), ppo.score_clip, normalized=False
        )
        metrics["objective/net_score"] = (
            shaped_scores(batch.rollouts, plain, ppo).nanmean().item() - ppo.kl.coef * kl
        )
        return metrics

    def _note_score(self, metrics: Metrics) -> None:
        """Store the score of the previous checkpoint. The rollouts of a step are sampled by the policy of
        that checkpoint.
        """
        score = metrics.get("objective/net_score", math.nan)
        if self.done > 0 and self.done == self._restorable and math.isfinite(score):
            self._scores[self.done] = score

    def _train(self, batch: RolloutBatch, experience: Experience, step: int) -> Metrics:
        """Update and KL controller; {} where the step is skipped. The batch of a step with numbers that are
        not finite is kept for reading, also where it ends the run.
        """
        update: Metrics = {}
        everything = len(batch.rollouts)
        try:
            if self._guards.usable(experience.metrics, everything, step):
                self._guards.check(experience.metrics, step)
                with self._timed("training"):
                    update = self._updater.update(batch.rollouts, experience, step, self._kl.coef)
                if step > self._ppo.warmup_steps:  # before, no coefficient could move the KL
                    self._kl.update(experience.metrics["objective/kl"], everything)
        except NonFiniteError:
            self._log_samples(batch, experience, "skipped", step, everything)
            raise
        if not update or any(name.endswith("/non_finite_steps") for name in update):
            self._log_samples(batch, experience, "skipped", step, everything)
        return update

    def sync(self) -> int:
        """Weights of `done` into all engines; the version that they acknowledged."""
        report = self._fleet.sync(self.done)
        self._clocked |= {
            "sync/bytes": float(report.bytes),
            "sync/seconds": report.seconds,
            "sync/gb_per_s": report.bytes / 1e9 / report.seconds,
        }
        return report.version

    # -- log, checkpoint --

    def _log(self, metrics: Metrics) -> None:
        with self._metrics_file.open("a") as file:
            # Metrics of guards are not stored in the artifact, because their settings are not part of its
            # key.
            kept = {
                name: value
                for name, value in metrics.items()
                if name not in self._clocked
                and not name.startswith("guards/")
                and name != "rollout/logprob_gap_alarm"
            }
            file.write(json.dumps({"step": self.done, **kept}) + "\n")
        self._context.metrics.log_metrics(metrics, self.done)
        # What is not finite is not among the metrics of a step that was skipped.
        shown = {
            short: metrics[name]
            for short, name in (("score", "objective/scores"), ("kl", "objective/kl"))
            if name in metrics
        }
        self._context.progress("ppo", self.done, self._ppo.steps, "steps", **shown)

    def _log_samples(
        self, batch: RolloutBatch, experience: Experience, kind: str, step: int, most: int = 16
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
                batch.rollouts[:most],
                batch.prompts,
                experience.scores_B.tolist(),
                experience.kl_B.tolist(),
                strict=False,
            )
        ]
        self._context.metrics.log_table(f"{kind}/step_{step:06d}", rows)

    def _checkpoint(self) -> None:
        """Save policy, critic, KL controller and the metrics so far in one folder."""
        started = time.monotonic()
        folder = self._context.scratch / f"checkpoint-{self.done:08d}"
        sizes = [self._fleet.groups[role].submit("checkpoint_bytes", role)[0] for role in self._trained]
        self._context.checkpoints.prepare(
            self.done, folder, sum(self._fleet.wait(sizes, "the checkpoint's size"))
        )
        saving = []
        for role in self._trained:
            saving += self._fleet.groups[role].submit("save_checkpoint", role, str(folder / role))
        self._fleet.wait(saving, "the checkpoint")
        shutil.copy(self._metrics_file, folder / "metrics.jsonl")
        state = {
            "done": self.done,
            "kl": self._kl.state_dict(),
            "scores": {str(step): score for step, score in self._scores.items()},
            **self._guards.state_dict(),
        }
        (folder / "controller.json").write_text(json.dumps(state))
        self._context.metrics.flush()
        self._context.checkpoints.save(self.done, folder, known=self._scores)
        self._context.metrics.log_metrics({"timing/checkpoint": time.monotonic() - started}, self.done)
        self._restorable = self.done
        failpoint("ppo.after_checkpoint")

    def _restore(self) -> None:
        latest = self._context.checkpoints.latest()
        if latest is None:
            return
        _, folder = latest
        loading = []
        for role in self._trained:
            scratch = self._context.scratch / f"converted-{role}"
            loading += self._fleet.groups[role].submit(
                "load_checkpoint", role, str(folder / role), str(scratch)
            )
        self._fleet.wait(loading, "the checkpoint to load")
        state = json.loads((folder / "controller.json").read_text())
        self.done = self._restorable = int(state["done"])
        self._guards.load_state_dict(state)
        self._kl.load_state_dict(state["kl"])
        self._scores = {int(step): float(score) for step, score in state["scores"].items()}
        shutil.copy(folder / "metrics.jsonl", self._metrics_file)
        log.info("ppo continues after step %d", self.done)

    def save_policy(self, folder: Path, *, average: bool = False) -> None:
        """The policy, or the moving average of its weights, in Hugging Face layout."""
        saving = self._fleet.groups["policy"].submit("save_model", "policy", str(folder), average)
        self._fleet.wait(saving, "the policy to be saved")

    def trained_logprobs(self, count: int) -> tuple[Sequence[PromptAndResponse], list[FloatArray]]:
        """Return the first responses of the last step and their log-probabilities with the current weights,
        (T,) each.
        """
        sequences = self._last[:count]
        answers = Spread(self._fleet, self._ppo, "policy", "logprobs", sequences, ("policy",), (False,))
        return sequences, answers.gather(lambda answer: answer.logprobs)

    def save_adapter(self, folder: Path, base: str) -> None:
        """The policy's adapter; `base` names the model it belongs to."""
        saving = self._fleet.groups["policy"].submit("save_adapter", "policy", str(folder), base)
        self._fleet.wait(saving, "the adapter to be saved")

    @property
    def _trained(self) -> tuple[Role, ...]:
        return ("policy", "critic") if self._ppo.uses_critic else ("policy",)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        cpu = self._cpu_seconds
        before = cpu() if cpu is not None else 0.0
        started = time.monotonic()
        yield
        self._clocked[f"timing/{name}"] = time.monotonic() - started
        if cpu is not None:
            self._clocked[f"cpu/{name}"] = cpu() - before
