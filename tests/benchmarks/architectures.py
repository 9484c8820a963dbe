"""Test packing in each causal language model of the installed transformers, and generate
`docs/architectures.md`.

    python -m tests.benchmarks.architectures > docs/architectures.md

For each architecture, a small model with random weights is created and saved. It is then loaded as the stages
load it: as a policy and as a score model, with `sdpa` and with `eager` attention. This takes about five
minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import ModelError
from rlhf_core.models.architectures import (
    causal_class,
    engine_backend,
    needs_torchvision,
    serves_adapters,
)
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from tests.support.multimodal_models import FAMILIES, save_multimodal

SIZES: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 64, "ffn_dim": 64,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Values for the fields that a configuration has."""
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
          "num_key_value_heads": 4}  # fmt: skip
"""Fields of multi-head latent attention, which replace `head_dim`."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
"""Hybrid models whose default configuration with few layers would have layers of one kind only."""
LARGEST = 3_000_000
"""Maximum number of parameters. Larger models are skipped."""

COLUMNS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("policy, sdpa", load_policy, "sdpa"),
    ("policy, eager", load_policy, "eager"),
    ("score, sdpa", load_score_model, "sdpa"),
    ("score, eager", load_score_model, "eager"),
)


def tiny_config(model_type: str) -> Any:
    """Return a small configuration of this model type. Raises any error of transformers if the sizes do not
    fit.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    wanted = SIZES | (LATENT if hasattr(default, "kv_lora_rank") else {}) | MAMBA
    if hasattr(default, "kv_lora_rank"):
        del wanted["head_dim"]
    known = {name: value for name, value in wanted.items() if hasattr(default, name)}
    return AutoConfig.for_model(model_type, **known, **OWN.get(model_type, {}))


def save_tiny(config: Any, folder: Path) -> str:
    """Save a model with random weights in `folder` and return the name of its class."""
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
    """Return "packed", "padded", or the reason for which the model is refused."""
    try:
        model = load(folder, dtype="float32", attention=attention, device="cpu")
    except ModelError as error:
        message = error.message.replace(str(folder), "it").removeprefix("model.path: ")
        return " ".join(message.split())[:160].replace("|", "/")
    return "packed" if model.packs else "padded"


def tried(model_type: str) -> tuple[str, list[str]]:
    """Return the class name and the outcome of each column."""
    with tempfile.TemporaryDirectory() as folder:
        if model_type in FAMILIES:
            save_multimodal(model_type, Path(folder))
            name = str(causal_class(ModelFolder(folder).text_config["model_type"]))
        else:
            name = save_tiny(tiny_config(model_type), Path(folder))
        return name, [outcome(Path(folder), load, attention) for _, load, attention in COLUMNS]


def engine(name: str, model_type: str) -> str:
    """Return what an engine of vLLM runs, read from its source, because importing vLLM is slow."""
    texts = {"vllm": "vLLM", "transformers": "transformers", "untested": "not in the registry", None: "no"}
    return texts[engine_backend(name, model_type)] + (" [t]" if needs_torchvision(name) else "")


def pipeline_use(outcomes: list[str], engine: str) -> str:
    """Return which part of the pipeline an architecture can run with one `model.attention`.

    Args:
        outcomes: Outcomes of `COLUMNS`.
        engine: A result of `engine`.
    """
    usable = [text in ("packed", "padded") for text in outcomes]
    policies, scores = usable[:2], usable[2:]
    if not any(policies):
        return "nothing"
    if engine == "no":
        return "SFT"
    uses_score = any(policy and score for policy, score in zip(policies, scores, strict=True))
    stages = "all" if uses_score else "no reward model, no critic"
    return stages if engine != "not in the registry" else f"{stages}, engine not tested"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_types", nargs="*", help="only these; default: all of transformers")
    args = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr):  # libraries may print to stdout, which must contain the page only
        text = survey(args.model_types)
    print(text)


def survey(model_types: list[str]) -> str:
    """Return the page for these model types, or for all of them."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    notes: dict[str, int] = {}
    rows, impossible = [], []
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.monotonic()
        try:
            name, outcomes = tried(model_type)
        except Exception as error:  # raised by transformers if the generic sizes do not fit
            impossible.append(f"`{model_type}`")
            print(f"{model_type}: {type(error).__name__}: {str(error)[:100]!r}", file=sys.stderr)
            continue
        print(f"{model_type}: {outcomes} in {time.monotonic() - started:.1f} s", file=sys.stderr)
        cells = [
            text if text in ("packed", "padded") else f"refused [{notes.setdefault(text, len(notes) + 1)}]"
            for text in outcomes
        ]
        served = engine(name, model_type)
        adapters = "no" if served == "no" or not serves_adapters(name) else "yes"
        rows.append([f"`{model_type}`", name, *cells, served, adapters, pipeline_use(outcomes, served)])
    command = " ".join(["python -m tests.benchmarks.architectures", *model_types])
    return page(rows, notes, impossible, command, transformers.__version__)


def page(
    rows: list[list[str]], notes: dict[str, int], impossible: list[str], command: str, version: str
) -> str:
    """Return the text of `docs/architectures.md`."""
    titles = ["model_type", "class", *(title for title, _, _ in COLUMNS), "engine", "adapters", "pipeline"]
    usable = sum(any(cell in ("packed", "padded") for cell in row[2:4]) for row in rows)
    whole = sum(row[-1] == "all" for row in rows)
    listed = ", ".join(f"`{family}`" for family in FAMILIES)
    lines = [
        "# Architectures",
        "",
        (
            f"This page lists {len(rows)} causal language models of transformers {version}. Each was created"
            f" with random weights and at most {LARGEST / 1e6:.0f} million parameters, and loaded in the same"
            f" way as in every stage. {usable} of them can be used as a policy, and {whole} in the whole"
            f" pipeline. The page is generated with `{command} > docs/architectures.md`."
        ),
        "",
        "- **packed**: several sequences can share a row without influencing each other.",
        (
            "- **padded**: sequences in the same row would influence each other. With `pack: auto`, each row"
            " contains one sequence and is right-padded. `pack: true` is refused."
        ),
        "- **refused**: loading the model ends with exit code 2. The note gives the reason.",
        "",
        (
            "The result is found by running the loaded model and does not depend on its name (see [decision"
            " 16](decisions/0016-loading-models.md)). `flash_attention_2` requires a GPU and is not in"
            f" the table. {listed} are multimodal models in the layout of the hub, of which the text part is"
            " used. The last three columns are read from the source code of vLLM:"
        ),
        "",
        (
            "- **engine**: **vLLM** has a class of its own, or its registry names the class of"
            " **transformers**. It also tries that class for what is **not in the registry**, which has not"
            " been tested. With **no**, that class cannot be used either. **[t]**: vLLM's class imports"
            " torchvision, which the locks for GPUs have and the lock for CPUs has not."
        ),
        "- **adapters**: engines can load adapters (`ppo.weight_sync.lora: adapter`).",
        (
            "- **pipeline**: the stages that can use the architecture. Without a score model,"
            " `reward.enabled: false` and a `ppo.algorithm` without a critic are needed. `rlhf run` refuses"
            " what does not fit before it starts, and in the data stage for a model of the hub."
        ),
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"{number}. {text}" for text, number in notes.items()),
    ]
    if impossible:
        lines += [
            "",
            (
                "Not tested, because a small model could not be created with generic sizes:"
                f" {', '.join(impossible)}."
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
