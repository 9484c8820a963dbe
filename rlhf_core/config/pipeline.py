"""`PipelineConfig`: one YAML file, one frozen object. No torch, ray, vllm, deepspeed or mlflow here."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import (
    Fraction,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    UserPath,
)
from rlhf_core.config.data import DataConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import RewardConfig, SFTConfig


class TimeoutsConfig(Section):
    """Seconds without progress after which a process of a stage counts as stuck. Processes that make progress
    are never stopped.

    The store has `store.retry_seconds`, and a Python reward has its own `timeout`. MLflow's client waits 10
    seconds and tries three times, which is 30 seconds in total.
    """

    start: PositiveFloat = Field(
        300.0,
        description=(
            "Seconds until a training rank or engine is ready: its imports, its model, its connections"
        ),
    )
    stall: PositiveFloat = Field(
        600.0,
        description=(
            "Seconds for one movement of a rank or engine: a pass over a micro-batch, a collective, a step of"
            " decoding, a checkpoint written"
        ),
    )
    sync: PositiveFloat = Field(120.0, description="Seconds for one weight sync")


class RunConfig(Section):
    """The run itself. Nothing here but the seed and the device changes a result."""

    name: Name = Field(
        "rlhf", description="Name of the pipeline: MLflow experiment, flow run names, log folders"
    )
    seed: NonNegativeInt = Field(0, description="Every random choice derives from it")
    home: UserPath = Field(
        ".rlhf",
        min_length=1,
        description="Local folder for logs, scratch files and the embedded store and MLflow",
    )
    threads: NonNegativeInt = Field(
        0, description="CPU threads of a stage; 0: one per core. Changing it changes bits on the CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: CUDA where there is any")
    retries: NonNegativeInt = Field(
        2,
        description=(
            "How often in a row a stage is tried again that fails before it has made another checkpoint"
        ),
    )
    retry_delay: PositiveFloat = Field(
        5.0, description="Seconds before the first retry; doubles, five times at most"
    )
    stage_timeout: PositiveFloat = Field(
        604800.0,
        description="Seconds after which a stage is stopped, all its attempts in one command counted",
    )
    timeouts: TimeoutsConfig = Field(
        default_factory=TimeoutsConfig, description="When a process counts as stuck"
    )


class StoreConfig(Section):
    """Where artifacts and checkpoints lie."""

    url: UserPath | None = Field(
        None, min_length=1, description="A folder or `s3://bucket/prefix`; default `{run.home}/store`"
    )
    endpoint: str | None = Field(
        None, description="URL of an S3-compatible server; default AWS, or AWS_ENDPOINT_URL_S3"
    )
    keep_checkpoints: PositiveInt = Field(2, description="Newest whole checkpoints kept per stage")
    keep_best: NonNegativeInt = Field(
        1,
        description=(
            "Number of older checkpoints that are also kept because they are the best, by the reward of their"
            " own policy's responses minus `ppo.kl.coef` times their KL (PPO) or by held-out loss (SFT,"
            " reward model)"
        ),
    )
    retry_seconds: PositiveFloat = Field(
        60.0, description="How long a bucket's passing failures (5xx, timeouts, resets) are tried again"
    )
    allow_other_code: bool = Field(
        False,
        description=(
            "Continue from a checkpoint that other code or other versions wrote; else that is an error"
        ),
    )
    allow_fresh_start: bool = Field(
        False,
        description=(
            "Train a stage from its beginning where all its checkpoints are damaged; else that is an error"
        ),
    )


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = Field(
        None, description="Tracking server; default MLFLOW_TRACKING_URI, else SQLite in `run.home`"
    )
    experiment: str | None = Field(
        None,
        pattern=r"^[^\x00-\x1f\x7f]{1,250}$",
        description="Experiment; default `rlhf/{run.name}`",
    )
    system_metrics: bool = Field(True, description="Log CPU, memory and GPU use of each stage")


class TinyModel(Section):
    """A Llama from scratch, for the demo and for tests."""

    hidden_size: PositiveInt = Field(128, description="Width")
    intermediate_size: PositiveInt = Field(352, description="Width of the MLP")
    layers: PositiveInt = Field(3, description="Decoder layers")
    heads: PositiveInt = Field(
        4, description="Attention heads; vLLM on CPU needs hidden_size / heads in 32, 64, 80, 96, 112, 128"
    )
    vocab_size: PositiveInt = Field(384, description="Size of the tokenizer trained on the data, at most")
    max_positions: PositiveInt = Field(256, description="Context length")
    tie_embeddings: bool = Field(True, description="One matrix for input and output embeddings")

    @model_validator(mode="after")
    def _head_size(self) -> Self:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in (32, 64, 80, 96, 112, 128):
            raise ValueError(
                "model.tiny.hidden_size / heads must be 32, 64, 80, 96, 112 or 128 (vLLM's attention on"
                f" CPU); got {self.hidden_size} / {self.heads} = {self.hidden_size / self.heads:g}; use"
                f" heads={max(1, self.hidden_size // 32)}"
            )
        return self


class ModelConfig(Section):
    """The model that everything starts from."""

    path: UserPath | None = Field(
        None, description="Local folder or Hugging Face id; None: `tiny`, from scratch"
    )
    revision: str | None = Field(None, description="Commit of a hub model")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="Attention of the training side"
    )
    head_dtype: Literal["model", "float32"] = Field(
        "model",
        description=(
            "Precision of the policy's logits in training and in the engines, if these compute in 16 bits."
            " `float32`: the output of the language-model head is not rounded in both. `model`: the same"
            " precision as the rest of the model"
        ),
    )
    tiny: TinyModel = Field(default_factory=TinyModel, description="Shape of the model from scratch")


class EvaluateConfig(Section):
    """The policy against the SFT model on held-out prompts."""

    prompts: PositiveInt = Field(128, description="Held-out prompts; fewer if there are not so many")
    temperature: PositiveFloat | None = Field(
        None, description="Sampling temperature of both models; None: ppo.temperature"
    )
    bootstrap: PositiveInt = Field(2000, description="Resamples for the confidence intervals")
    confidence: PositiveFloat = Field(0.95, description="Level of the intervals")
    judge: Literal["auto", "gold", "reward_model", "rules"] = Field(
        "auto",
        description=(
            "The judge of a win. `auto`: the true reward if there is one, else the reward model, else the"
            " rules"
        ),
    )
    samples: PositiveInt = Field(20, description="Sample pairs in the table and report")


class RegisterConfig(Section):
    """The MLflow registry."""

    model: str | None = Field(
        None, pattern=r"^[\w.-]{1,100}$", description="Registered name; default `{run.name}-policy`"
    )
    min_win_rate: Fraction = Field(
        0.5, description="Against SFT; below this value the alias `champion` is not set"
    )
    min_prompts: NonNegativeInt = Field(
        50, description="A match or evaluation with fewer prompts does not set the alias `champion`"
    )
    alpha: PositiveFloat = Field(
        0.05,
        description=(
            "Maximum probability that any of the candidates that are not better than a champion replaces it;"
            " the k-th test has the level alpha / (k (k + 1))"
        ),
    )


class PipelineConfig(Section):
    """The whole pipeline: one YAML file."""

    run: RunConfig = Field(default_factory=RunConfig, description="Name, seed, folders, retries")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Artifacts and checkpoints")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model to start from")
    data: DataConfig = Field(default_factory=DataConfig, description="Sources, formats, lengths, split")
    sft: SFTConfig = Field(default_factory=SFTConfig, description="Supervised fine-tuning")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward model")
    ppo: PPOConfig = Field(default_factory=PPOConfig, description="PPO")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation")
    register_: RegisterConfig = Field(
        default_factory=RegisterConfig, alias="register", description="Model registry"
    )

    @property
    def store_url(self) -> str:
        return self.store.url or f"{self.run.home}/store"

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
        """Longest prompt plus longest response that PPO can meet."""
        return self.data.max_prompt_tokens + self.ppo.max_new_tokens

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.ppo.uses_reward_model and not (self.reward.enabled and self.data.preference):
            raise ValueError(
                "ppo.rewards has a source of type `model`, but there is no reward model: set"
                " reward.enabled=true and data.preference, or use rule rewards"
            )
        if self.model.path is None and self.sft.lora is not None:
            raise ValueError(
                "sft.lora adapts a pretrained model: it needs model.path; got a model from scratch, whose"
                " weights nobody has trained; leave sft.lora out (reward.lora and ppo.lora may stay)"
            )
        if self.model.path is None:
            longest = max(
                self.max_sequence_tokens, self.data.max_prompt_tokens + self.data.max_response_tokens
            )
            if longest > self.model.tiny.max_positions:
                raise ValueError(
                    f"data.max_prompt_tokens + the longest response = {longest} tokens do not fit"
                    f" model.tiny.max_positions ({self.model.tiny.max_positions}); raise it or lower"
                    " ppo.max_new_tokens"
                )
        if self.run.device == "cpu" and self.ppo.weight_sync.backend in ("nccl", "ipc"):
            raise ValueError(
                f"ppo.weight_sync.backend={self.ppo.weight_sync.backend} needs GPUs; use auto or gloo with"
                " run.device=cpu"
            )
        return self
