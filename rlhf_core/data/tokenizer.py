"""Tokenizers: loading and checking one, training a small one on the data, saving, and decoding.

transformers chooses the class of a tokenizer by names in `tokenizer_config.json` and `config.json`, and some
classes replace parts of `tokenizer.json` by their own. `load_tokenizer` returns what `tokenizer.json` says.

It and `train_tokenizer` import transformers, which takes seconds. `load_decoder` does not.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.address import BaseModelAddress, is_hub_model
from rlhf_core.config.data import Thoughts
from rlhf_core.data.messages import without_thoughts
from rlhf_core.errors import ModelError
from rlhf_core.system.files import write_json

log = logging.getLogger(__name__)

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] =="
    " 'assistant' %}{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}{% else"
    " %}{{ message['content'] | trim }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{%"
    " endif %}"
)
"""Chat template of trained tokenizers. The marks of roles are single tokens, so that the tokens of a prompt
are always a prefix of those of its conversation.
"""


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """Return a fast Hugging Face tokenizer with an EOS token and a pad token that is not EOS.

    It tokenizes as its tokenizer.json says, whatever class the folder names. `path` is a folder or a hub id.
    Dropout is turned off. No code of the model is run. Raises ModelError with a fix.
    """
    if not is_hub_model(path) and not Path(path).is_dir():
        raise ModelError(
            f"model path not found: {path}; give an existing folder or a Hugging Face id (owner/name)"
        )
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        # False and not left out: by default, transformers asks
        # on standard input whether code of the hub may run.
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        # By default, a file that is missing raises OSError, as a hub does that cannot be reached.
        file = cached_file(
            path, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if file is not None:
            tokenizer = _as_in_file(tokenizer, file, path, revision)
    except ModelError:
        raise
    except Exception as error:  # the libraries raise many unrelated types for a broken or missing tokenizer
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"no tokenizer can be loaded from {path}: {reason}; it needs tokenizer.json and"
            " tokenizer_config.json"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {path} has no tokenizer.json; save it once with its fast version")
    model = tokenizer.backend_tokenizer.model
    if getattr(model, "dropout", None):
        log.warning(
            "the tokenizer of %s has dropout=%g, which makes tokens random: it is turned off",
            path,
            model.dropout,
        )
        model.dropout = None
    _add_bos(tokenizer, path, revision)
    return with_safe_specials(tokenizer, path)


def _add_bos(tokenizer: Any, path: str, revision: str | None) -> None:
    """Let the tokenizer put BOS before texts if `add_bos_token` of its tokenizer_config.json says so and its
    tokenizer.json does not. Version 5 of transformers does not follow this setting.
    """
    from tokenizers import processors
    from transformers.utils import cached_file

    file = cached_file(
        path, "tokenizer_config.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    settings = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if settings.get("add_bos_token") is not True or number is None:
        return
    # Asked by an example, because processors of several kinds in tokenizer.json can add BOS.
    if tokenizer("a")["input_ids"][:1] == [number]:
        return
    steps = [processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, number)])]
    backend = tokenizer.backend_tokenizer
    if backend.post_processor is not None:
        # The tokenizer's own processor stays: that of byte-level tokenizers corrects the offsets of blanks.
        steps.insert(0, backend.post_processor)
    backend.post_processor = processors.Sequence(steps)


_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
"""Parts of tokenizer.json that determine the tokens of a text, and the text of tokens."""
_PROBE = "One day, a cat sat on 2 mats."


def _as_in_file(tokenizer: Any, file: str, path: str, revision: str | None) -> Any:
    """Return `tokenizer` if it equals its tokenizer.json, else a tokenizer that does. Raises ModelError."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    wanted = Tokenizer.from_file(file)
    if " " not in wanted.decode(wanted.encode(_PROBE, add_special_tokens=False).ids):
        raise ModelError(
            f"the tokenizer of {path} loses the blanks of texts: the pre_tokenizer or the decoder of its"
            " tokenizer.json does not belong to its vocabulary; take the file from where the model is from"
        )
    if not _different_parts(tokenizer.backend_tokenizer, wanted):
        return tokenizer
    own = PreTrainedTokenizerFast.from_pretrained(path, revision=revision)
    different = _different_parts(own.backend_tokenizer, wanted)
    if different:
        raise ModelError(
            f"the tokenizer of {path} is loaded with another {' and '.join(different)} than its"
            " tokenizer.json has; remove the settings of tokenizer_config.json that change them, such as"
            " fix_mistral_regex, or save the tokenizer as it is meant"
        )
    # Some files name no special tokens, because the class has defaults.
    for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
        default = getattr(tokenizer, kind)
        if getattr(own, kind) is None and default in own.get_vocab():
            setattr(own, kind, default)
    return own


def _different_parts(loaded: Any, wanted: Any) -> list[str]:
    found, expected = json.loads(loaded.to_str()), json.loads(wanted.to_str())
    return [part for part in _PARTS if found[part] != expected[part]]


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer's files to a folder, with the name of a class that transformers 4 knows as well."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":  # only version 5 has this name
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(file, settings)


def with_safe_specials(tokenizer: Any, name: str) -> Any:
    """Return the tokenizer with a pad token that is not EOS. Raises ModelError if that is not possible.

    With a pad token that equals EOS, the mask of the padding would also remove EOS from the loss.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no EOS token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer
    used = {tokenizer.eos_token, tokenizer.bos_token}
    specials = []
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and token.content not in used:
            specials.append(token.content)
    named_pad = [token for token in specials if "pad" in token.lower()]
    reserved = [token for token in specials if "reserved" in token.lower() or "unused" in token.lower()]
    unknown = []
    if tokenizer.unk_token and tokenizer.unk_token not in used:
        unknown = [tokenizer.unk_token]
    choices = named_pad + unknown + reserved + specials
    if not choices:
        raise ModelError(
            f"the tokenizer of {name} has no token to pad with besides EOS ({tokenizer.eos_token!r}); "
            "add a pad token to it and resize the model's embeddings once"
        )
    log.warning("the tokenizer of %s has no pad token of its own: %r is used", name, choices[0])
    tokenizer.pad_token = choices[0]
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE of at most `vocab_size` tokens, with pad, BOS, EOS, unk and role marks.

    With 512 tokens or more, every byte has a token. A smaller vocabulary has tokens for printable ASCII and
    the bytes of `texts`, and other bytes become `<unk>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, EOS, UNK, *_ROLES]
    bpe = Tokenizer(models.BPE(unk_token=UNK))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # In the byte-level alphabet, printable ASCII is itself, except for the space (Ġ) and the newline (Ċ).
    ascii_alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        # Sorted, because `alphabet` returns another order in
        # each process, and the ids of the bytes follow it.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if vocab_size >= 512 else ascii_alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(_ROLES),
        chat_template=TINY_TEMPLATE,
        # Written out for earlier releases of transformers, which by
        # default remove blanks before punctuation when they decode.
        clean_up_tokenization_spaces=False,
    )


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_OF_LOADING = ("is_local", "local_files_only", "tokenizer_class")
"""Fields of tokenizer_config.json that change when a loaded tokenizer is saved, and not its tokens."""


def tokenizer_digest(folder: Path) -> str:
    """Return the digest of the tokenizer's files and the chat template in a folder.

    A tokenizer that is loaded and saved again keeps its digest.
    """
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = folder / name
        content = file.read_bytes() if file.exists() else b""
        if content and name == "tokenizer_config.json":
            fields = json.loads(content)
            kept = {field: value for field, value in fields.items() if field not in _OF_LOADING}
            content = json.dumps(kept, sort_keys=True).encode()
        digest.update(content)
        # Between two files, so that bytes which move from the
        # end of one to the start of the next change the digest.
        digest.update(b"\x1f")
    return digest.hexdigest()


def require_same_tokens(base: BaseModelAddress, tokenizer: Path) -> None:
    """Raise ModelError unless a model of a judge or teacher has the tokens of another folder.

    Pairs and responses are stored as tokens, which these models read as they are.

    Args:
        base: The model.
        tokenizer: Folder with a tokenizer: that of the data, or of the base model of the policy.
    """
    own = load_tokenizer(base.path, base.revision).get_vocab()
    others = load_tokenizer(str(tokenizer)).get_vocab()
    # In one direction only: further tokens of this model are in no pair and no response.
    if any(own.get(token) != number for token, number in others.items()):
        raise ModelError(
            f"{base.field}: {base.path} has other tokens than the policy; use a model of the same family, or"
            " leave it out"
        )


# -- decoding --


@dataclass(frozen=True)
class Decoder:
    """Converts token ids to text, and has the special ids. `pad` is never `eos`."""

    tokenizer: Any
    pad: int
    eos: int
    bos: int | None
    prefix: str = ""
    """Text that the chat template puts before each answer (`Encoder.response_prefix`)."""
    drops_thoughts: bool = False
    """Whether thoughts are no part of a response (`data.thoughts: drop`)."""
    opens_thoughts: bool = False
    """Whether prompts end with `<think>` (`Encoder.opens_thoughts`)."""

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        # Unlike `decode`, it releases Python's lock, so that several threads can decode.
        [text] = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=True)
        return str(text)

    def response(self, ids: Sequence[int]) -> str:
        """Return the response without the blank that the chat template put before it, and without thoughts if
        they are no part of it.

        A service that renders prompt and response again adds the blank itself.
        """
        text = self(ids).removeprefix(self.prefix)
        return without_thoughts(text, self.opens_thoughts) if self.drops_thoughts else text


def write_response_prefix(
    data: Path, prefix: str, thoughts: Thoughts | None = None, *, opened: bool = False
) -> None:
    """Write the text before each answer, and, with `data.thoughts`, its value and whether prompts end with
    `<think>`, to a data artifact's folder, for `load_decoder`.
    """
    settings: dict[str, Any] = {"prefix": prefix}
    if thoughts is not None:
        settings |= {"thoughts": thoughts, "opened": opened}
    write_json(data / "response.json", settings, indent=None)


def load_decoder(data: Path) -> Decoder:
    """Return the decoder of the tokenizer in a data artifact's folder.

    Raises ModelError if the tokenizer lacks a pad token or an EOS token.
    """
    from tokenizers import Tokenizer

    folder = data / "tokenizer"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = json.loads((folder / "tokenizer_config.json").read_text())

    def token_id(kind: str) -> int | None:
        token = names.get(kind)
        # A text, or in some files an object with the text and its flags.
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else tokenizer.token_to_id(content)

    pad, eos = token_id("pad_token"), token_id("eos_token")
    if pad is None or eos is None or pad == eos:
        raise ModelError(
            f"{folder}: the tokenizer needs a pad token and another EOS token; got ids {pad} and {eos}"
        )
    settings = data / "response.json"
    found: dict[str, Any] = {}
    if settings.exists():
        found = json.loads(settings.read_text(encoding="utf-8"))
    drops = found.get("thoughts") == "drop"
    prefix, opened = found.get("prefix", ""), found.get("opened", False)
    return Decoder(tokenizer, pad, eos, token_id("bos_token"), prefix, drops, opened)
