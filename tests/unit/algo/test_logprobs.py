"""Locks: the values and the gradients of token log-probabilities and entropies in float64 and bf16,
temperature, chunking, what is kept for the backward pass, labels that are none, logits of -inf and NaN, and
that a GPU is not waited for.

Axes: B sequences, T response tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rlhf_core.algo.logprobs import _clear_unused, token_entropy, token_logprobs
from rlhf_core.config.base import LOSS_CHUNK

B, T, V = 3, 5, 11


def random_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(V, (B, T), generator=generator)


def reference_logprob(logits: list[float], label: int, temperature: float) -> float:
    scaled = [x / temperature for x in logits]
    return scaled[label] - math.log(math.fsum(math.exp(x) for x in scaled))


def reference_entropy(logits: list[float], temperature: float) -> float:
    logps = [reference_logprob(logits, v, temperature) for v in range(len(logits))]
    return -math.fsum(math.exp(logp) * logp for logp in logps)


def saved_by(function: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass of `function`."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function()
    return kept


def test_logprobs_and_entropy_match_hand_computed_numbers() -> None:
    # logits 0 and ln 3 -> p = 1/4, 3/4; at temperature 1/2 the odds are squared: p = 1/10, 9/10
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    label = torch.tensor([1])
    assert token_logprobs(logits, label).item() == pytest.approx(math.log(3 / 4), abs=1e-15)
    assert token_logprobs(logits, label, temperature=0.5).item() == pytest.approx(math.log(9 / 10), abs=1e-15)
    # H = 1/4 ln 4 + 3/4 ln(4/3) = ln 4 - 3/4 ln 3
    assert token_entropy(logits).item() == pytest.approx(math.log(4) - 0.75 * math.log(3), abs=1e-15)
    assert token_entropy(torch.zeros(1, 8)).item() == pytest.approx(math.log(8), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_every_token_matches_a_reference_in_plain_python(temperature: float) -> None:
    logits, labels = random_case()
    logps, entropies = token_logprobs(logits, labels, temperature), token_entropy(logits, temperature)
    for b in range(B):
        for t in range(T):
            row = logits[b, t].tolist()
            expected = reference_logprob(row, int(labels[b, t]), temperature)
            assert logps[b, t].item() == pytest.approx(expected, rel=1e-12)
            assert entropies[b, t].item() == pytest.approx(reference_entropy(row, temperature), rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["padded", "packed", "sliced", "transposed"])
def test_gradients_are_right_in_every_layout(layout: str, temperature: float) -> None:
    logits, labels = random_case()
    if layout == "packed":
        logits, labels = logits.flatten(0, 1), labels.flatten()
    logits.requires_grad_()

    def view(x: Tensor) -> Tensor:
        return {"sliced": x[:, :-1], "transposed": x.transpose(0, 1)}.get(layout, x)

    shown = view(labels.unsqueeze(-1)).squeeze(-1)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(view(x), shown, temperature), (logits,))
    assert torch.autograd.gradcheck(lambda x: token_entropy(view(x), temperature), (logits,))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several threads, torch adds up a single long row in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows_of_a_chunk", [7, 2, 1])
@pytest.mark.parametrize("contiguous", [True, False])
def test_chunks_change_neither_values_nor_gradients(rows_of_a_chunk: int, contiguous: bool) -> None:
    """All rows have the bits of each row alone, also if a row is longer than a chunk."""

    def run(logits: Tensor, labels: Tensor) -> list[Tensor]:
        logits = logits.clone().requires_grad_()
        shown = logits[:, :1]
        logps, entropies = token_logprobs(shown, labels, 0.9), token_entropy(shown, 0.9)
        (logps.square().sum() + entropies.square().sum()).backward()
        assert logits.grad is not None
        return [logps.detach(), entropies.detach(), logits.grad]

    vocabulary = LOSS_CHUNK["cpu"] // rows_of_a_chunk + (1 if rows_of_a_chunk == 1 else -1)
    rows = rows_of_a_chunk + 2
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, 1 if contiguous else 2, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (rows, 1), generator=generator)
    whole = run(logits, labels)
    alone = [run(logits[i : i + 1], labels[i : i + 1]) for i in range(rows)]
    for a, parts in zip(whole, zip(*alone, strict=True), strict=True):
        assert torch.equal(a, torch.cat(parts))


def test_only_the_logits_are_saved_for_backward() -> None:
    logits, labels = random_case()
    logits.requires_grad_()
    for make in (
        lambda: token_logprobs(logits, labels, 0.7),
        lambda: token_entropy(logits, 0.7),
        lambda: token_logprobs(logits[:, :-1], labels[:, :-1], 0.7),
    ):
        large = [x for x in saved_by(make) if x.numel() > B * T]
        assert [x.untyped_storage().data_ptr() for x in large] == [logits.untyped_storage().data_ptr()]


def test_bf16_logits_are_computed_in_float32() -> None:
    logits, labels = random_case(torch.bfloat16)
    labels[0] = logits[0].argmax(dim=-1)  # p near 1, where 1 - p rounded in bf16 would be lost
    logits.requires_grad_()
    raised = logits.detach().float().requires_grad_()
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: token_logprobs(x, labels, 0.7),
        lambda x: token_entropy(x, 0.7),
    )
    for function in functions:
        narrow, wide = function(logits), function(raised)
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, wide)
        (grad,) = torch.autograd.grad(narrow.sum(), logits)
        (expected,) = torch.autograd.grad(wide.sum(), raised)
        assert grad.dtype == torch.bfloat16
        # bf16 keeps 8 bits: each entry is off by no more than its own rounding, 2^-8 of itself
        assert torch.all((grad.float() - expected).abs() <= expected.abs() * 2**-8)


def test_large_logits_keep_their_precision_in_float32() -> None:
    # All logits 10,000 higher: the same distribution. Subtracting a float32 logsumexp would lose 3 digits.
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    label = torch.tensor([0])
    assert torch.equal(token_logprobs(logits + 10_000, label), token_logprobs(logits, label))
    assert torch.equal(token_entropy(logits + 10_000), token_entropy(logits))


def test_negative_labels_are_ignored_and_large_ones_are_errors() -> None:
    logits, labels = random_case()
    logits.requires_grad_()
    labels[0, 0], labels[1, 2] = -100, -1
    logps = token_logprobs(logits, labels)
    logps.sum().backward()
    assert logits.grad is not None
    for b, t in ((0, 0), (1, 2)):
        assert logps[b, t].item() == 0.0
        assert torch.all(logits.grad[b, t] == 0.0)
    labels[0, 1] = V
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_logprobs(logits, labels)


def test_a_logit_of_minus_infinity_adds_no_entropy() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    (token_entropy(logits) + token_logprobs(logits, torch.tensor([1]))).sum().backward()
    assert torch.equal(token_entropy(logits), token_entropy(logits[:, :2].contiguous()))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2].item() == 0.0
    assert token_logprobs(logits, torch.tensor([2])).item() == -math.inf


def test_nan_logits_of_masked_tokens_have_zero_gradient() -> None:
    logits, labels = random_case()
    logits[1] = math.nan
    logits.requires_grad_()
    used = torch.tensor([True, False, True]).unsqueeze(1).expand(B, T)
    per_token = token_logprobs(logits, labels) + token_entropy(logits)
    torch.where(used, per_token, 0.0).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.all(logits.grad[1] == 0.0)


class _AsOnGPU(Tensor):
    """A tensor of the CPU whose `device` is a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_tokens_have_no_gradient_on_the_gpu_either(dtype: torch.dtype) -> None:
    grad = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    slope = torch.ones(B, T, 1)
    slope[1], slope[0, 2] = 0.0, -0.0
    grad[1], grad[0, 2] = math.nan, math.inf
    on_gpu = grad.clone().as_subclass(_AsOnGPU)
    _clear_unused(grad, slope)
    _clear_unused(on_gpu, slope)
    assert torch.equal(on_gpu.as_subclass(Tensor), grad)
    assert (grad == 0.0).all(-1).equal(slope.squeeze(-1) == 0.0)


def test_no_pass_waits_for_the_gpu() -> None:
    # The device `meta` has shapes and no numbers: an operation that has to read one is an error.
    logits = torch.randn(B, T, V, device="meta", requires_grad=True)
    labels = torch.zeros(B, T, dtype=torch.long, device="meta")
    (token_logprobs(logits, labels, 0.7) + token_entropy(logits, 0.7)).sum().backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_the_same_call_twice_gives_the_same_bits() -> None:
    logits, labels = random_case(torch.float32)
    assert torch.equal(token_logprobs(logits, labels, 0.7), token_logprobs(logits, labels, 0.7))
    assert torch.equal(token_entropy(logits, 0.7), token_entropy(logits, 0.7))


def test_probabilities_sum_to_one_and_give_the_entropy() -> None:
    logits, _ = random_case()
    every_label = torch.arange(V).expand(B, T, V)
    logps = token_logprobs(logits.unsqueeze(2).expand(B, T, V, V), every_label, 0.7)
    assert torch.allclose(logps.exp().sum(-1), torch.ones(B, T, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(-(logps.exp() * logps).sum(-1), token_entropy(logits, 0.7), atol=1e-12)


def test_any_leading_shape_is_taken_even_an_empty_one() -> None:
    logits, labels = random_case()
    assert torch.equal(token_logprobs(logits[0, 0], labels[0, 0]), token_logprobs(logits, labels)[0, 0])
    for shape in ((0,), (0, 4), (2, 0)):
        empty = torch.zeros(*shape, V, requires_grad=True)
        token_logprobs(empty, torch.zeros(shape, dtype=torch.long)).sum().backward()
        assert token_entropy(empty).shape == shape
        assert empty.grad is not None


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_no_temperature_is_refused(temperature: float) -> None:
    logits, labels = random_case()
    with pytest.raises(ValueError, match="temperature must be"):
        token_logprobs(logits, labels, temperature)
    with pytest.raises(ValueError, match="temperature must be"):
        token_entropy(logits, temperature)


def test_labels_and_logits_that_do_not_fit_are_refused() -> None:
    logits, labels = random_case()
    with pytest.raises(ValueError, match="labels must have the shape"):
        token_logprobs(logits, labels[:, :-1])
    with pytest.raises(ValueError, match="logits must be floats"):
        token_entropy(labels)
