"""The imports of a stage, and what else it can start, for a process that waits for the inputs of its stage.

Most of these imports are inside functions, so that errors are reported before the seconds that they take.
"""

from __future__ import annotations

import importlib

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.engines.vllm import import_vllm
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.tracking.tracker import open_tracking


def import_for(stage: StageName, config: PipelineConfig) -> None:
    """Import what `stage` needs under this configuration, open the tracker, and start what needs no
    inputs.
    """
    row = STAGES[stage]
    row.load()
    open_tracking(config).warm_up()
    from_scratch = config.model.path is None
    modules = list(row.imports)
    if row.loads_model and from_scratch:
        modules.append("transformers.models.llama.modeling_llama")
    for module in modules:
        importlib.import_module(module)
    if row.samples:
        device = "cuda" if runs_on_gpu(config) else "cpu"
        import_vllm(config.ppo.engine, device, config.model.tiny.vocab_size if from_scratch else None)
    row.prepare(config)
