"""The pipeline: data, supervised fine-tuning, reward model, DPO and PPO, evaluation, registry.

`rlhf_core/pipeline.py` has a picture of it, and the artifacts that each stage reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, runtime
from pydantic import Field

from flows.notify import notify_failure, notify_result
from flows.pages import flow_run_tags, publish_name, publish_process, publish_run, show_log_lines
from flows.tasks import check_drift, run_stage
from rlhf_core.config.base import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlhf_core.config.load import DEFAULT_CONFIG, overrides_of
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, StageName
from rlhf_core.run.checks import reuse_or_check
from rlhf_core.run.pipeline_run import open_run

File = Annotated[str, Field(min_length=1)]
Override = Annotated[str, Field(pattern=r"^[^=]+=")]  # `load_config` checks the key


def run_name() -> str:
    """Return a name such as `demo-3fa2c1`: configuration and flow run. Once the contents of its data are
    known, a run of the pipeline has the name of the pipeline (`publish_name`).
    """
    return f"{Path(runtime.flow_run.parameters['config']).stem}-{str(runtime.flow_run.id)[:6]}"


@flow(
    name="rlhf",
    flow_run_name=run_name,
    # Also where PREFECT_RESULTS_PERSIST_BY_DEFAULT is set: Prefect stores results as pickles.
    persist_result=False,
    on_failure=[notify_failure],
    on_crashed=[notify_failure],
)
def rlhf(
    config: File = DEFAULT_CONFIG,
    name: Name | None = None,
    seed: NonNegativeInt | None = None,
    ppo_steps: PositiveInt | None = None,
    kl_coef: NonNegativeFloat | None = None,
    policy_learning_rate: PositiveFloat | None = None,
    overrides: tuple[Override, ...] = (),
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
) -> dict[str, Any]:
    """Run the pipeline: train, evaluate and register a policy.

    Finished stages are reused, and interrupted ones are continued.

    Args:
        config: YAML file, as the worker sees it. Everything below overrides it.
        name: Name of the pipeline: MLflow experiment, flow run names, registered model (run.name).
        seed: Seed of all random choices (run.seed).
        ppo_steps: PPO iterations (ppo.steps).
        kl_coef: Coefficient of the KL penalty, per token (ppo.kl.coef).
        policy_learning_rate: Peak learning rate of the policy in PPO (ppo.policy.learning_rate).
        overrides: Any other field, each as `section.field=value`, for example `ppo.kl.target=4`.
        start: First stage to run. The artifacts of earlier stages must exist.
        until: Last stage to run.
    """
    fields = {
        "run.name": name,
        "run.seed": seed,
        "ppo.steps": ppo_steps,
        "ppo.kl.coef": kl_coef,
        "ppo.policy.learning_rate": policy_learning_rate,
    }
    show_log_lines()
    # Before the check, which reads data and models: a command that is killed meanwhile is then marked as
    # crashed.
    publish_process()
    checked = reuse_or_check(config, overrides_of(fields, overrides), start=start, until=until)
    with open_run(checked, start, until, flow_run_tags()) as run:
        publish_name(run)
        data = run_stage(run, "data")
        check_drift(run, data)
        run_stage(run, "sft")
        run_stage(run, "reward")
        run_stage(run, "judge")
        run_stage(run, "dpo")
        run_stage(run, "ppo")
        run_stage(run, "sample")
        run_stage(run, "evaluate")
        run_stage(run, "benchmark")
        run_stage(run, "register")
        publish_run(run)
    summary = run.summary()
    notify_result(summary)
    return summary
