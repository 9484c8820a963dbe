"""`PipelineConfig`: one YAML file, one frozen object. No torch, ray, vllm, deepspeed or mlflow here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, RootModel, field_validator

from rlhf_core.config.base import (
    TOKENS,
    TRIES,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    execution,
    result,
    rounding,
)
from rlhf_core.config.data import (
    DEMO_LIMITS,
    LIMIT_FIELDS,
    SETS,
    DataConfig,
    DriftConfig,
    GivenLimits,
    Limits,
    fitted_limits,
)
from rlhf_core.config.evaluate import BenchmarkConfig, EvaluateConfig, RegisterConfig, SampleConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DPOConfig, RewardConfig, SFTConfig, TrainingSection
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.system.home import Home
from rlhf_core.system.machine import machine

Executor = Literal["local", "ray", "kuberay", "slurm"]

# The form of a label's value in Kubernetes.
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
    `deployments/slurm/rlhf.sbatch`, below the working folder or as installed
    """
    time_limit: PositiveInt | None = execution(
        None, within=Range(60, 10**8, "a cluster needs minutes to start")
    )
    """Seconds after which the scheduler ends the job (kuberay: activeDeadlineSeconds, slurm: --time); null:
    its default
    """


class ResourcesConfig(RootModel[dict[Literal["default", StageName], StageResources]]):
    """Resources by stage: `default` for every stage, and the name of a stage that needs others."""

    # Not that of `Section`: pydantic refuses `extra` for a root model.
    model_config = ConfigDict(frozen=True, strict=True)

    def of(self, stage: StageName) -> StageResources:
        """Return the resources of `stage`: its own fields, and those of `default` that it does not set."""
        default, own = self.root.get("default"), self.root.get(stage)
        fields: dict[str, Any] = {}
        for resources in (default, own):
            if resources is not None:
                fields.update(resources.model_dump(exclude_none=True))
        return StageResources(**fields)


_RANK_VARIABLES = (
    "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_ADDR_FAMILY",
    "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE",
    "NCCL_CROSS_NIC", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE",
    "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "GLOO_SOCKET_IFNAME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "HF_XET_HIGH_PERFORMANCE",
)  # fmt: skip
"""Names that `run.env` may have. Others of these libraries load code (NCCL_NET_PLUGIN) or send a token to
another address (HF_ENDPOINT).
"""
_SECONDS = Range(0.1, 1e8, "shorter times end before any work is done, longer times never end")


class TimeoutsConfig(Section):
    """Seconds without progress after which a process of a stage counts as stalled. Processes that make
    progress are never stopped.

    The store has `store.retry_seconds`, and a Python reward has its own `timeout`. MLflow's client waits 10
    seconds and tries three times, which is 30 seconds in total.
    """

    start: PositiveFloat = execution(300.0, within=_SECONDS)
    """Seconds until a training rank or engine is ready: its imports, its model, its connections"""
    stall: PositiveFloat = execution(600.0, within=_SECONDS)
    """Seconds for one operation of a rank or engine: a pass over a micro-batch, a collective, a decoding
    step, writing a checkpoint
    """
    sync: PositiveFloat = execution(120.0, within=_SECONDS)
    """Seconds for one weight sync"""


class BudgetConfig(Section):
    """What a run may use, over all its commands. At the limit it is stopped, and a larger one continues it.

    The hours are those of each stage, with its time in queues of a cluster, times its devices: GPUs, and one
    on the CPU. A stage that the run reuses counts as well, work that was lost does not.
    """

    device_hours: PositiveFloat = execution(...)
    """Limit in hours of a device"""
    price: PositiveFloat | None = execution(None)
    """Price of an hour of a device, in any currency: messages and `rlhf plan` say costs as well"""

    def spoken(self, device_hours: float) -> str:
        """Return hours with their price: `12.5 device hours (25.00)`."""
        price = "" if self.price is None else f" ({device_hours * self.price:.2f})"
        hours = f"{device_hours:.3g}" if device_hours < 100 else f"{device_hours:,.0f}"
        return f"{hours} device hours{price}"


class RunConfig(Section):
    """The run itself. Only the seed and the device change the numbers."""

    name: Name = result("rlhf", form="1 to 64 of a-z, 0-9, `.`, `_` and `-`, the first a letter or digit")
    """Name of the pipeline: MLflow experiment, flow run names, log folders"""
    seed: NonNegativeInt = result(0)
    """Seed of all random choices"""
    home: UserPath = execution(".rlhf", min_length=1)
    """Local folder for logs, scratch files and the embedded store and MLflow"""
    threads: NonNegativeInt = rounding(0, within=Range(0, 4096, "more threads than cores are slower"))
    """CPU threads of a stage; 0: one per core. Changing it changes bits on the CPU"""
    device: Literal["auto", "cpu", "cuda"] = result("auto")
    """`auto`: CUDA if a GPU is available"""
    # No total: a run of days has many failures, and would end although it makes progress (decision 10).
    retries: NonNegativeInt = execution(2, within=TRIES)
    """Retries of a stage that fails. The count starts again after each new checkpoint"""
    stage_timeout: PositiveFloat = execution(604800.0, within=Range(1, 5e8, "a stage needs seconds to start"))
    """Seconds after which a stage is stopped, over all its attempts in one command"""
    budget: BudgetConfig | None = execution(None)
    """What the whole run may use; null: no limit"""
    timeouts: TimeoutsConfig = execution(TimeoutsConfig())
    """When a process counts as stalled"""
    # NCCL_ALGO, for one, decides in which order sums are computed.
    env: dict[str, str] = rounding(
        {},
        description="Environment variables of ranks and engines on all hosts, for example"
        " {NCCL_SOCKET_IFNAME: eth0}. Allowed: " + ", ".join(_RANK_VARIABLES),
    )
    executor: Executor = execution("local")
    """Where stages run: `local`: a child process; `ray`: a job of a running Ray cluster
    (RAY_API_SERVER_ADDRESS); `kuberay`: a RayJob on Kubernetes; `slurm`: a batch job. See
    [clusters](clusters.md)
    """
    resources: ResourcesConfig = execution(ResourcesConfig({}))
    """What each stage asks a cluster for"""
    prepare_next: bool = execution(True)
    """While a stage runs, start the process of the next one and import its libraries, which needs up to 1 GiB
    of host memory; for PPO on the CPU also Ray, which needs about 370 MiB more, and 50 MiB for each core
    """

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name not in _RANK_VARIABLES:
                raise ValueError(
                    "run.env: must have names of the list in docs/configuration.md, such as NCCL_DEBUG;"
                    f" got {name[:80]!r}; set other variables, and secrets, in the environment of Ray on each"
                    " host"
                )
        return env

    @property
    def is_remote(self) -> bool:
        """Whether a stage runs on another machine."""
        return any(self.executor_of(stage) != "local" for stage in STAGES)

    def executor_of(self, stage: StageName) -> Executor:
        """Return where `stage` runs."""
        return self.resources.of(stage).executor or self.executor


class StoreConfig(Section):
    """Where artifacts and checkpoints are stored."""

    url: UserPath | None = execution(None, min_length=1)
    """A folder or `s3://bucket/prefix`; default `{run.home}/store`"""
    endpoint: str | None = execution(None)
    """URL of an S3-compatible server; default AWS, or AWS_ENDPOINT_URL_S3"""
    # Two, because the one before is used if the newest turns out to be damaged.
    keep_checkpoints: PositiveInt = execution(2)
    """Newest intact checkpoints kept per stage"""
    retry_seconds: PositiveFloat = execution(60.0)
    """Seconds for which requests to a bucket are retried after temporary errors (5xx, timeouts, resets)"""
    # Off, because the run would go on with other bits, and nobody would notice (decision 10).
    allow_other_code: bool = execution(False)
    """Continue from a checkpoint that other sources of rlhf_core wrote, or other versions of Python, torch,
    transformers, tokenizers, vLLM or DeepSpeed; by default an error
    """
    allow_fresh_start: bool = execution(False)
    """Train a stage from its beginning if all its checkpoints are damaged or gone; by default an error. An
    intact checkpoint is used in any case
    """


RecordLevel = Literal["none", "rewards", "logprobs", "all"]
"""Each level has what the ones before it have."""


class RecordConfig(Section):
    """The record of rollouts."""

    level: RecordLevel = execution("logprobs")
    """What is [recorded](record.md) of each response of PPO: `rewards` (tokens and rewards), `logprobs`
    (also log-probabilities of engine, policy and reference, and values), `all` (also advantages, returns, and
    log-probabilities after the update, for which the policy computes each batch once more) or `none`. Answers
    of `sample`, of the evaluation and of the match have the columns of `rewards`, unless it is `none`
    """
    # Not `PositiveInt`, whose limit of 10^9 would end each record at 1 GB.
    max_bytes: Annotated[int, Field(ge=1, le=10**15)] = execution(20 * 10**9)
    """Size of the record, in bytes before compression. Nothing is recorded from the step on that would exceed
    it
    """


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = result(None)
    """Tracking server; default MLFLOW_TRACKING_URI, else SQLite in `run.home`"""
    experiment: str | None = result(
        None, pattern=r"^[^\x00-\x1f\x7f]{1,250}$", form="1 to 250 characters on one line"
    )
    """Experiment; default `rlhf/{run.name}`"""
    system_metrics: bool = execution(True)
    """Log CPU, memory and GPU use of each stage"""
    also: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = execution(())
    """Copy the metrics of each stage to these as well; their package must be installed. TensorBoard's files
    are in `{run.home}/also`
    """


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM supports on the CPU. With others it loads, and fails at the first token."""


class TinyModel(Section):
    """A Llama from scratch, for the demo and for tests. Input and output embeddings are one matrix."""

    constants: ClassVar = {"tie_embeddings": True}

    hidden_size: PositiveInt = result(128, within=Range(1, 65536, "wider than any model"))
    """Width"""
    intermediate_size: PositiveInt = result(352, within=Range(1, 2**19, "wider than any model"))
    """Width of the MLP"""
    layers: PositiveInt = result(3, within=Range(1, 1024, "deeper than any model"))
    """Decoder layers"""
    heads: PositiveInt = result(
        4,
        description="Attention heads; vLLM on CPU needs hidden_size / heads in "
        + ", ".join(map(str, CPU_HEAD_SIZES)),
    )
    vocab_size: PositiveInt = result(384, within=Range(1, 2**21, "larger than any vocabulary"))
    """Size of the tokenizer trained on the data, at most"""
    max_positions: PositiveInt = result(256, within=TOKENS)
    """Context length"""

    def problems(self) -> Iterator[str]:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in CPU_HEAD_SIZES:
            yield (
                f"model.tiny.hidden_size / heads must be one of {', '.join(map(str, CPU_HEAD_SIZES))} (vLLM's"
                f" attention on CPU); got {self.hidden_size} / {self.heads} ="
                f" {self.hidden_size / self.heads:g}; use heads={max(1, self.hidden_size // 32)}"
            )


class ModelConfig(Section):
    """The base model."""

    path: UserPath | None = content(None)
    """Local folder, Hugging Face id, or a [reference](rounds.md#references) such as `champion:NAME`; null:
    `tiny`, from scratch
    """
    revision: str | None = content(None)
    """Commit of a hub model"""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = result("sdpa")
    """Attention of the training side"""
    # One setting for policy, reference and evaluation: a KL between logits of different rounding has no
    # meaning (decision 7).
    head_dtype: Literal["model", "float32"] = result("model")
    """Precision of the policy's logits in training and in the engines, if these compute in 16 bits.
    `float32`: the output of the language-model head is not rounded in both. `model`: the same precision as
    the rest of the model
    """
    tiny: TinyModel = result(TinyModel())
    """Shape of the model from scratch"""


TrainingStage = Literal["sft", "reward", "judge", "dpo"]
"""The stages that train one model."""


def section_of(stage: TrainingStage) -> str:
    """Return the section with the settings of a stage that trains one model."""
    return "reward.judge" if stage == "judge" else stage


class PipelineConfig(Section):
    """The whole pipeline: one YAML file."""

    run: RunConfig = execution(RunConfig())
    """Name, seed, folders, retries"""
    store: StoreConfig = execution(StoreConfig())
    """Artifacts and checkpoints"""
    tracking: TrackingConfig = execution(TrackingConfig())
    """MLflow"""
    record: RecordConfig = execution(RecordConfig())
    """What is kept of the rollouts"""
    model: ModelConfig = result(ModelConfig())
    """The model to start from"""
    data: DataConfig = result(DataConfig())
    """Sources, formats, lengths, split"""
    # In no key: the result depends on the present champion, which is no input of the run (decision 48).
    drift: DriftConfig | None = execution(None)
    """Compare the data with that of the champion before anything is trained; null: no comparison"""
    sft: SFTConfig = result(SFTConfig())
    """Supervised fine-tuning"""
    reward: RewardConfig = result(RewardConfig())
    """Reward model"""
    dpo: DPOConfig = result(DPOConfig())
    """DPO, next to PPO or in its place"""
    ppo: PPOConfig = result(PPOConfig())
    """PPO"""
    sample: SampleConfig | None = result(None)
    """Answers of the policy to training prompts, as data of a next round; null: none"""
    evaluate: EvaluateConfig = result(EvaluateConfig())
    """Evaluation"""
    benchmark: BenchmarkConfig | None = result(None)
    """Tasks of lm-evaluation-harness for the policy; null: none"""
    register_: RegisterConfig = result(RegisterConfig(), alias="register")
    """Model registry"""

    @property
    def store_url(self) -> str:
        return self.store.url or str(Home(Path(self.run.home)).store)

    @property
    def store_folder(self) -> Path | None:
        """The folder of a store on this machine; None for a bucket."""
        if "://" in self.store_url and not self.store_url.startswith("file://"):
            return None
        return Path(self.store_url.removeprefix("file://"))

    @property
    def training_sections(self) -> dict[TrainingStage, TrainingSection]:
        """The settings of the stages that train one model, without those of disabled stages, and without the
        judge if it has none of its own.
        """
        sections: dict[TrainingStage, TrainingSection] = {}
        if self.sft.enabled:
            sections["sft"] = self.sft
        if self.reward.enabled:
            sections["reward"] = self.reward
        judge = self.reward.judge
        if self.reward.enabled and judge is not None and (judge.path or judge.own_settings):
            sections["judge"] = self.reward.of_judge
        if self.dpo.enabled:
            sections["dpo"] = self.dpo
        return sections

    @property
    def generates_prompts(self) -> bool:
        """Whether all prompts are those of the demo's task."""
        return all(source.path == "synthetic" for source in self.data.prompts)

    @property
    def is_demo(self) -> bool:
        """Whether a model from scratch is trained on the generated task alone."""
        sources = [source.path for _, _, source in self.data.sources()]
        return self.model.path is None and all(path == "synthetic" for path in sources)

    @property
    def evaluations_choose(self) -> bool:
        """Whether evaluations during PPO decide which version of the policy is published."""
        return self.ppo.enabled and (self.ppo.publish == "best" or self.ppo.stop_patience is not None)

    @property
    def trains_on_demonstrations(self) -> bool:
        """Whether SFT or the loss `ppo.ptx` trains on `data.sft`."""
        return self.sft.enabled or (self.ppo.enabled and self.ppo.ptx is not None)

    @property
    def judge_in_ppo(self) -> bool:
        """Whether PPO loads the second reward model, which only its evaluations use."""
        return self.reward.judge is not None and self.ppo.evaluation_interval is not None

    @property
    def scores_by_reward_model(self) -> bool:
        """Whether PPO, or the stage `sample`, scores responses with the reward model."""
        labels = self.sample is not None and self.sample.judge == "reward"
        return self.ppo.uses_reward_model and (self.ppo.enabled or labels)

    @property
    def labels_by_language_model(self) -> bool:
        """Whether `evaluate.language_model` labels the answers of the stage `sample`."""
        return self.sample is not None and self.sample.judge == "language_model"

    @property
    def labels_by_people(self) -> bool:
        """Whether votes of people label the answers of the stage `sample`, after the run."""
        return self.sample is not None and self.sample.judge == "people"

    @property
    def judging_stages(self) -> tuple[Literal["sample", "evaluate"], ...]:
        """The stages that can ask `evaluate.language_model`."""
        labels: tuple[Literal["sample"], ...] = ("sample",) if self.labels_by_language_model else ()
        judges = self.evaluate.language_model and self.evaluate.judge in ("auto", "language_model")
        return (*labels, "evaluate") if judges else labels

    @property
    def experiment(self) -> str:
        return self.tracking.experiment or f"rlhf/{self.run.name}"

    @property
    def registered_model(self) -> str:
        return self.register_.model or f"{self.run.name}-policy"

    @property
    def evaluation_temperature(self) -> float:
        return self.evaluate.temperature or self.ppo.temperature

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response in PPO."""
        return self.limits.prompt + self.limits.new

    @property
    def given_limits(self) -> GivenLimits:
        """The length limits, as far as the configuration has them."""
        data = self.data
        return GivenLimits(
            data.max_prompt_tokens, data.max_response_tokens, data.max_text_tokens, self.ppo.max_new_tokens
        )

    @property
    def limits(self) -> Limits:
        """The length limits of a configuration that has all of them (`with_limits`)."""
        prompt, response, text, new = self.given_limits
        assert prompt and response and text and new, "the limits of the data artifact are missing"
        return Limits(prompt, response, text, new)

    def with_limits(self, limits: Limits) -> Self:
        """Return the configuration with these length limits."""
        return self.with_values(dict(zip(LIMIT_FIELDS, limits, strict=True)))

    def complete(self) -> None:
        """Fill the length limits of the demo, and refuse missing data of any other run.

        The sections are frozen, so they are replaced.
        """
        if self.is_demo:
            # Without a context: limits that do not fit it are refused by a rule, and not cut.
            completed = self.with_limits(fitted_limits(self.given_limits, DEMO_LIMITS, 2**31))
            object.__setattr__(self, "data", completed.data)
            object.__setattr__(self, "ppo", completed.ppo)
        else:
            self._require_data()
            missing: dict[str, Any] = {name: () for name in SETS if name not in self.data.model_fields_set}
            object.__setattr__(self, "data", self.data.with_values(missing))

    def problems(self) -> Iterator[str]:
        yield from self._of_start()
        yield from self._of_policies()
        yield from self._of_judge()
        yield from self._of_model_from_scratch()
        backend = self.ppo.weight_sync.backend
        if self.run.device == "cpu" and backend in ("nccl", "ipc"):
            yield f"ppo.weight_sync.backend={backend} needs GPUs; use auto or gloo with run.device=cpu"

    def _require_data(self) -> None:
        rows = {"prompts": "prompts (those of the pairs can be used: the same path)"}
        if self.sft.enabled:
            rows = {"sft": "demonstrations (or set sft.enabled=false)", **rows}
        if self.dpo.enabled:
            rows["preference"] = "pairs"
        elif self.reward.enabled:
            rows["preference"] = "pairs (or set reward.enabled=false)"
        # A default does not count: an own model would be trained on the demo's task by mistake.
        missing = [name for name in rows if name not in self.data.model_fields_set]
        if missing:
            fields = ", ".join(f"data.{name}" for name in missing)
            raise ValueError(
                f"{fields}: missing; only the demo, without model.path and own data, has data by default;"
                f" give {', '.join(rows[name] for name in missing)}; to train on the generated task, write"
                " path: synthetic"
            )

    def _of_start(self) -> Iterator[str]:
        if not self.sft.enabled and self.model.path is None:
            yield (
                "sft.enabled=false needs model.path: a model from scratch must be trained first; set the path"
                " of a model that follows instructions"
            )
        if self.sft.enabled and not self.data.sft:
            yield "data.sft must have a source; give demonstrations, or set sft.enabled=false"
        if not self.sft.enabled and self.sft.lora is not None:
            yield "sft.lora has no effect with sft.enabled=false; leave it out"
        if self.ppo.enabled and self.ppo.ptx is not None and not self.data.sft:
            yield "ppo.ptx needs demonstrations: give data.sft, or leave ppo.ptx out"
        for stage, section in self.training_sections.items():
            name = section_of(stage)
            if section.deepspeed.ranks > section.batch_size:
                yield (
                    f"{name}.deepspeed.ranks must be at most {name}.batch_size ({section.batch_size}); got"
                    f" {section.deepspeed.ranks}; lower it or raise the batch"
                )

    def _of_policies(self) -> Iterator[str]:
        if self.scores_by_reward_model and not (self.reward.enabled and self.data.preference):
            user = "" if self.ppo.enabled else ", which scores the answers of the stage sample (sample.judge)"
            yield (
                f"ppo.rewards has a source of type `model`{user}, but there is no reward model: set"
                " reward.enabled=true and data.preference, or use rule rewards"
            )
        if self.dpo.enabled and not self.data.preference:
            yield "dpo.enabled is true, but data.preference is empty; add pairs, or set dpo.enabled=false"
        if not (self.ppo.enabled or self.dpo.enabled):
            yield (
                "ppo.enabled and dpo.enabled are false, so no policy is trained; set dpo.enabled=true and"
                " register.policy=dpo, or leave ppo.enabled out"
            )
        named: dict[str, str] = {"register.policy": self.register_.policy}
        if self.sample is not None:
            named["sample.policy"] = self.sample.policy
        for policy, other, section in (("ppo", "dpo", self.ppo), ("dpo", "ppo", self.dpo)):
            fields = [field for field, name in named.items() if name == policy]
            if fields and not section.enabled:
                yield (
                    f"{' and '.join(fields)} must name a policy that is trained; got {policy}, but"
                    f" {policy}.enabled is false; set"
                    f" {' and '.join(f'{field}={other}' for field in fields)}, or {policy}.enabled=true"
                )

    def _of_judge(self) -> Iterator[str]:
        if self.reward.judge is not None and self.ppo.enabled and not self.ppo.uses_reward_model:
            yield (
                "reward.judge is a second model for a policy that is trained with the first; got ppo.rewards"
                " without a source of type model: leave reward.judge out, the reward model is the judge"
            )
        if self.reward.judge is not None and not self.reward.enabled:
            yield (
                "reward.judge is trained next to the reward model, but reward.enabled is false; set it to"
                " true, or leave reward.judge out"
            )

    def _of_model_from_scratch(self) -> Iterator[str]:
        if self.model.path is not None:
            return
        if self.sft.lora is not None:
            yield (
                "sft.lora adapts a pretrained model: it needs model.path; got a model from scratch, whose"
                " weights are random; leave sft.lora out (reward.lora, dpo.lora and ppo.lora may stay)"
            )
        given = self.given_limits
        # What is null follows from the data, within the context.
        longest = (given.prompt or 1) + max(given.response or 1, given.new or 1)
        if longest > self.model.tiny.max_positions:
            yield (
                f"data.max_prompt_tokens + the longest response = {longest} tokens do not fit"
                f" model.tiny.max_positions ({self.model.tiny.max_positions}); raise it or lower"
                " ppo.max_new_tokens"
            )


def uses_gpu(device: str) -> bool:
    """Return whether `auto`, `cpu` or `cuda` uses the GPUs of this machine."""
    return device == "cuda" or (device == "auto" and machine().visible_gpus() > 0)


def device_of(config: PipelineConfig) -> Literal["cpu", "cuda"]:
    """Return the kind of device of `run.device`."""
    if runs_on_gpu(config):
        return "cuda"
    return "cpu"


def runs_on_gpu(config: PipelineConfig) -> bool:
    """Return whether `run.device` uses the GPUs of this machine."""
    return uses_gpu(config.run.device)
