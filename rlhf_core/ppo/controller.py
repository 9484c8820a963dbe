"""The PPO controller: one process that calls all others.

    prompts -> rollout -> score -> advantages -> update -> sync -> log -> checkpoint
               engines    policy,                policy    policy
                          reference,             critic    -> engines
                          critic, reward         (both at once)

Consumes the prompts of the data artifact; produces `metrics.jsonl`, the record, checkpoints and, at the end,
the policy. Waits for engines and ranks as long as they send heartbeats
(`rlhf_core.system.heartbeat`); dead engines are replaced. The steps are synchronous: the engines hold the
weights that the previous step produced, so the policy version of every rollout is the number of completed
steps.

With `ppo.staleness=n`, n at least 1, there is a sync after every n-th step, and the engines sample the n
batches between two syncs without waiting (`rlhf_core.ppo.sampling.schedule`). With n = 1 they sample
the next step during scoring and training:

    ranks    score and train step k  -> version k      | sync of version k | score and train step k + 1
    engines  sample step k + 1 from version k - 1      |                   | sample step k + 2 from version k

The sync waits for both. Steps 1 and 2 are sampled from version 0. A checkpoint of step k contains the
rollouts of step k + 1, whose weights it does not contain.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.algo.kl import AdaptiveKL, FixedKL
from rlhf_core.cluster.rpc import Pending
from rlhf_core.engines.checkpointing import new_checkpoint
from rlhf_core.errors import GateFailed, NonFiniteError, WeightSyncError
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.recording import StepRows
from rlhf_core.ppo.sampling.rollouts import Collector, Composer, read_responses, reward_metrics
from rlhf_core.ppo.sampling.schedule import rollouts_of
from rlhf_core.ppo.training.batch import FloatArray, RolloutBatch
from rlhf_core.ppo.training.experience import OwnAdvantages
from rlhf_core.ppo.update import CriticWarmup, Experience, Updater, make_experience
from rlhf_core.ppo.watching.guards import TRAINS_POLICY, check_evaluations
from rlhf_core.ppo.watching.selection import HeldOutResult, Selection
from rlhf_core.ppo.watching.step_checks import StepChecks, SyncCheck
from rlhf_core.ppo.watching.utilisation import StepsSinceSync, Utilisation, sync_metrics
from rlhf_core.record.schema import includes
from rlhf_core.record.writer import RecordWriter
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptAndResponse, PromptExample, SFTExample, StageContext, finite

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class PolicyEvaluation(Protocol):
    """Evaluates the policy version that the engines hold. Its state is part of the checkpoint."""

    def evaluate(self, version: int) -> HeldOutResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PPOController:
    """Runs the PPO loop with a started `Fleet`.

    Args:
        fleet: All other processes. It has the settings of the stage.
        prompts: All prompts of the training split.
        decode: Converts token ids of a response to text.
        composer: Combines the sources of rewards.
        context: Context of the stage.
        demonstrations: Demonstrations for the pretraining loss.
        evaluation: Evaluates the policy every `ppo.evaluate_every` steps.
        own_advantages: The user's advantages; None for those of the algorithm.
        record: Records the rollouts; None if they are not recorded.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: Composer,
        context: StageContext,
        *,
        demonstrations: Sequence[SFTExample] = (),
        evaluation: PolicyEvaluation | None = None,
        own_advantages: OwnAdvantages | None = None,
        record: RecordWriter | None = None,
    ) -> None:
        settings = fleet.settings
        # `auto` in the configuration counts as padded. The plans of the update must have the layout that the
        # ranks have chosen.
        self._ppo = ppo = settings.ppo.model_copy(update={"pack": fleet.packs})
        self._fleet = fleet
        self._decode = decode
        self._context = context
        self._own_advantages = own_advantages
        self._record = record
        seed = derive_seed(settings.run.seed, "ppo")
        self._collector = Collector(ppo, fleet, prompts, decode, composer, seed)
        self._rollouts = rollouts_of(ppo, fleet, prompts, self._collector)
        self._sync_check: SyncCheck | None = None
        # Without staleness every step compares its own rollouts (`StepChecks._check_gap`).
        if ppo.staleness and ppo.weight_sync.canary:
            self._sync_check = SyncCheck(ppo, fleet, prompts, decode, composer, seed)
        self._updater = Updater(ppo, fleet, seed, demonstrations)
        self._warmup = CriticWarmup(ppo)
        self._kl: FixedKL | AdaptiveKL
        if ppo.kl.target is None:
            self._kl = FixedKL(ppo.kl.coef)
        else:
            self._kl = AdaptiveKL(ppo.kl.coef, ppo.kl.target, ppo.kl_horizon)
        self._metrics_file = context.output / "metrics.jsonl"
        self._timings: Metrics = {}
        """Metrics of the current step that are logged, but are not part of the artifact. They depend on the
        speed of the machine, or on settings that are not part of the stage's key. The digest of the artifact
        must not.
        """
        self._evaluation = evaluation
        self.selection = Selection(ppo)
        """The evaluations so far, and the best version."""
        self._checks = StepChecks(ppo)
        self._utilisation = Utilisation(settings, fleet)
        self._steps_since_sync = StepsSinceSync()
        self._weights: str | None = None
        """Digest of the weights that the engines got last."""
        self._checkpoint_seconds = 0.0
        """Duration of the last checkpoint, in seconds."""
        self._last_batch: RolloutBatch | None = None
        """The batch of the last step."""
        self.completed_steps = 0
        """This is also the policy version."""

    # -- the loop --

    def run(self) -> None:
        """Run all steps, from the last checkpoint if there is one. A stop request takes effect after the
        current step.
        """
        self._restore()
        # The engines have loaded the SFT model, also if the policy continues from a checkpoint.
        self.sync()
        self._compare_engines()
        stop = self._context.stop
        # Not before: an attempt that has made no step has nothing to save, and ends at once.
        stop.defer()
        self._evaluate()
        while not self._is_finished():
            metrics = self.iterate()
            self._log(metrics)
            # Before the checkpoint: it has the weights of this version if it is the best.
            self._evaluate()
            # A policy with an adapter is saved first: `trained_logprobs` needs a step of this attempt.
            if self._is_finished() and (not stop.requested or self._ppo.lora is not None):
                break
            if self.completed_steps % self._ppo.checkpoint_interval == 0 or stop.requested:
                self._checkpoint()
            if stop.requested:
                log.info("asked to stop: leaving after step %d", self.completed_steps)
                stop.exit()

    def _is_finished(self) -> bool:
        return self.completed_steps >= self._ppo.steps or self.selection.is_finished

    def _evaluate(self) -> None:
        """Evaluate the present version if this is due, and keep its weights if it is the best so far."""
        version = self.completed_steps
        if self._evaluation is None or not self.selection.is_due(version):
            return
        # Between two syncs the engines have an older version. No request may be alive during a sync.
        if version % self._ppo.sync_every:
            self._rollouts.finish()
            self.sync()
        started = time.monotonic()
        found = self._evaluation.evaluate(version)
        failpoint("ppo.after_evaluation")
        if self._ppo.engine.sleep_level:  # the engines sleep without weights
            self.sync()
        elif self._ppo.engine.prefix_caching:
            # An attempt that continues from the checkpoint of this version does not repeat the evaluation.
            self._fleet.forget_prefixes("the held-out prompts")
        # Before the next step, which changes these weights.
        if self.selection.add(version, found) and self._ppo.publish == "best":
            self._fleet.wait(self._fleet.groups["policy"].call(ModelWorker.snapshot_best), "the best weights")
        self._utilisation.begin()
        self._steps_since_sync = StepsSinceSync(engines_waited=version % self._ppo.sync_every > 0)
        metrics = {"timing/evaluation": time.monotonic() - started, **self.selection.evaluations[version]}
        failure = check_evaluations(self._ppo, self.selection.evaluations, metrics)
        # Before the error, so that the curves contain the evaluation that ends the run.
        self._context.metrics.log_metrics(metrics, version)
        if failure:
            raise GateFailed(f"{failure}; ppo.guards is set to stop, which ends the run")

    def iterate(self) -> Metrics:
        """Make one PPO step and return its metrics."""
        started = time.monotonic()
        step = self.completed_steps + 1
        self._timings = {}
        with self._timed("rollout"):
            batch = self.collect()
        failpoint("ppo.after_rollout")
        self._last_batch = batch
        # Before the scoring, so that the engines sample during scoring and training.
        self._rollouts.start(self.completed_steps)
        with self._timed("scoring"):
            experience = self.score(batch)
        failpoint("ppo.after_scoring")
        update = self._train(batch, experience, step)
        failpoint("ppo.after_update")
        # After the update: fetching the columns would delay it, and the level `all` has the log-probabilities
        # of the new weights.
        if self._record is not None and not self._record.is_full:
            self._record_step(self._record, batch, experience, step, trained=bool(update))
        self.completed_steps = step
        sync_is_due = step % self._ppo.sync_every == 0
        if sync_is_due:
            self._sync_after_step()
        if step % self._ppo.samples_every == 0 or step in (1, self._ppo.steps):
            self._log_samples(batch, experience, "samples", step)
        # With staleness, `timing/rollout` is only what is left of the sampling when the step needs its batch.
        if not self._ppo.staleness:
            tokens = int(batch.lengths_B.sum())
            self._timings["rollout/tokens_per_s"] = tokens / self._timings["timing/rollout"]
        self._timings["timing/step"] = time.monotonic() - started
        self._steps_since_sync.add(batch, self._timings)
        if sync_is_due:
            self._timings |= self._utilisation_since_sync()
        return {
            TRAINS_POLICY: 0.0,  # of a skipped step
            **finite(experience.metrics),
            **update,
            **({"sync/version": float(step)} if sync_is_due else {}),
            "ppo/skipped_steps": float(not update),
            "objective/kl_coef": self._kl.coef,  # adapted by `_train`: that of the next step
            **self._timings,
        }

    def _sync_after_step(self) -> None:
        # After the training: with filtering, the reward ranks get the next batch here, and a rank keeps one.
        if self._rollouts.is_unfinished:
            with self._timed("rollout"):
                self._rollouts.finish()
            failpoint("ppo.after_next_rollout")
        with self._timed("sync"):
            self.sync()
        failpoint("ppo.after_sync")
        self._compare_engines()

    def _utilisation_since_sync(self) -> Metrics:
        """Return how busy the processes were since the last sync. To be called when no process works.

        Returns {} if the engines waited for an evaluation or a checkpoint in between.
        """
        steps, self._steps_since_sync = self._steps_since_sync, StepsSinceSync()
        if steps.engines_waited:
            self._utilisation.begin()
            return {}
        seconds = steps.timings["timing/step"]
        # Seconds from one checkpoint to the next, at the present duration of a step.
        every = self._ppo.checkpoint_interval * seconds / len(steps.batches)
        # The first one was sampled before the last sync.
        sampled = [*steps.batches[1:], *self._rollouts.finished] if self._ppo.staleness else steps.batches
        return {
            "sync/share": steps.timings["timing/sync"] / seconds,
            "utilisation/checkpoint": self._checkpoint_seconds / (self._checkpoint_seconds + every),
            **self._utilisation.measure(steps, sampled),
        }

    # -- steps of the loop --

    def collect(self) -> RolloutBatch:
        """Return the rollouts of the next step.

        An earlier attempt may have sampled them, and with `ppo.staleness` the engines have during the step
        before.

        Raises:
            WeightSyncError: They are of a policy version that `ppo.staleness` does not allow.
        """
        batch = self._rollouts.take(self.completed_steps + 1)
        behind = self.completed_steps - batch.version
        if not 0 <= behind <= self._ppo.staleness:
            raise WeightSyncError(
                f"step {self.completed_steps + 1} was sampled from policy version {batch.version}, {behind}"
                f" behind; ppo.staleness={self._ppo.staleness} is the limit"
            )
        return batch

    def score(self, batch: RolloutBatch) -> Experience:
        """Compute rewards, log-probabilities and values of the batch, and the experience from them."""
        fleet, ppo = self._fleet, self._ppo
        # All models work at the same time: each call is started before the first one is waited for.
        old = fleet.logprobs("policy", batch, with_entropy=True)
        ref = fleet.logprobs("reference", batch, with_entropy=False)
        values = fleet.values(batch) if ppo.uses_critic else None
        if batch.rewards is None:  # with filtering they are known
            scores = fleet.scores(batch).gather() if "reward" in fleet.groups else None
            with self._timed("rewards"):
                batch.rewards = self._collector.rewards(batch, scores)
        for call in (old, ref, values):
            if call is not None:
                call.complete()
        experience = make_experience(
            fleet,
            batch,
            old=old,
            ref=ref,
            values=values,
            scores=batch.rewards.total,
            ppo=ppo,
            kl_coef=self._kl.coef,
            own_advantages=self._own_advantages,
            keep_advantages=self._record is not None
            and not self._record.is_full
            and includes(self._record.level, "all"),
        )
        if ppo.staleness:
            experience.metrics["rollout/staleness"] = float(self.completed_steps - batch.version)
        kl = experience.metrics["objective/kl"]
        experience.metrics.update(reward_metrics(ppo, batch, batch.rewards, kl))
        return experience

    def _train(self, batch: RolloutBatch, experience: Experience, step: int) -> Metrics:
        """Update the models and the KL controller, and return the metrics; {} if the step is skipped.

        If numbers are not finite, the batch is logged as a table, also where this ends the run.
        """
        update: Metrics = {}
        responses = len(batch)
        try:
            if self._checks.is_finite(experience.metrics, responses, step):
                trains_policy = self._warmup.is_over(experience.metrics, step)
                # Before `verify`: the guard of the critic does not count steps of its warm-up.
                experience.metrics[TRAINS_POLICY] = float(trains_policy)
                self._checks.verify(experience.metrics, step)
                with self._timed("training"):
                    update = self._updater.update(
                        batch, experience, step, self._kl.coef, trains_policy=trains_policy
                    )
                if trains_policy:  # before, the policy and its KL do not change
                    self._kl.update(experience.metrics["objective/kl"], responses)
        except NonFiniteError:
            self._log_samples(batch, experience, "skipped", step, responses)
            raise
        if not update or any(name.endswith("/non_finite_steps") for name in update):
            self._log_samples(batch, experience, "skipped", step, responses)
        return update

    def sync(self) -> int:
        """Send the weights to all engines and return the version that they acknowledged."""
        report = self._fleet.sync(self.completed_steps)
        self._timings |= sync_metrics(report)
        self._weights = report.checksum
        return report.version

    def _compare_engines(self) -> None:
        """With `ppo.staleness`, compare the engines with the policy, which have the same version now."""
        syncs = self.completed_steps // self._ppo.sync_every
        if self._sync_check is None or not self._sync_check.is_due(syncs):
            return
        with self._timed("canary"):
            gap = self._sync_check.gap(self.completed_steps)
        far = self._checks.compare(gap, self.completed_steps)
        self._timings |= {"sync/logprob_gap": gap, "warnings/engine_gap": float(far)}

    # -- log, checkpoint --

    def _log(self, metrics: Metrics) -> None:
        unstored = {*self._timings, "rollout/logprob_gap_alarm", TRAINS_POLICY}
        # Closed after each step: `_checkpoint` copies the file, and the copy must have the line of this step.
        with self._metrics_file.open("a") as file:
            # Metrics of guards are not stored in the artifact, because their settings are not part of its
            # key. Whether the policy was trained can be seen there from `loss/policy`.
            kept: dict[str, float] = {"step": self.completed_steps}
            for name, value in metrics.items():
                if name not in unstored and not name.startswith("warnings/"):
                    kept[name] = value
            file.write(json.dumps(kept) + "\n")
        self._context.metrics.log_metrics(metrics, self.completed_steps)
        shown = {}
        for short_name, name in (("score", "objective/scores"), ("kl", "objective/kl")):
            if name in metrics:  # a skipped step has no metrics that are not finite
                shown[short_name] = metrics[name]
        self._context.progress("ppo", self.completed_steps, self._ppo.steps, "steps", **shown)

    def _record_step(
        self, record: RecordWriter, batch: RolloutBatch, experience: Experience, step: int, *, trained: bool
    ) -> None:
        with self._timed("record"):
            rows = StepRows(self._fleet, self._ppo, step, self._weights)
            record.add(step, rows.table(batch, experience, record.level, trained=trained))

    def _log_samples(
        self, batch: RolloutBatch, experience: Experience, kind: str, step: int, limit: int = 16
    ) -> None:
        """Log the first `limit` responses as the table `<kind>/step_<step>`."""
        shown = range(min(limit, len(batch)))
        rows = []
        for row, (_, response_ids) in zip(shown, read_responses(self._fleet, batch, shown), strict=True):
            rows.append(
                {
                    "step": step,
                    "prompt": batch.prompts[row].prompt,
                    "response": self._decode(response_ids),
                    "score": float(experience.scores_B[row]),
                    "kl": float(experience.kl_B[row]),
                    "tokens": int(batch.lengths_B[row]),
                    "finished": bool(batch.finished_B[row]),
                }
            )
        self._context.metrics.log_table(f"{kind}/step_{step:06d}", rows)

    def _checkpoint(self) -> None:
        """Save policy, critic, KL controller and the metrics so far as one checkpoint."""
        self._rollouts.finish()
        self._steps_since_sync.engines_waited |= self.completed_steps % self._ppo.sync_every > 0
        started = time.monotonic()
        fleet, scratch, step = self._fleet, self._context.scratch, self.completed_steps
        sizes = []
        for role in self._ppo.trained_roles:
            sizes.append(fleet.groups[role].workers[0].call(ModelWorker.checkpoint_bytes, role))
        per_role = fleet.wait(sizes, "the checkpoint's size")
        size = sum(whole for whole, _ in per_role)
        unsharded = sum(part for _, part in per_role)
        # Without the record, of which a checkpoint has links.
        tokens = sum(batch.token_bytes for batch in self._rollouts.finished)
        with new_checkpoint(self._context, scratch, step, size, unsharded=unsharded, own=tokens) as folder:
            saving: list[Pending[None]] = []
            for role in self._ppo.trained_roles:
                saving += fleet.groups[role].call(ModelWorker.save_checkpoint, role, str(folder / role))
            # Between start and end of the ranks' calls, so that both write at the same time.
            self._rollouts.save(folder, step)
            fleet.wait(saving, "the checkpoint")
            shutil.copy(self._metrics_file, folder / "metrics.jsonl")
            self.save_record(folder)
            # `weights` is not restored: the sync after `_restore` computes it. `ops.first_difference` reads
            # it here.
            state = {
                "done": step,
                "weights": self._weights,
                "kl": self._kl.state_dict(),
                "record_is_full": self._record is not None and self._record.is_full,
                **self._checks.state_dict(),
                **self._warmup.state_dict(),
            }
            if self._evaluation is not None:
                state["selection"] = self.selection.state_dict()
                state["evaluation"] = self._evaluation.state_dict()
            (folder / "controller.json").write_text(json.dumps(state))
        self._checkpoint_seconds = time.monotonic() - started
        failpoint("ppo.after_checkpoint")

    def _restore(self) -> None:
        """Continue from the latest checkpoint, if there is one."""
        latest = self._context.checkpoints.latest()
        if latest is None:
            return
        _, folder = latest
        loading: list[Pending[None]] = []
        for role in self._ppo.trained_roles:
            scratch = self._context.scratch / f"converted-{role}"
            loading += self._fleet.groups[role].call(
                ModelWorker.load_checkpoint, role, str(folder / role), str(scratch)
            )
        self._fleet.wait(loading, "the checkpoint to load")
        state = json.loads((folder / "controller.json").read_text())
        self.completed_steps = int(state["done"])
        self._checks.load_state_dict(state)
        self._warmup.load_state_dict(state)
        self._kl.load_state_dict(state["kl"])
        if self._evaluation is not None:
            self.selection.load_state_dict(state["selection"])
            self._evaluation.load_state_dict(state["evaluation"])
        # The lines up to the checkpoint and no others: the steps after it are made again.
        shutil.copy(folder / "metrics.jsonl", self._metrics_file)
        self._rollouts.restore(folder, self.completed_steps)
        if self._record is not None:
            # Checkpoints of earlier versions do not say whether it is full.
            self._record.restore(folder, is_full=state.get("record_is_full", False))
        log.info("ppo continues after step %d", self.completed_steps)

    def save_record(self, folder: Path) -> None:
        """Save what was recorded as `record` in a folder, if anything was."""
        if self._record is not None:
            self._record.save(folder)

    def save_policy(self, folder: Path) -> None:
        """Save the policy in Hugging Face layout."""
        saving = self._fleet.groups["policy"].call(ModelWorker.save_model, "policy", str(folder))
        self._fleet.wait(saving, "the policy to be saved")
        self._gather(folder)

    def restore_best(self) -> int:
        """Restore the weights of the best version, and return it. Without one, those of the last step stay.

        The optimizer still has the last weights, so no step may follow.
        """
        best = self.selection.best
        if best is None:
            log.warning(
                "no evaluation has a KL of at most %g (ppo.publish_max_kl) and a finite score: the policy of"
                " the last step is published",
                self._ppo.publish_kl_limit,
            )
            return self.completed_steps
        if best != self.completed_steps:
            self._fleet.wait(self._fleet.groups["policy"].call(ModelWorker.restore_best), "the best weights")
        return best

    def restore_average(self) -> None:
        """Replace the policy's weights by their moving average.

        The optimizer still has the last weights, so no step may follow.
        """
        restoring = self._fleet.groups["policy"].call(ModelWorker.restore_average)
        self._fleet.wait(restoring, "the moving average of the weights")

    def save_adapter(self, folder: Path, base: str) -> None:
        """Save the policy's adapter. `base` names the model that it belongs to."""
        saving = self._fleet.groups["policy"].call(ModelWorker.save_adapter, "policy", str(folder), base)
        self._fleet.wait(saving, "the adapter to be saved")
        self._gather(folder)

    def _gather(self, folder: Path) -> None:
        # Rank 0 of the policy may have written the files on another host. Without `nodes` all hosts share the
        # folder.
        if self._context.nodes is not None:
            self._context.nodes.gather(folder)

    def trained_logprobs(self, count: int) -> tuple[Sequence[PromptAndResponse], list[FloatArray]]:
        """Return the first `count` responses of the last step and their log-probabilities with the current
        weights, (T,) each.
        """
        assert self._last_batch is not None, "a step has been made"
        batch = self._last_batch.first(count)
        logprobs = self._fleet.logprobs("policy", batch, with_entropy=False).gather("logprobs")
        return read_responses(self._fleet, batch, range(len(batch))), logprobs

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Measure the duration of this context, as the metric `timing/<name>`."""
        started = time.monotonic()
        # Not in `finally`: no metrics are logged of a step that raises.
        yield
        self._add_timing(f"timing/{name}", time.monotonic() - started)

    def _add_timing(self, name: str, seconds: float) -> None:
        # Added up: with `ppo.staleness`, a step waits for rollouts at two places.
        self._timings[name] = self._timings.get(name, 0.0) + seconds
