"""What a model does with packed rows, padding and training mode is tried when it is loaded.

Rules: architectures whose packed sequences see each other are padded, or refused where the
configuration asks for packing; those that keep them apart are packed; no random part is left, whatever its
name; the test leaves no trace, is the same in bfloat16 and costs little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.models import selftest
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from rlhf_core.models.scoring import sequence_logprobs, sequence_scores, single_process_batches
from tests.support.tiny_llama import save_tiny_llama

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID = {"layer_types": ["conv", "full_attention"]}


def save(folder: Path, kind: str, **changes: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def load(folder: Path, load: Any = load_policy, **changes: Any) -> Any:
    return load(folder, **{"dtype": "float32", "attention": "sdpa", "device": "cpu", **changes})


CASES = [
    ("Llama", {}, "sdpa", True),
    ("Llama", {}, "eager", True),
    ("Mixtral", EXPERTS, "sdpa", True),
    ("Nemotron", {}, "sdpa", False),
    ("Nemotron", {}, "eager", True),
    ("StableLm", {}, "sdpa", False),
    ("GptOss", EXPERTS, "eager", False),
    ("Lfm2", HYBRID, "sdpa", False),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "changes", "attention", "packs"), CASES)
def test_rows_are_packed_where_sequences_do_not_see_each_other_and_only_there(
    kind: str, changes: dict[str, Any], attention: str, packs: bool, dtype: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, kind, **changes)
    assert load(folder, attention=attention, dtype=dtype).packs is packs
    assert load(folder, attention=attention, dtype=dtype, pack=False).packs is False
    if packs:
        assert load(folder, attention=attention, dtype=dtype, pack=True).packs is True
    else:
        with pytest.raises(ModelError, match=r"pack: true, but in packed rows of .*set pack: auto or false"):
            load(folder, attention=attention, dtype=dtype, pack=True)


def sequences() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (4, 20), generator=generator).tolist()
    return [(row[:4], row[4 : 8 + 3 * i]) for i, row in enumerate(ids)]


@pytest.mark.parametrize("kind", ["Nemotron", "StableLm", "Llama"])
def test_evaluation_and_scores_do_not_depend_on_who_shares_the_batch(kind: str, tmp_path: Path) -> None:
    folder, rows = save(tmp_path, kind), sequences()
    policy, scorer = load(folder).eval(), load(folder, load_score_model).eval()
    together, _ = sequence_logprobs(policy, single_process_batches(policy, rows, 1000, 0), 1.0)
    scores = sequence_scores(scorer, scorer.statistics, single_process_batches(scorer, rows, 1000, 0))
    for i, row in enumerate(rows):
        alone, _ = sequence_logprobs(policy, single_process_batches(policy, [row], 1000, 0), 1.0)
        torch.testing.assert_close(together[i], alone[0], atol=2e-5, rtol=1e-5)
        assert scores[i] == pytest.approx(
            sequence_scores(scorer, scorer.statistics, single_process_batches(scorer, [row], 1000, 0))[0],
            abs=1e-5,
        )


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"attention_dropout": 0.5}),
        ("Llama", {"attention_dropout": 1}),
        ("Phi3", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "pad_token_id": 0}),
        ("Starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("SeedOss", {}),  # 0.1 is its default
        ("Phimoe", {**EXPERTS, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5}),
    ],
)
@pytest.mark.parametrize("loader", [load_policy, load_score_model])
def test_two_passes_in_training_mode_are_equal_whatever_the_random_part_is_called(
    kind: str, changes: dict[str, Any], loader: Any, tmp_path: Path
) -> None:
    model = load(save(tmp_path, kind, **changes), loader).train()
    batch = collate([TokenSequence.of(*row) for row in sequences()], pad_id=0)
    arguments = (batch,) if loader is load_policy else (batch, "tokens")
    first, second = model(*arguments), model(*arguments)
    evaluated = model.eval()(*arguments)
    if loader is load_policy:
        first, second, evaluated = first.logprobs_N, second.logprobs_N, evaluated.logprobs_N
    assert torch.equal(first, second)
    assert torch.allclose(first, evaluated, atol=1e-5), "dropout of probability 1 has no random numbers"


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda: 1 + 1e-3 * torch.rand(1), "two passes in training mode differ by up to"),
        (lambda: 1.5, "in training mode differ by .* from those in evaluation mode"),
    ],
    ids=["random", "constant"],
)
def test_a_model_that_computes_something_else_in_training_mode_is_refused(
    factor: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    model = load(save(tmp_path, "Llama")).lm
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda mlp, _inputs, output: output * factor() if mlp.training else output
        )
    with pytest.raises(ModelError, match=message):
        selftest.tested(model, "auto")


def test_a_model_that_sees_what_comes_later_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "Llama")
    model = load(folder).lm
    for layer in model.model.layers:
        layer.self_attn.forward = _mean_over_the_row
    with pytest.raises(
        ModelError, match="in right-padded rows tokens of a sequence depend on others than its own"
    ):
        selftest.tested(model, False)


def _mean_over_the_row(hidden_states: torch.Tensor, **_rest: Any) -> tuple[torch.Tensor, None]:
    return hidden_states.mean(1, keepdim=True).expand_as(hidden_states), None


def test_positions_that_go_on_where_a_sequence_begins_are_found(tmp_path: Path) -> None:
    """No token sees another sequence, so only the comparison with the sequence alone can tell."""
    model = load(save(tmp_path, "Llama", initializer_range=0.5)).lm
    backbone = model.model
    plain = backbone.forward

    def ignores_positions(position_ids: torch.Tensor | None = None, **rest: Any) -> Any:
        if position_ids is not None:
            # Distances within a sequence are what rotary embeddings see, so they have to grow.
            position_ids = 3 * position_ids
        return plain(position_ids=position_ids, **rest)

    backbone.forward = ignores_positions
    assert selftest.tested(model, "auto") is False


def test_the_self_test_leaves_no_trace(tmp_path: Path) -> None:
    model = load(save(tmp_path, "Llama")).lm
    for training in (True, False):
        model.train(training)
        before = torch.get_rng_state()
        assert selftest.tested(model, "auto")
        assert torch.equal(before, torch.get_rng_state())
        assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_a_self_test_costs_less_than_a_second(tmp_path: Path) -> None:
    model = load(save_tiny_llama(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)).lm
    started = time.process_time()
    selftest.tested(model, "auto")
    assert time.process_time() - started < 1.0
