"""What the stages import, for a process that waits for the inputs of its stage.

Most of these imports are inside functions, so that errors are reported before the seconds that they take.
"""

from __future__ import annotations

import importlib

from rlhf_core.config import PipelineConfig
from rlhf_core.config.devices import runs_on_gpu
from rlhf_core.engines.vllm import import_vllm
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.tracking.tracker import open_tracking

_TRAINING = ("deepspeed", "pyarrow.parquet", "rlhf_core.cluster.ranks")
_SCORING = ("rlhf_core.models.policy", "rlhf_core.models.score", "rlhf_core.models.scoring")
_PLOTS = ("matplotlib.backends.backend_agg", "rlhf_core.evaluation.plots")
_MODULES: dict[StageName, tuple[str, ...]] = {
    "data": (),
    "sft": (*_TRAINING, "rlhf_core.evaluation.generate"),
    "reward": (*_TRAINING, *_SCORING, *_PLOTS),
    "judge": (*_TRAINING, *_SCORING, *_PLOTS),
    "dpo": _TRAINING,
    "ppo": ("pyarrow.parquet", "rlhf_core.ppo.controller", "rlhf_core.ppo.fleet", "ray"),
    "sample": ("pyarrow.parquet", *_SCORING),
    "evaluate": ("pyarrow.parquet", *_SCORING, *_PLOTS, "rlhf_core.evaluation.report"),
    "register": (),
}
_WITH_MODEL: tuple[StageName, ...] = ("sft", "reward", "judge", "dpo", "sample", "evaluate")


def import_for(stage: StageName, config: PipelineConfig) -> None:
    """Import what `stage` needs under this configuration, and open the tracker."""
    STAGES[stage].load()
    open_tracking(config).warm_up()
    tiny = config.model.path is None
    modules = list(_MODULES[stage])
    if stage in _WITH_MODEL and tiny:
        modules.append("transformers.models.llama.modeling_llama")
    for module in modules:
        importlib.import_module(module)
    if stage in ("sample", "evaluate"):
        device = "cuda" if runs_on_gpu(config) else "cpu"
        import_vllm(config.ppo.engine, device, config.model.tiny.vocab_size if tiny else None)
