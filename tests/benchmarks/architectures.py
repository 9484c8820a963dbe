"""What packing does in each causal language model of the installed transformers: makes `docs/architectures.md`.

    python -m tests.benchmarks.architectures > docs/architectures.md

Each architecture gets a random model of a few thousand parameters, is saved, and loaded as the stages load it, as a policy
and as a score model, with `sdpa` and with `eager` attention. About five minutes on one core.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import ModelError
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model

SIZES: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 64, "ffn_dim": 64, "num_hidden_layers": 4,
    "n_layer": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Set where a configuration has the field."""
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4}  # fmt: skip
"""Multi-head latent attention has these in place of `head_dim`."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
"""Hybrids whose configuration of few layers would have layers of one kind only."""
LARGEST = 3_000_000
"""Parameters; what is larger for all that is not made."""

COLUMNS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("policy, sdpa", load_policy, "sdpa"),
    ("policy, eager", load_policy, "eager"),
    ("score, sdpa", load_score_model, "sdpa"),
    ("score, eager", load_score_model, "eager"),
)


def tiny_config(model_type: str) -> Any:
    """A small configuration of this kind. Raises whatever transformers does where the sizes do not fit it."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    wanted = SIZES | (LATENT if hasattr(default, "kv_lora_rank") else {}) | MAMBA
    if hasattr(default, "kv_lora_rank"):
        del wanted["head_dim"]
    known = {name: value for name, value in wanted.items() if hasattr(default, name)}
    return AutoConfig.for_model(model_type, **known, **OWN.get(model_type, {}))


def save_tiny(config: Any, folder: Path) -> str:
    """Random weights into `folder`; returns the class's name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return type(model).__name__


def outcome(folder: Path, load: Callable[..., Any], attention: str) -> str:
    """ "packed", "padded", or why it is refused."""
    try:
        model = load(folder, dtype="float32", attention=attention, device="cpu")
    except ModelError as error:
        message = error.message.replace(str(folder), "it").removeprefix("model.path: ")
        return " ".join(message.split())[:160].replace("|", "/")
    return "packed" if model.packs else "padded"


def tried(model_type: str) -> tuple[str, list[str]]:
    """(class, outcome of each column)."""
    with tempfile.TemporaryDirectory() as folder:
        name = save_tiny(tiny_config(model_type), Path(folder))
        return name, [outcome(Path(folder), load, attention) for _, load, attention in COLUMNS]


def known_to_vllm() -> set[str]:
    """Classes in vLLM's registry, read from its source: importing it takes long."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    return set(re.findall(r'"(\w+)":\s*\(', registry.read_text(encoding="utf-8")))


def main() -> None:
    with redirect_stdout(sys.stderr):  # where libraries write what is no part of the page
        text = survey(sys.argv[1:])
    print(text)


def survey(model_types: list[str]) -> str:
    """The page, of these or all."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    notes: dict[str, int] = {}
    rows, impossible = [], []
    served = known_to_vllm()
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.monotonic()
        try:
            name, outcomes = tried(model_type)
        except Exception as error:  # transformers' own, where generic sizes do not fit
            impossible.append(f"`{model_type}`")
            print(f"{model_type}: {type(error).__name__}: {str(error)[:100]!r}", file=sys.stderr)
            continue
        print(f"{model_type}: {outcomes} in {time.monotonic() - started:.1f} s", file=sys.stderr)
        cells = [
            text if text in ("packed", "padded") else f"refused [{notes.setdefault(text, len(notes) + 1)}]"
            for text in outcomes
        ]
        rows.append([f"`{model_type}`", name, *cells, "yes" if name in served else "no"])
    command = " ".join(["python -m tests.benchmarks.architectures", *model_types])
    return page(rows, notes, impossible, command, transformers.__version__)


def page(rows: list[list[str]], notes: dict[str, int], impossible: list[str], command: str, version: str) -> str:
    """`docs/architectures.md`."""
    titles = ["model_type", "class", *(title for title, _, _ in COLUMNS), "in vLLM's registry"]
    usable = sum(any(cell in ("packed", "padded") for cell in row[2:4]) for row in rows)
    lines = [
        "# Architectures",
        "",
        f"Of the causal language models of transformers {version}, {len(rows)} were made with random weights of at most "
        f"{LARGEST / 1e6:.0f} million parameters and loaded as every stage loads a model; {usable} can be a policy. Made by "
        f"`{command} > docs/architectures.md`.",
        "",
        "- **packed**: several sequences share a row and do not see each other.",
        "- **padded**: they would see each other; with `pack: auto` rows are right-padded, `pack: true` is refused.",
        "- **refused**: exit code 2 when the model is loaded, for the reason in the note.",
        "",
        "The test is of the model that is loaded, not of its name: see "
        "[decision 16](decisions/0016-what-is-tried-at-load.md). `flash_attention_2` needs a GPU and is not in the table. An "
        "architecture that vLLM does not know can be fine-tuned and scored with, but not rolled out.",
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"{number}. {text}" for text, number in notes.items()),
    ]
    if impossible:
        lines += ["", f"Not made small by generic sizes, so not tried: {', '.join(impossible)}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
