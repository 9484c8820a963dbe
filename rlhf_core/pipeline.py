"""The stages of the pipeline and what each of them reads: the DAG, stated once.

    data ──> sft ──> reward ──> (judge) ──> (dpo) ──> ppo ──> (sample) ──> evaluate ──> (benchmark)
         ──> register

Those in brackets are off by default; `reward` and `ppo` can be switched off. A stage reads the artifacts of
all stages in its `inputs`. To add a stage, write `rlhf_core/stages/<name>.py` with
`run(config, context) -> StageResult`, add a row here, and call it in `flows/rlhf.py`.

This module imports nothing heavy: the command line and the configuration use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from rlhf_core.errors import InputError

# Written out, because a type checker reads literals only. The names and their order are those of `_TABLE`.
StageName = Literal[
    "data", "sft", "reward", "judge", "dpo", "ppo", "sample", "evaluate", "benchmark", "register"
]  # fmt: skip
PolicyStage = Literal["ppo", "dpo"]
"""The stages whose policy can be registered."""
POLICIES: tuple[PolicyStage, ...] = get_args(PolicyStage)
EndOfRound = Literal["sample", "evaluate", "register"]
"""The stages that can be the last one of a round (`rlhf rounds`)."""
END_OF_ROUND: EndOfRound = "register"
"""The default."""


class MemoryField(NamedTuple):
    """A configuration field that reduces the memory of a stage if it is lowered."""

    name: str
    device: Literal["GPU", "CPU"] | None = None
    """The only device that it applies to; None: both."""


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    name: StageName
    function: str
    """`module:function` of `run(config, context) -> StageResult`. It is imported in the stage's own process,
    because it loads torch, Ray and vLLM.
    """
    version: int
    """Version of the stage's code, part of its key. Raise it when the same configuration gives another
    result.
    """
    sections: tuple[str, ...]
    """Sections of the configuration that affect its result, such as `reward` or `reward.judge`. The first one
    is logged as parameters of its MLflow run.
    """
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The only fields of a section, or of a part of one, that affect its result; by their names."""
    inputs: tuple[StageName, ...] = ()
    """Stages whose artifacts it reads, if they are enabled."""
    sources: tuple[str, ...] = ()
    """External inputs that it reads, as prefixes of the names in
    `rlhf_core.run.external_inputs.external_digests`. The stage compares them with the digests of the run.
    """
    sources_of_inputs: tuple[str, ...] = ()
    """Prefixes of `sources` that are not part of the stage's key, because the key of an input artifact
    already contains them.
    """
    labelling: tuple[str, ...] = ()
    """Further `sections`, which are also prefixes of `sources`, that it reads if a language model labels
    answers (`sample.judge`).
    """
    policy_field: str | None = None
    """Configuration field that names the stage whose policy it uses. Of the stages in `inputs` that train a
    policy, it reads this one only.
    """
    enabled_by: str | None = None
    """Configuration field that switches the stage on; None if every pipeline has it."""
    always_in_key: bool = False
    """Whether the key of a pipeline contains the stage and its section also where it is not enabled. False
    for new stages, so that the keys of existing configurations stay the same.
    """
    data_context: Literal["training", "evaluation"] = "training"
    """How the stage uses the data, for MLflow."""
    headline: tuple[str, ...] = ()
    """Metrics that are shown on one line, the most important first."""
    findings: str | None = None
    """`module:constant` with the `types.Findings` of the stage: what is shown at the end of a run. The
    module must import quickly. None: the headline only.
    """
    report: str | None = None
    """File of its artifact that people read."""
    registers: bool = False
    """Whether it makes a version in the model registry. Without this version it runs again."""
    memory_fields: tuple[MemoryField, ...] = ()
    """Configuration fields that reduce its memory if they are lowered."""
    imports: tuple[str, ...] = ()
    """Modules that its function imports when it runs. A process that waits for the inputs of the stage
    imports them before.
    """
    unused: tuple[str, ...] = ("sklearn",)
    """Packages that its process does not find, because it does not use them. transformers imports
    scikit-learn for assisted generation, in a fifth of the CPU time of a training stage's imports.
    """
    loads_model: bool = False
    """Whether its own process loads a model."""
    samples: bool = False
    """Whether its own process samples with vLLM."""

    preparation: str | None = None
    """`module:function` that is called with the configuration in a process that waits for the inputs of the
    stage, after its imports.
    """

    @property
    def uses_engines(self) -> bool:
        """Whether vLLM samples for it, in its own process or in others that it starts."""
        return self.samples or not set(_ENGINE_MEMORY).isdisjoint(self.memory_fields)

    def load(self) -> Any:
        """Import and return the stage's function."""
        return _load(self.function)

    def load_findings(self) -> Any:
        """Import and return `findings`; None if there are none."""
        return None if self.findings is None else _load(self.findings)

    def prepare(self, config: Any) -> None:
        """Call `preparation`, if there is one."""
        if self.preparation is not None:
            _load(self.preparation)(config)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_ENGINE_MEMORY = (
    MemoryField("ppo.engine.max_num_seqs"),
    MemoryField("ppo.engine.gpu_memory_utilization", device="GPU"),
    MemoryField("ppo.engine.kv_cache_gib", device="CPU"),
)

_TRAINING = ("deepspeed", "pyarrow.parquet", "rlhf_core.cluster.ranks")
_SCORING = ("rlhf_core.models.policy", "rlhf_core.models.score", "rlhf_core.models.scoring")
_PLOTS = ("rlhf_core.evaluation.plots",)

_JUDGE_FRACTION = {"reward.judge": ("fraction",)}
"""`fields` of stages that train on the pairs that the stage `judge` leaves: only their share affects them."""

# A table and no decorators on the stages: those would be known only after torch is imported (decision 22).
_TABLE = (
    Stage(
        "data",
        "rlhf_core.stages.data:run",
        version=8,
        sections=("data", "model"),
        sources=("model", "data."),
        headline=("data/sft_train", "data/pairs_train", "data/prompts_train", "data/prompts_eval"),
    ),
    Stage(
        "sft",
        "rlhf_core.stages.sft:run",
        version=6,
        sections=("sft", "model"),
        inputs=("data",),
        # The tokenizer of the data artifact comes from the model, but its weights are read here.
        sources=("model",),
        headline=("eval_loss", "perplexity", "tokens_per_s"),
        memory_fields=(MemoryField("sft.micro_batch_tokens"),),
        imports=(*_TRAINING, "rlhf_core.evaluation.generate"),
        loads_model=True,
    ),
    Stage(
        "reward",
        "rlhf_core.stages.reward:run",
        version=7,
        sections=("reward", "model"),
        fields=_JUDGE_FRACTION,
        inputs=("data", "sft"),
        enabled_by="reward.enabled",
        always_in_key=True,
        headline=("accuracy", "accuracy_low", "accuracy_high", "margin"),
        findings="rlhf_core.run.summary:REWARD",
        memory_fields=(MemoryField("reward.micro_batch_tokens"),),
        imports=(*_TRAINING, *_SCORING, *_PLOTS),
        loads_model=True,
    ),
    Stage(
        "judge",
        "rlhf_core.stages.reward:run_judge",
        version=2,
        sections=("reward", "model"),
        inputs=("data", "sft"),
        sources=("reward.judge.",),
        enabled_by="reward.judge",
        headline=("accuracy", "accuracy_low", "accuracy_high", "margin"),
        memory_fields=(MemoryField("reward.micro_batch_tokens"),),
        imports=(*_TRAINING, *_SCORING, *_PLOTS),
        loads_model=True,
    ),
    Stage(
        "dpo",
        "rlhf_core.stages.dpo:run",
        version=2,
        # `reward.judge`, because the pairs of the judge train no policy.
        sections=("dpo", "model", "reward.judge"),
        fields=_JUDGE_FRACTION,
        inputs=("data", "sft"),
        enabled_by="dpo.enabled",
        headline=("accuracy", "accuracy_low", "accuracy_high", "margin"),
        findings="rlhf_core.run.summary:DPO",
        memory_fields=(MemoryField("dpo.micro_batch_tokens"),),
        imports=_TRAINING,
        loads_model=True,
    ),
    Stage(
        "ppo",
        "rlhf_core.stages.ppo:run",
        version=20,
        sections=("ppo", "model"),
        inputs=("data", "sft", "reward", "judge"),
        sources=("ppo.",),
        enabled_by="ppo.enabled",
        always_in_key=True,
        headline=("scores", "kl", "policy/entropy", "rollout/length"),
        memory_fields=(MemoryField("ppo.micro_batch_tokens"), *_ENGINE_MEMORY),
        # Ranks and engines are actors with imports of their own. This process loads no model.
        imports=("pyarrow.parquet", "ray"),
        # On CPUs, starting Ray is a quarter of the time until all models of PPO are loaded (decision 28).
        preparation="rlhf_core.cluster.connect:start_ray",
    ),
    Stage(
        "sample",
        "rlhf_core.stages.sample:run",
        version=4,
        sections=("sample", "ppo"),
        inputs=("data", "sft", "reward", "judge", "dpo", "ppo"),
        policy_field="sample.policy",
        sources=("ppo.",),
        sources_of_inputs=("ppo.",),
        labelling=("evaluate.language_model",),
        enabled_by="sample",
        headline=("pairs", "best", "score_mean", "score_best"),
        findings="rlhf_core.run.summary:SAMPLE",
        memory_fields=(MemoryField("ppo.micro_batch_tokens"), *_ENGINE_MEMORY),
        imports=("pyarrow.parquet", *_SCORING),
        loads_model=True,
        samples=True,
    ),
    Stage(
        "evaluate",
        "rlhf_core.stages.evaluate:run",
        version=19,
        # `ppo` has engines, temperature and rewards of the evaluation, also without PPO (decision 41).
        sections=("evaluate", "ppo"),
        inputs=("data", "sft", "reward", "judge", "dpo", "ppo"),
        sources=("ppo.", "evaluate."),
        sources_of_inputs=("ppo.",),
        data_context="evaluation",
        headline=(
            *("win_rate/mean", "kl", "win_rate_dpo/mean", "kl_dpo"),
            *("eos_rate/sft", "eos_rate/ppo", "eos_rate/dpo"),
        ),
        findings="rlhf_core.run.summary:EVALUATION",
        report="report.html",
        memory_fields=(MemoryField("ppo.micro_batch_tokens"), *_ENGINE_MEMORY),
        imports=("pyarrow.parquet", *_SCORING),
        loads_model=True,
        samples=True,
    ),
    Stage(
        "benchmark",
        "rlhf_core.stages.benchmark:run",
        version=1,
        sections=("benchmark", "ppo"),
        inputs=("data", "sft", "dpo", "ppo"),
        policy_field="register.policy",
        sources=("benchmark.",),
        enabled_by="benchmark",
        data_context="evaluation",
        findings="rlhf_core.stages.benchmark:FINDINGS",
        memory_fields=(MemoryField("benchmark.batch_size"),),
        imports=("lm_eval.models.huggingface",),
        unused=(),
        loads_model=True,
    ),
    Stage(
        "register",
        "rlhf_core.stages.register:run",
        version=13,
        sections=("register",),
        inputs=("data", "sft", "reward", "judge", "dpo", "ppo", "sample", "evaluate"),
        policy_field="register.policy",
        sources=("ppo.", "evaluate.", "register."),
        sources_of_inputs=("ppo.", "evaluate."),
        data_context="evaluation",
        findings="rlhf_core.run.summary:REGISTRATION",
        registers=True,
        memory_fields=_ENGINE_MEMORY,
    ),
)

STAGES: dict[StageName, Stage] = {stage.name: stage for stage in _TABLE}
"""All stages by name, in the order in which they run."""
FIRST_STAGE: StageName = _TABLE[0].name
LAST_STAGE: StageName = _TABLE[-1].name
"""The stages that a whole run begins and ends with."""


def stages_between(start: StageName, until: StageName) -> tuple[StageName, ...]:
    """Return the names of the stages from `start` to `until`. Raises InputError if there are none."""
    names = tuple(STAGES)
    between = names[names.index(start) : names.index(until) + 1]
    if not between:
        raise InputError(
            f"the first stage, {start} (--from), comes after the last stage, {until} (--until); the stages"
            f" are {', '.join(names)}"
        )
    return between
