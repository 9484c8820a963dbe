"""One attempt at one stage: import what it needs, fetch and verify the inputs, run it, publish its artifact.

The artifact is published by this process and not by the flow, because this process holds the fence and the
metrics: if the flow dies, nothing is lost, and an attempt that was replaced cannot publish.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from rlhf_core.cluster.base_model import BaseModel, with_own_copies
from rlhf_core.cluster.connect import on_cluster
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.keys import changed, pipeline_name, rounding_settings, stages_made
from rlhf_core.config.pipeline import device_of
from rlhf_core.data.card import with_limits_of_data
from rlhf_core.errors import (
    InputError,
    OutOfMemory,
    RLHFError,
    StoreError,
    Superseded,
    classified,
)
from rlhf_core.executors.events import Events
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.record.reader import RECORD
from rlhf_core.storage.artifacts import ArtifactStore, Provenance, attempt_folder
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Fence, acquire, renewed
from rlhf_core.storage.inventory import ArtifactName, artifacts_named
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store, open_store
from rlhf_core.storage.versions import versions
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import delete_abandoned, held
from rlhf_core.system.heartbeat import Monitor, idle, register, unregister
from rlhf_core.system.home import make_attempt_folders, output_folder
from rlhf_core.system.processes import StopRequest
from rlhf_core.tracking.tracker import StageRun, open_tracking, origin_tags
from rlhf_core.types import ArtifactRef, Lineage, StageContext, artifact_prefix, checkpoint_prefix

log = logging.getLogger(__name__)


def run_attempt(spec: StageSpec, events: Events, stop: StopRequest | None = None) -> ArtifactRef:
    """Run the stage of `spec` and return its published artifact.

    Errors of the stage are raised. Its MLflow run is then FAILED, or KILLED if the process was asked to stop.

    Args:
        spec: The stage, its key, its inputs and the configuration.
        events: Sends events to the flow.
        stop: The request of the flow to stop; None for a new one.
    """
    store = open_store(spec.config)
    inputs = {str(ArtifactName(name, ref.key)) for name, ref in spec.inputs.items()}
    # What references of the configuration have become is read
    # as well, and `rlhf prune` keeps what a claim names.
    inputs.update(map(str, artifacts_named(spec.config.model_dump(mode="json"))))
    fence = acquire(store, spec.key, spec.stage, inputs=inputs)
    # From now on, also while inputs are fetched: other hosts take over after about 30 s without a renewal.
    with renewed(fence):
        # Another run can have made it since the flow looked for it: this process may have been in a queue, or
        # have waited for the fence.
        made = ArtifactStore(store, spec.home.cache).find(spec.stage, spec.key)
        if made is not None:
            events.send("reused")
            return made
        # Held first: what is not held, `delete_abandoned` of another process deletes.
        with held(spec.work):
            delete_abandoned(spec.home.works)
            return _run_with_fence(spec, store, fence, events, stop or StopRequest())


def _run_with_fence(
    spec: StageSpec, store: Store, fence: Fence, events: Events, stop: StopRequest
) -> ArtifactRef:
    """Run the stage in its MLflow run, while this process alone may commit. Return the artifact.

    Both are always ended: the MLflow run with the outcome of the attempt, and the folder by its deletion.
    """
    # Only with the fence: other uploads below these folders are of attempts that cannot commit any more.
    for folder in (checkpoint_prefix(spec.key), artifact_prefix(spec.stage, spec.key)):
        store.abort_multipart_uploads(folder)
    work = _fresh_work_folder(spec, fence.attempt)
    tracking = open_tracking(spec.config)
    pipeline = None
    if spec.pipeline_key:
        pipeline = spec.pipeline_key, pipeline_name(spec.config, spec.pipeline_key)
    stage_run = tracking.stage_run(
        spec.parent_run_id,
        spec.stage,
        spec.key,
        params=_params(spec),
        attempt=fence.attempt,
        tags={
            "rlhf.attempt": str(fence.attempt),
            **origin_tags(f"rlhf_core/stages/{spec.stage}.py", versions()),
        },
        inputs={str(name): ref for name, ref in spec.inputs.items()},
        pipeline=pipeline,
    )
    # From this event on, the flow ends the MLflow run if this process is killed.
    events.send("started", attempt=fence.attempt, mlflow_run_id=stage_run.run_id)
    log.info("%s %s: attempt %d", spec.stage, spec.key, fence.attempt)
    # This value stays if SystemExit, the request to stop, ends the body.
    status = "KILLED"
    failpoint("stage.started")
    try:
        stacks = spec.home.stacks(spec.stage, spec.key, fence.attempt)
        with Monitor(stacks, fail=lambda error: _abort(_advised(error, spec), monitor, events)) as monitor:
            here = _on_this_host(spec, store)
            attempt = _Attempt(here, store, fence, work, stage_run, events, stop, monitor)
            ref = attempt.run()
        stage_run.set_tags({"rlhf.artifact": ref.uri})
        status = "FINISHED"
    except Exception as error:
        status = "FAILED"
        if not isinstance(error, Superseded):
            # A later attempt removes the folder of this one. The error may be a result of that: raise
            # Superseded in its place.
            with suppress(StoreError):
                fence.check()
        if isinstance(ours := classified(error), OutOfMemory):
            raise _advised(ours, spec) from error
        raise
    finally:
        stage_run.finish(status)
        shutil.rmtree(work, ignore_errors=True)
    return ref


def _on_this_host(spec: StageSpec, store: Store) -> StageSpec:
    """Fetch the base models of a job, and return its spec with their folders on this host.

    `data` reads all files of `model.path`. For `sft`, `judge` and `ppo`, hosts with ranks fetch the weights
    (`ClusterNodes.join`). Other stages read no weights.
    """
    if not spec.base_models:
        return spec
    base = base_of(spec.config, "sft" if spec.stage == "data" else spec.stage)
    whole: set[str] = set()
    if base is not None and (spec.stage == "data" or not on_cluster()):
        whole.add(base.field)
    artifacts = ArtifactStore(store, spec.home.cache)
    return replace(spec, config=with_own_copies(spec.config, spec.base_models, artifacts, whole))


def _advised(error: RLHFError, spec: StageSpec) -> RLHFError:
    """Return `error`. For OutOfMemory, the message gets the settings to lower."""
    if not isinstance(error, OutOfMemory):
        return error
    return OutOfMemory(f"{error.message}; {_memory_advice(spec)}")


def _memory_advice(spec: StageSpec) -> str:
    settings = []
    for name, device in STAGES[spec.stage].memory_fields:
        only_on = "" if device is None else f" ({device})"
        settings.append(f"{name}{only_on}={attrgetter(name)(spec.config):g}")
    advice = f"lower {', '.join(settings)}" if settings else "give the machine more memory"
    return f"{advice}; `rlhf plan CONFIG` shows what needs how much"


def _abort(error: RLHFError, monitor: Monitor, events: Events) -> NoReturn:
    """Report `error` to the flow, kill all processes of the stage, and exit.

    The main thread may wait forever for a process that is stuck, so nothing else can be cleaned up here. The
    flow ends the MLflow run.
    """
    log.critical("%s: %s", type(error).__name__, error.message)
    # Before the kill: the flow decides by the class of this error
    # whether it tries again, and the exit code does not have it.
    events.error(error)
    monitor.kill()
    # `os._exit` runs no exit handlers, and those of logging flush the log.
    logging.shutdown()
    os._exit(error.exit_code)


@dataclass(frozen=True)
class _Attempt:
    """The resources of one attempt."""

    spec: StageSpec
    store: Store
    fence: Fence
    work: Path
    stage_run: StageRun
    events: Events
    stop: StopRequest
    monitor: Monitor

    def run(self) -> ArtifactRef:
        """Upload the artifact of an earlier attempt if one is pending, else make it."""
        spec = self.spec
        outbox = Outbox.of(self.store, spec.home.outbox)
        artifacts = ArtifactStore(self.store, spec.home.cache, outbox)
        nodes = self._nodes(artifacts) if on_cluster() else None
        checkpoints = CheckpointStore(
            self.store,
            spec.key,
            work=self.work / "checkpoints",
            store_settings=spec.config.store,
            fence=self.fence,
            outbox=outbox,
            hosts=nodes,
            settings=rounding_settings(spec.config, spec.stage),
            on_event=lambda event, step: self.events.send(event, step=step),
        )
        if nodes is not None:
            # An upload in the background needs the agents on other hosts, which `leave` ends.
            nodes.before_leave = checkpoints.finish
        ref = artifacts.upload_pending(spec.stage, spec.key, self.fence)
        if ref is None:
            with ExitStack() as failed:
                failed.callback(checkpoints.finish)
                ref = self._run_and_publish(artifacts, checkpoints, nodes)
                failed.pop_all()
        failpoint("stage.published")
        # Only now. If a kill prevents it, `PipelineRun.remove_leftovers` does it at the next reuse.
        checkpoints.clear()
        return ref

    def _nodes(self, artifacts: ArtifactStore) -> ClusterNodes:
        """Return the other hosts of the cluster, which the stage joins when it has connected to Ray."""
        spec = self.spec
        # Processes of later stages read models from artifacts.
        base_model = BaseModel.of(spec.config, spec.stage, spec.sources)
        inputs = list(spec.inputs.values())
        key = attempt_folder(spec.stage, spec.key, self.fence)
        output = StoredOutput(output_folder(self.work), self.store, key)
        nodes = ClusterNodes(spec.config, self.work, inputs, output, self.monitor, base_model, artifacts)
        nodes.lacks_base_weights = bool(spec.base_models)
        nodes.stages = stages_made(spec.config, spec.stage, spec.until)
        return nodes

    def _run_and_publish(
        self, artifacts: ArtifactStore, checkpoints: CheckpointStore, nodes: ClusterNodes | None
    ) -> ArtifactRef:
        """Run the function of the stage, and publish its output."""
        spec = self.spec
        out, scratch = make_attempt_folders(self.work)
        # On a cluster, the hosts with processes get the weights when Ray is connected (`ClusterNodes.join`).
        weights = nodes is None or artifacts.is_local
        inputs = {str(stage): artifacts.fetch(ref, weights=weights) for stage, ref in spec.inputs.items()}
        config = with_limits_of_data(spec.config, inputs)
        if nodes is not None:
            nodes.config = config
        context = StageContext(
            inputs=inputs,
            output=out,
            scratch=scratch,
            checkpoints=checkpoints,
            metrics=self.stage_run,
            progress=self.events.progress,
            lineage=Lineage(inputs=spec.inputs, parent_run_id=spec.parent_run_id),
            stop=self.stop,
            monitor=self.monitor,
            nodes=nodes,
            sources=spec.sources,
        )
        failpoint("stage.fetched")
        # Stages with ranks and actors register their own participants. This one detects a stage without them.
        register(self.monitor.folder, spec.stage, spec.config.run.timeouts.stall)
        idle()
        function = STAGES[spec.stage].load()
        output = None if nodes is None else nodes.output
        is_complete = False
        try:
            result = function(config, context)
            # From here on nothing beats: an upload that takes
            # longer than `timeouts.stall` would count as a stall.
            unregister()
            if spec.stage == "ppo" and spec.pipeline_key and (out / RECORD).is_dir():
                run = pipeline_name(spec.config, spec.pipeline_key)
                command = ["rlhf", "inspect", run, "--home", spec.config.run.home]
                self.stage_run.set_tags({"rlhf.record": shlex.join(command)})
            # Before the artifact exists: from then on the stage is reused, and logs no metrics again.
            self.stage_run.flush()
            failpoint("stage.made")
            provenance = Provenance(
                parents=spec.inputs,
                metrics=result.metrics,
                attributes={
                    **{name: str(value) for name, value in result.attributes.items()},
                    # Over all attempts: the checkpoints keep the time of those before.
                    "seconds": f"{checkpoints.seconds:.1f}",
                },
                # As it was given. The limits in `config` follow from the data, which the key contains.
                config=spec.config.model_dump(mode="json", by_alias=True),
                decided_by=spec.decided_by,
                mlflow_run_id=self.stage_run.run_id,
            )
            is_complete = True
            stored = () if output is None else output.files
            return artifacts.publish(spec.stage, spec.key, out, provenance, fence=self.fence, stored=stored)
        except Exception as error:
            # Not at a stop (SystemExit), whose time is needed for the last checkpoint. `publish` raises
            # InputError if it refuses the artifact; after other errors the outbox may have the artifact.
            if output is not None and (not is_complete or isinstance(error, InputError)):
                output.delete()
            raise


def _fresh_work_folder(spec: StageSpec, attempt: int) -> Path:
    """Return an empty scratch folder for this attempt, and remove those of killed attempts at the same
    key.
    """
    # Under the fence: an older attempt that still writes here has lost the stage key and cannot publish.
    shutil.rmtree(spec.work, ignore_errors=True)
    work = spec.work / f"attempt-{attempt:06d}"
    work.mkdir(parents=True)
    return work


def _params(spec: StageSpec) -> dict[str, Any]:
    """Return the settings of the stage that are not defaults, with flat names, for MLflow."""
    sections = [name.partition(".")[0] for name in STAGES[spec.stage].sections[:1]]
    return {"stage_key": spec.key, "seed": spec.config.run.seed, **changed(spec.config, ("model", *sections))}


# -- the process that waits for the inputs of its stage --


def import_for(stage: StageName, config: PipelineConfig) -> None:
    """Import what `stage` needs under this configuration, open the tracker, and start what needs no inputs.

    Most of these imports are inside functions, so that errors are reported before the seconds that they take.
    """
    row = STAGES[stage]
    row.load()
    open_tracking(config).warm_up()
    from_scratch = config.model.path is None
    for module in row.imports:
        importlib.import_module(module)
    if row.loads_model and from_scratch:
        # transformers imports the code of an architecture only
        # when a model is built. One from scratch is a Llama.
        importlib.import_module("transformers.models.llama.modeling_llama")
    if row.samples:
        from rlhf_core.engines.vllm import import_vllm

        import_vllm(
            config.ppo.engine, device_of(config), config.model.tiny.vocab_size if from_scratch else None
        )
    row.prepare(config)
