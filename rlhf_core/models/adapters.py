"""Adapters (LoRA): small trained matrices next to frozen linear layers, through PEFT.

    y = W x + alpha / r * B A x        W frozen, A (r, in) and B (out, r) trained, B zero at the start

The score head of a reward model or critic is trained in full, in addition to them. A model with its adapter
off is the one it started from, head included: no second copy of the weights is needed for a reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.config.pipeline import PipelineConfig, section_of
from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.linear import use_onednn
from rlhf_core.models.weights import refuse_non_finite
from rlhf_core.system.files import write_json

_HEAD = "score"
# Parts of names that PEFT makes. It calls the adapter `default` if it gets no other name.
_IN_LAYER = ".base_layer."
_A, _B = ".lora_A.default.", ".lora_B.default."
_TRAINED_HEAD, _FIRST_HEAD = f"{_HEAD}.modules_to_save.default.", f"{_HEAD}.original_module."


def add_adapter(model: Any, lora: LoraConfig | None) -> Any:
    """Freeze `model` (a `Policy` or `ScoreModel`) and give it an adapter, in place; None leaves it as it is.

    Seed torch first. Raises ModelError for targets that the decoder does not have as linear layers.
    """
    if lora is None:
        return model
    from peft import inject_adapter_in_model

    lm = model.lm
    lora = lora.model_copy(update={"targets": _targets(lm, lora)})
    lm.requires_grad_(False)
    # Not `get_peft_model`, whose wrapper would hide `lm.model` and `lm.lm_head`, and rename all tensors.
    inject_adapter_in_model(_peft_config(lm, lora), lm)
    model.lora = lora
    # Again, for the layers A and B that PEFT has added.
    use_onednn(lm)
    return model


def check_targets(lm: Any, config: PipelineConfig) -> None:
    """Check the targets of all adapters of a run in its base model `lm`, before anything is trained.

    The preflight knows the names in the files only. Norms have them too, and transformers joins the linear
    layers of experts to one tensor. Raises ModelError.
    """
    adapters = {section_of(stage): section.lora for stage, section in config.training_sections.items()}
    judge = config.reward.judge
    if judge is not None and judge.path is not None:
        adapters.pop("reward.judge", None)  # of another base model
    if config.ppo.enabled:
        adapters["ppo"] = config.ppo.lora
    for field, lora in adapters.items():
        if lora is not None:
            _targets(lm, lora, f"{field}.")


def _targets(lm: Any, lora: LoraConfig, section: str = "") -> tuple[str, ...]:
    linear = set()
    for name, part in lm.model.named_modules():
        if isinstance(part, nn.Linear):
            linear.add(name.rpartition(".")[2])
    wrong = sorted(set(lora.targets or ()) - linear)
    if wrong:
        raise ModelError(
            f"{section}lora.targets: {type(lm).__name__} has no linear layer {', '.join(wrong)} in its"
            f" decoder; use some of {', '.join(sorted(linear))}"
        )
    # Sorted, because the order of a set of texts differs from process to process.
    return tuple(sorted(lora.targets or linear))


def _peft_config(lm: Any, lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    # No dropout (the default of PEFT): a resumed run must be bit-identical, and the first ratio of PPO 1.
    task, whole = "CAUSAL_LM", None
    if hasattr(lm, _HEAD):
        # PEFT freezes everything else, and a score head has to be trained as a whole.
        task, whole = "SEQ_CLS", [_HEAD]
    return PeftConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets or ()),
        modules_to_save=whole,
        task_type=task,
    )


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapter of `model` in this context.

    PEFT's own switch would also unfreeze and freeze parameters, which DeepSpeed does not support.
    """
    parts = [part for part in model.modules() if hasattr(part, "_disable_adapters")]
    for part in parts:
        part._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False  # type: ignore[assignment]


class WithoutAdapter:
    """The reference of `engine` or of a bare model: the same module, called with its adapter off."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.module = getattr(engine, "module", engine)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with adapter_off(self.module):
            return self._engine(*args, **kwargs)


# -- names --


def merged_name(name: str) -> str | None:
    """Return the name of a parameter in the model without adapters, or None if it is not part of that."""
    if _A in name or _B in name or name.startswith(_FIRST_HEAD):
        return None
    return name.replace(_TRAINED_HEAD, f"{_HEAD}.").replace(_IN_LAYER, ".")


def trained_head_name(name: str) -> str | None:
    """Return the name of the trained head if `name` is the frozen one, otherwise None."""
    return name.replace(_FIRST_HEAD, _TRAINED_HEAD) if name.startswith(_FIRST_HEAD) else None


def adapter_name(name: str) -> str | None:
    """Return the name of a parameter in PEFT's file, or None if it is not part of the adapter."""
    if not (_A in name or _B in name or name.startswith(_TRAINED_HEAD)):
        return None
    name = name.replace(_TRAINED_HEAD, f"{_HEAD}.").replace(_A, ".lora_A.").replace(_B, ".lora_B.")
    return f"base_model.model.{name}"


def merged(
    tensors: Mapping[str, torch.Tensor], lora: LoraConfig | None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model without adapters, weights with the adapter added) for some parameters, by
    whole layers.

    The sum is computed in float32 and rounded once, to `dtype`, or to the data type of each tensor if it is
    None. Rounding to bfloat16 loses every change of a weight that is smaller than half of its rounding step,
    which is most of a small update.
    """
    for name, tensor in tensors.items():
        plain = merged_name(name)
        if plain is None:
            continue
        if lora is not None and name.endswith(f"{_IN_LAYER}weight"):
            layer = name.removesuffix(f"{_IN_LAYER}weight")
            b, a = tensors[f"{layer}{_B}weight"].float(), tensors[f"{layer}{_A}weight"].float()
            total = torch.addmm(tensor.float(), b, a, alpha=lora.alpha / lora.r)
            yield plain, total.to(dtype or tensor.dtype)
        else:
            yield plain, tensor.to(dtype or tensor.dtype)


# -- files --


def save_adapter(
    folder: Path,
    lm: Any,
    lora: LoraConfig,
    tensors: dict[str, torch.Tensor],
    base: str,
    revision: str | None = None,
) -> None:
    """Save an adapter as PEFT does, without its model card. The same weights give the same bytes.

    Args:
        folder: Destination.
        lm: Language model with the adapter.
        lora: Its settings.
        tensors: Weights of the adapter, by `adapter_name`.
        base: Path or hub id of the base model.
        revision: Revision of the base model on the hub.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        # safetensors refuses tensors that are not contiguous.
        {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
        folder / SAFETENSORS_WEIGHTS_NAME,
        metadata={"format": "pt"},
    )
    write_json(folder / "adapter_config.json", adapter_config(lm, lora, base, revision))


def load_adapter(model: Any, folder: Path) -> Any:
    """Load the adapter in `folder` into `model` (a `Policy`), in place. This is the inverse of
    `save_adapter`.

    Raises ModelError if the files do not match the model or contain values that are not finite.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import load_file

    facts = json.loads((folder / "adapter_config.json").read_text())
    targets = tuple(facts["target_modules"])
    add_adapter(model, LoraConfig(r=facts["r"], alpha=facts["lora_alpha"], targets=targets))
    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    own = {new: parameter for name, parameter in model.lm.named_parameters() if (new := adapter_name(name))}
    # The loader of PEFT is not strict: a missing matrix would keep its initial value without an error.
    if set(own) != set(tensors):
        different = sorted(set(own) ^ set(tensors))
        raise ModelError(
            f"the adapter in {folder} does not belong to its model: {different[0]} is in only one of them"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    refuse_non_finite(folder, model.lm)
    return model


def adapter_config(
    lm: Any, lora: LoraConfig, base: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    config = _peft_config(lm, lora)
    # `save_pretrained` of PEFT writes `inference_mode` true as well, whatever it was in training.
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    content = dict(sorted(config.to_dict().items()))
    for name, value in content.items():
        if isinstance(value, set):
            content[name] = sorted(value)  # PEFT keeps the targets in a set, which has no order
    return content
