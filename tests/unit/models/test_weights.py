"""No weight of a loaded model is anything but what its files say.

Rules for policies and score models: tensors that are missing, misnamed, too many or of another shape
are refused by name; so are integers without scales, numbers that are not finite, an adapter next to the
weights, tied tensors with different values. What may be absent or too much is not: tied heads, a score head
that is made, the language-model head of what becomes a score model. The configured attention is used whatever
`config.json` asks for. Broken configurations end in a ModelError.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import InfrastructureError, ModelError, RLHFError
from rlhf_core.models.adapters import adapter_name, add_adapter, load_adapter, save_adapter
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from rlhf_core.models.weights import check_headers, model_errors
from tests.support.tiny_llama import save_tiny_llama

LOADING: dict[str, Any] = {"dtype": "float32", "attention": "sdpa", "device": "cpu"}
Weights = dict[str, torch.Tensor]


def change(folder: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def under_another_prefix(weights: Weights) -> None:
    for name in list(weights):
        weights[f"transformer.{name}"] = weights.pop(name)


def of_another_shape(weights: Weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 64)


def as_integers(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)


def as_float8(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)


def with_nan(weights: Weights) -> None:
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")


def with_infinity(weights: Weights) -> None:
    weights["model.embed_tokens.weight"][0, 0] = -float("inf")


WEIGHTS: dict[str, tuple[Callable[[Weights], object], str]] = {
    "one tensor is missing": (lambda w: w.pop("model.norm.weight"), r"lack model\.norm\.weight;"),
    "all have another prefix": (under_another_prefix, r"lack .*model\.embed_tokens\.weight"),
    "one has another shape": (of_another_shape, r"up_proj\.weight \[64, 64\] instead of \[128, 64\]"),
    "one is too many": (lambda w: w.update(bias=torch.zeros(2)), "has no bias, which the weights hold"),
    "integers": (as_integers, r"model\.norm\.weight \(I8\)"),
    "8-bit floats": (as_float8, r"model\.norm\.weight \(F8_E4M3\)"),
    "NaN": (with_nan, r"not finite in float32: model\.layers\.0\.mlp\.up_proj\.weight;"),
    "infinity": (with_infinity, r"not finite in float32: model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize("load", [load_policy, load_score_model])
@pytest.mark.parametrize(("edit", "says"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_not_the_models_are_refused(
    load: Any, edit: Callable[[Weights], object], says: str, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=says):
        load(tmp_path, **LOADING)


@pytest.mark.parametrize(("edit", "says"), WEIGHTS.values(), ids=WEIGHTS)
def test_headers_alone_show_what_does_not_fit(
    edit: Callable[[Weights], object], says: str, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path)
    check_headers(tmp_path, attention="sdpa")
    change(tmp_path, edit)
    if "finite" in says:
        check_headers(tmp_path, attention="sdpa")  # numbers are read by the load
        return
    with pytest.raises(ModelError, match=says):
        check_headers(tmp_path, attention="sdpa")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has no model\.layers\.1\."),
        ({"vocab_size": 100}, r"\[101, 64\] instead of \[100, 64\]"),
        ({"hidden_act": "os.system"}, "cannot load"),
        ({"rope_theta": "x", "rope_parameters": {"rope_theta": "x", "rope_type": "default"}}, "cannot load"),
        ({"pad_token_id": 99999}, "cannot load"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vocab_size": 101.5}, "vocab_size"),
        ({"hidden_size": -64}, "cannot load"),
        ({"num_attention_heads": 0}, "cannot load"),
        ({"model_type": "nothing"}, "nothing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_a_model_error(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    configure(save_tiny_llama(tmp_path), **changes)
    with pytest.raises(ModelError, match=says):
        load_policy(tmp_path, **LOADING)


def _system(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        *(
            (_system(number), InfrastructureError)
            for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
        ),
        (_system(errno.ETIMEDOUT), InfrastructureError),
        (_system(errno.ECONNRESET), InfrastructureError),
        (ConnectionError("the hub is gone"), InfrastructureError),
        (_system(errno.ENOENT), ModelError),
        (_system(errno.EACCES), ModelError),
        (RuntimeError("size mismatch"), ModelError),
        (KeyError("rope_type"), ModelError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_fault_of_the_machine_is_not_one_of_the_model(
    raised: Exception, kind: type[RLHFError], wrapped: bool
) -> None:
    with (
        pytest.raises(RLHFError, match=r"^model\.path: cannot load a model from m: ") as caught,
        model_errors("m"),
    ):
        if wrapped:
            raise ValueError("cannot read the files") from raised
        raise raised
    assert type(caught.value) is kind


def test_an_untied_head_that_is_missing_is_refused_and_a_tied_one_is_not(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    model = load_policy(tmp_path, **LOADING).lm
    assert model.lm_head.weight is model.model.embed_tokens.weight
    configure(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lack lm_head\.weight"):
        load_policy(tmp_path, **LOADING)
    load_score_model(tmp_path, **LOADING)  # it has no such head


@pytest.mark.parametrize("vocab_size", [101, 5000])
def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused(
    vocab_size: int, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=True, vocab_size=vocab_size)
    change(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    check_headers(tmp_path, attention="sdpa")
    model = load_policy(tmp_path, **LOADING).lm
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change(tmp_path, lambda w: w["lm_head.weight"][-1].add_(1))
    for load in (lambda: check_headers(tmp_path, attention="sdpa"), lambda: load_policy(tmp_path, **LOADING)):
        with pytest.raises(ModelError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but"):
            load()
    configure(tmp_path, tie_word_embeddings=False)
    check_headers(tmp_path, attention="sdpa")
    load_policy(tmp_path, **LOADING)


def test_the_score_head_is_new_for_a_language_model_only(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "causal")
    model = load_score_model(tmp_path / "causal", **LOADING)
    model.save(tmp_path / "score")
    head = load_score_model(tmp_path / "score", **LOADING).lm.score.weight
    assert torch.equal(head, model.lm.score.weight)
    change(tmp_path / "score", lambda w: w.pop("score.weight"))
    with pytest.raises(ModelError, match=r"lack score\.weight"):
        load_score_model(tmp_path / "score", **LOADING)


def test_numbers_that_do_not_fit_the_precision_are_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    change(tmp_path, lambda w: w["model.norm.weight"].fill_(1e5))
    with pytest.raises(ModelError, match=r"not finite in float16: model\.norm\.weight.*larger range"):
        load_policy(tmp_path, **LOADING | {"dtype": "float16"})


def test_an_adapter_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    lora = LoraConfig(r=2, targets=("q_proj",))
    model = add_adapter(load_policy(tmp_path / "model", **LOADING), lora)
    tensors = {new: p.detach() for name, p in model.lm.named_parameters() if (new := adapter_name(name))}
    save_adapter(tmp_path / "adapter", model.lm, lora, tensors, "model")
    load_adapter(load_policy(tmp_path / "model", **LOADING), tmp_path / "adapter")
    next(iter(tensors.values())).fill_(float("nan"))
    save_adapter(tmp_path / "adapter", model.lm, lora, tensors, "model")
    with pytest.raises(ModelError, match=r"adapter: not finite in float32: .*lora_"):
        load_adapter(load_policy(tmp_path / "model", **LOADING), tmp_path / "adapter")


def test_an_adapter_in_the_model_folder_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere/model"}))
    with pytest.raises(ModelError, match="holds an adapter"):
        load_policy(tmp_path, **LOADING)


def test_extra_outputs_that_a_configuration_enables_are_not_returned(tmp_path: Path) -> None:
    configure(save_tiny_llama(tmp_path), output_attentions=True, output_hidden_states=True)
    policy = load_policy(tmp_path, **LOADING)
    policy.save(tmp_path / "saved")
    assert not json.loads((tmp_path / "saved" / "config.json").read_text()).get("output_attentions")


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("value", ["eager", "evil/kernel"])
@pytest.mark.parametrize("load", [load_policy, load_score_model])
def test_the_configured_attention_is_used_whatever_the_file_asks_for(
    load: Any, value: str, name: str, tmp_path: Path
) -> None:
    configure(save_tiny_llama(tmp_path), **{name: value})
    assert load(tmp_path, **LOADING).lm.config._attn_implementation == "rlhf_sdpa"
    assert load(tmp_path, **LOADING | {"attention": "eager"}).lm.config._attn_implementation == "eager"


def test_integers_of_experts_that_the_model_fuses_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    check_headers(tmp_path, attention="sdpa")

    def edit(weights: Weights) -> None:
        name, *_ = [name for name in weights if "experts.0" in name]
        weights[name] = weights[name].to(torch.int8)

    change(tmp_path, edit)
    with pytest.raises(ModelError, match=r"experts\.0\..* \(I8\)"):
        check_headers(tmp_path, attention="sdpa")
    with pytest.raises(ModelError, match=r"experts\.0\..* \(I8\)"):
        load_policy(tmp_path, **LOADING)


def test_the_files_that_are_checked_are_those_that_are_loaded(tmp_path: Path) -> None:
    """If there is a model.safetensors, transformers reads it and ignores the index."""
    save_tiny_llama(tmp_path)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(ModelFolder(tmp_path).tensors) == len(load_file(tmp_path / "model.safetensors"))
    check_headers(tmp_path, attention="sdpa")
    load_policy(tmp_path, **LOADING)
