"""Loading and training tokenizers.

Rules:
- a missing folder is reported as missing; a hub id is only what looks like one;
- EOS must exist, and the pad token is another token: chosen from those that are there, or refused with a fix;
- a trained tokenizer is opened by AutoTokenizer, loses no text, and keeps within the vocabulary;
- dropout is turned off, also in the files that are saved;
- a tokenizer that is loaded and saved again keeps its digest; another one has another;
- a tokenizer equals its tokenizer.json, whatever class the folder names;
- a tokenizer whose file loses blanks, or whose settings change it, is refused;
- `add_bos_token: true` puts BOS before a text exactly once, also after saving;
- a saved tokenizer names a class of transformers 4, and is read as its file says;
- other threads run while a response is decoded.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rlhf_core.config.address import is_hub_model
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import (
    Decoder,
    load_tokenizer,
    save_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    with_safe_specials,
)
from rlhf_core.errors import ModelError
from tests.unit.data.data_samples import TEXTS


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_missing_folder_is_reported(path: str) -> None:
    with pytest.raises(ModelError, match=r"model path not found: .*give an existing folder"):
        load_tokenizer(path)


def test_a_hub_id_is_only_what_looks_like_one_and_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_model("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_model("owner/name")


def test_a_folder_without_a_tokenizer_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer can be loaded from") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in caught.value.message


def test_the_pad_token_is_never_eos(make_tokenizer: Callable[..., Any]) -> None:
    specials = ("<unk>", "<s>", "</s>", "<|reserved_0|>", "<|fill_pad|>")
    by_name = with_safe_specials(make_tokenizer(specials=specials, pad_token="</s>"), "m")
    assert by_name.pad_token == "<|fill_pad|>"
    by_unk = with_safe_specials(make_tokenizer(specials=specials[:4], pad_token=None), "m")
    assert by_unk.pad_token == "<unk>" and by_unk.pad_token_id != by_unk.eos_token_id
    kept = with_safe_specials(make_tokenizer(specials=specials, pad_token="<|reserved_0|>"), "m")
    assert kept.pad_token == "<|reserved_0|>"


def test_no_token_to_pad_with_and_no_eos_are_refused_with_a_fix() -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE({"a": 0}, []))
    bare.add_special_tokens([AddedToken("<|end|>", special=True)])
    with pytest.raises(
        ModelError, match=r"no token to pad with besides EOS \('<\|end\|>'\); add a pad token"
    ):
        with_safe_specials(PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>"), "m")
    with pytest.raises(ModelError, match="has no EOS token; set eos_token"):
        with_safe_specials(PreTrainedTokenizerFast(tokenizer_object=bare), "m")


@pytest.mark.parametrize(("size", "text"), [(384, "Ask: (a+b)*c?\nYes!"), (512, "é🦊 \x01 any byte")])
def test_a_trained_tokenizer_loses_no_text_and_opens_again(tmp_path: Path, size: int, text: str) -> None:
    from transformers import AutoTokenizer

    trained = train_tokenizer(TEXTS, size)
    trained.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert len(opened) <= size
    assert opened.chat_template == trained.chat_template
    assert [opened.pad_token, opened.bos_token, opened.eos_token, opened.unk_token] == [
        "<pad>",
        "<bos>",
        "<eos>",
        "<unk>",
    ]
    for sample in [*TEXTS, text]:
        ids = opened(sample)["input_ids"]
        assert ids[0] == opened.bos_token_id
        assert opened.decode(ids, skip_special_tokens=True) == sample


def test_dropout_is_turned_off_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = train_tokenizer(TEXTS, 512)
    trained.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["dropout"] = 0.5
    file.write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(str(tmp_path))
    assert f"the tokenizer of {tmp_path} has dropout=0.5" in caplog.text
    text = " ".join(TEXTS)
    expected = trained(text)["input_ids"]
    assert all(tokenizer(text)["input_ids"] == expected for _ in range(10))
    tokenizer.save_pretrained(tmp_path)
    assert json.loads(file.read_text())["model"]["dropout"] is None


def test_a_tokenizer_that_is_saved_again_keeps_its_digest(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 400).save_pretrained(tmp_path / "0")
    for number in range(2):
        load_tokenizer(str(tmp_path / f"{number}")).save_pretrained(tmp_path / f"{number + 1}")
    configs = {(tmp_path / name / "tokenizer_config.json").read_text() for name in "012"}
    assert len(configs) > 1, "transformers does not write fields of loading any more"
    assert len({tokenizer_digest(tmp_path / name) for name in "012"}) == 1

    other = load_tokenizer(str(tmp_path / "0"))
    other.pad_token = other.unk_token
    other.save_pretrained(tmp_path / "other")
    assert tokenizer_digest(tmp_path / "other") != tokenizer_digest(tmp_path / "0")


def test_other_threads_run_while_a_response_is_decoded() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, "a"))
    decoding = threading.Thread(target=Decoder(tokenizer, 0, 1, None), args=([1] * 1_000_000,))
    decoding.start()
    turns = 0
    while decoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20, "it takes a third of a second, and `Tokenizer.decode` leaves one turn"


# -- the tokenizer of a folder is that of its file --

TEXTS_OF_SCRIPTS = [
    "Two cats,  3 dogs: 1234.5",
    " lead\n\n\ttab, end ",
    "I don't think we've",
    "日本語 한국어 ไทย",
    "cafe\u0301 😀",
]


def write_folder(folder: Path, tokenizer: Any, model_type: str, class_name: str | None, **names: str) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"pad_token": "<pad>", **names}
    if class_name is not None:
        settings["tokenizer_class"] = class_name
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def digits_apart() -> Tokenizer:
    """Return a byte-level tokenizer with a step for digits, which no class of transformers builds."""
    from tokenizers import pre_tokenizers

    tokenizer: Tokenizer = train_tokenizer(TEXTS, 600).backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("llama", "LlamaTokenizerFast"), ("llama", "GPT2Tokenizer"), ("llama", "PreTrainedTokenizerFast"),
        ("llama", None), ("qwen2", "Qwen2TokenizerFast"), ("qwen2", "LlamaTokenizerFast"), ("qwen2", None),
        ("qwen3", None), ("mistral", "LlamaTokenizer"), ("starcoder2", "GPT2Tokenizer"),
        ("gpt2", "GPT2TokenizerFast"), ("gpt_neox", "GPTNeoXTokenizer"), ("cohere", "CohereTokenizerFast"),
        ("deepseek_v3", "LlamaTokenizerFast"), ("phi3", "LlamaTokenizerFast"), ("olmo2", "GPT2Tokenizer"),
    ],
)  # fmt: skip
def test_a_tokenizer_equals_its_file_whatever_class_the_folder_names(
    tmp_path: Path, digits_apart: Tokenizer, model_type: str, class_name: str | None
) -> None:
    folder = write_folder(tmp_path / "m", digits_apart, model_type, class_name, eos_token="<eos>")
    loaded = load_tokenizer(str(folder)).backend_tokenizer
    for text in TEXTS_OF_SCRIPTS:
        ids = digits_apart.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False).ids == ids
        assert loaded.decode(ids) == digits_apart.decode(ids)


def test_special_tokens_that_only_the_class_names_are_kept(tmp_path: Path) -> None:
    """As in the folder of gpt2, whose files name no EOS."""
    tokenizer = train_tokenizer(TEXTS, 600)
    tokenizer.add_tokens(["<|endoftext|>"], special_tokens=True)
    folder = write_folder(tmp_path / "m", tokenizer.backend_tokenizer, "gpt2", "GPT2Tokenizer")
    assert load_tokenizer(str(folder)).eos_token == "<|endoftext|>"


def test_a_tokenizer_whose_file_loses_blanks_is_refused(tmp_path: Path, digits_apart: Tokenizer) -> None:
    from tokenizers import decoders, pre_tokenizers

    damaged = Tokenizer.from_str(digits_apart.to_str())
    damaged.pre_tokenizer = pre_tokenizers.Metaspace()
    damaged.decoder = decoders.Metaspace()
    folder = write_folder(tmp_path / "m", damaged, "llama", "PreTrainedTokenizerFast", eos_token="<eos>")
    with pytest.raises(ModelError, match="loses the blanks of texts"):
        load_tokenizer(str(folder))


def test_a_tokenizer_that_its_settings_change_is_refused(tmp_path: Path, digits_apart: Tokenizer) -> None:
    rules = json.loads(digits_apart.to_str())
    used = len(rules["model"]["vocab"])
    # transformers applies this setting to vocabularies of more than 100,000 tokens.
    rules["model"]["vocab"] |= {f"more{index}": index for index in range(used, 100_001)}
    large = Tokenizer.from_str(json.dumps(rules))
    folder = write_folder(tmp_path / "m", large, "mistral", None, eos_token="<eos>")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fix_mistral_regex": True}))
    with pytest.raises(ModelError, match=r"loaded with another pre_tokenizer .*fix_mistral_regex"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gpt2"])
def test_a_saved_tokenizer_is_read_as_its_file_says(
    tmp_path: Path, digits_apart: Tokenizer, model_type: str
) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "m", digits_apart, model_type, "LlamaTokenizerFast", eos_token="<eos>")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text((folder / "config.json").read_text())
    save_tokenizer(load_tokenizer(str(folder)), tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # a name of transformers 4
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved").backend_tokenizer
    for text in TEXTS_OF_SCRIPTS:
        assert loaded.encode(text).ids == digits_apart.encode(text).ids


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("has_step", [True, False])
def test_bos_is_put_once_if_only_the_settings_say_so(
    tmp_path: Path, digits_apart: Tokenizer, writes_bos: bool, has_step: bool
) -> None:
    from tokenizers import processors

    rules = Tokenizer.from_str(digits_apart.to_str())
    if not has_step:
        rules.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    folder = write_folder(tmp_path / "m", rules, "llama", "LlamaTokenizerFast", **names)
    file = folder / "tokenizer_config.json"
    start = "{{ bos_token }}" if writes_bos else ""
    template = start + "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    settings = {**json.loads(file.read_text()), "add_bos_token": True, "chat_template": template}
    file.write_text(json.dumps(settings))
    loaded = load_tokenizer(str(folder))
    save_tokenizer(loaded, tmp_path / "saved")
    for tokenizer in (loaded, load_tokenizer(str(tmp_path / "saved"))):
        for kind in ("plain", "chat"):
            ids = Encoder(tokenizer, kind).prompt([Message("user", "a cat")])
            assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    if not has_step:
        file.write_text(json.dumps({**settings, "add_bos_token": False}))
        ids = Encoder(load_tokenizer(str(folder)), "plain").prompt([Message("user", "a cat")])
        assert loaded.bos_token_id not in ids
