"""Where the stages run, and the resources that they ask a cluster for. Part of no stage key."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, RootModel

from rlhf_core.config.base import NonNegativeInt, PositiveInt, Range, Section, UserPath, execution
from rlhf_core.pipeline import StageName

Executor = Literal["local", "ray", "kuberay", "slurm"]

_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_LABEL_FORM = "1 to 63 letters, digits, `.`, `_` and `-`"
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.,+-]{0,99}$"
_WORD_FORM = "1 to 100 letters, digits, `_`, `.`, `,`, `+` and `-`"


class StageResources(Section):
    """The resources of a stage on a cluster. A field that is not set has the value of
    `run.resources.default`.
    """

    executor: Executor | None = execution(None)
    """Where this stage runs; null: `run.executor`"""
    nodes: PositiveInt | None = execution(None, within=Range(1, 4096, "each is a machine"))
    """Nodes: worker pods of the Ray cluster (kuberay), nodes of the job (slurm). A Ray cluster that exists
    (ray) has the nodes that it has; null: 1
    """
    gpus_per_node: NonNegativeInt | None = execution(None, within=Range(0, 64, "more than a machine has"))
    """GPUs of each node (kuberay, slurm); null: none"""
    cpus_per_node: PositiveInt | None = execution(None)
    """CPU cores of each node (kuberay, slurm), or those that the stage's own process reserves besides its
    ranks and engines (ray); null: those of the template, or none
    """
    memory_per_node: str | None = execution(
        None, pattern=r"^[1-9][0-9]{0,8}(Ki|Mi|Gi|Ti)$", form="a number with Ki, Mi, Gi or Ti, such as 512Gi"
    )
    """Memory of each node (kuberay, slurm) as a number with Ki, Mi, Gi or Ti; null: that of the template"""
    queue: str | None = execution(None, pattern=_WORD, form=_WORD_FORM)
    """Queue: a LocalQueue of Kueue (kuberay) or a partition (slurm)"""
    priority: str | None = execution(None, pattern=_LABEL, form=_LABEL_FORM)
    """Priority: a WorkloadPriorityClass of Kueue (kuberay) or a QOS (slurm)"""
    account: str | None = execution(None, pattern=_WORD, form=_WORD_FORM)
    """Account that the job is charged to (slurm)"""
    namespace: str | None = execution(None, pattern=_LABEL, form=_LABEL_FORM)
    """Namespace of the Ray cluster (kuberay); null: that of the service account or of the kubeconfig"""
    image: str | None = execution(
        None, pattern=r"^[^\s\x00-\x1f\x7f]{1,255}$", form="1 to 255 characters without blanks"
    )
    """Container image of all pods (kuberay); null: that of the template"""
    template: UserPath | None = execution(None, min_length=1)
    """The RayJob (kuberay) or the batch script (slurm); null: `deployments/kubernetes/rayjob.yaml` or
    `deployments/slurm/rlhf.sbatch` below the working folder
    """
    time_limit: PositiveInt | None = execution(
        None, within=Range(60, 10**8, "a cluster needs minutes to start")
    )
    """Seconds after which the scheduler ends the job (kuberay: activeDeadlineSeconds, slurm: --time); null:
    its default
    """


class ResourcesConfig(RootModel[dict[Literal["default", StageName], StageResources]]):
    """Resources by stage: `default` for every stage, and the name of a stage that needs others."""

    model_config = ConfigDict(frozen=True, strict=True)

    def of(self, stage: StageName) -> StageResources:
        """Return the resources of `stage`: its own fields, and those of `default` that it does not set."""
        default, own = self.root.get("default"), self.root.get(stage)
        fields: dict[str, Any] = {}
        for resources in (default, own):
            if resources is not None:
                fields.update(resources.model_dump(exclude_none=True))
        return StageResources(**fields)
