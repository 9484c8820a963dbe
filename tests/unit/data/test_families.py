"""Chat templates in the manner of the families that people train, none of them with {% generation %} marks.

The templates are short and in words of our own; what decides about the mask is as in those of the families:
how roles, ends of turns, tools and thoughts are written, and what changes when a conversation goes on.

Rules:
- each family is taken as it is, and what is trained is exactly what the assistant writes after the prompt
  that an engine sees;
- where a template renders an earlier answer otherwise than the last one, each answer is a sequence of its
  own;
- calls of tools and thoughts are trained, tools and results are not;
- what a template leaves out is a reason to refuse the row, also if another text of the row mentions it;
- the template of this package renders tools and thoughts with any tokenizer;
- a result follows the call that it names, whatever ids the data have;
- thoughts that are dropped are in no response, or the template is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rlhf_core.data.messages import Call, Message, tools_of
from rlhf_core.data.templates import TOOLS_TEMPLATE, Encoded, EncodeError, Encoder
from rlhf_core.data.tokenizer import load_decoder, write_response_prefix
from rlhf_core.errors import ModelError
from rlhf_core.system.files import shipped
from tests.unit.data.data_samples import CHATML, TEXTS

ASK, ANSWER = Message("user", "Is it late?"), Message("assistant", "It is noon.")
AGAIN, LATER = Message("user", "And now?"), Message("assistant", "It is one.")
TALK = [ASK, ANSWER, AGAIN, LATER]


@dataclass(frozen=True)
class Family:
    """A template with the end of its turns, and what becomes of `TALK`."""

    template: str
    eos: str
    becomes: tuple[str, ...]
    """Sequences, as text with what is trained in ⟦⟧."""


def turns(user: str, assistant: str, *, prompt: str, start: str = "", end: str = "") -> str:
    """Return a template of the simplest kind: a text for each role, with `§` for the content."""
    user, assistant = (text.replace("§", "{{ m['content'] }}") for text in (user, assistant))
    return (
        f"{start}{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{assistant}{{% else %}}{user}"
        f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% else %}}{end}{{% endif %}}"
    )


LLAMA = """{{ '<|begin_of_text|>' }}{% for m in messages %}{% if m['role'] == 'tool' %}{{
'<|start_header_id|>ipython<|end_header_id|>\n\n' + m['content'] | tojson + '<|eot_id|>' }}{% elif
m.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% set f =
m.tool_calls[0].function %}{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson +
'}<|eot_id|>' }}{% else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if tools
and loop.first %}{{ tools | tojson + '\n' }}{% endif %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif
%}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%
endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{% if tools and
messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 %}{{
'[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m['content'] +
'[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS]' }}{% for c in m.tool_calls %}{% if c.id | length !=
9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}{{ c.function | tojson + c.id }}{% endfor %}{{
eos_token }}{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS]' + m['content'] + m.tool_call_id +
'[/TOOL_RESULTS]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"""
QWEN3 = """{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% set
ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0
%}{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'tool' %}{{
'<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}{% else %}{{
'<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.index0 > ns.last and
(loop.last or m.reasoning_content) %}{{ '<think>\n' + (m.reasoning_content or '') | trim +
'\n</think>\n\n' }}{% endif %}{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' +
c.function | tojson + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if
add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
R1 = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content']
}}{% else %}{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor
%}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
GPT_OSS = """{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|start|>user<|message|>' +
m['content'] + '<|end|>' }}{% elif m['role'] == 'tool' %}{{ '<|start|>functions to=assistant<|message|>'
+ m['content'] + '<|end|>' }}{% else %}{% if m.thinking and (loop.last or m.tool_calls and
messages[-1]['role'] != 'assistant') %}{{ '<|start|>assistant<|channel|>analysis<|message|>' +
m.thinking + '<|end|>' }}{% endif %}{% if m.tool_calls %}{{ '<|start|>assistant to=' +
m.tool_calls[0].function | tojson + '<|call|>' }}{% else %}{{
'<|start|>assistant<|channel|>final<|message|>' + m['content'] + ('<|return|>' if loop.last else
'<|end|>') }}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant'
}}{% endif %}{% if tools and false %}{{ tools }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{
raise_exception('no system') }}{% endif %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant'
else 'user') + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt
%}{{ '<start_of_turn>model\n' }}{% endif %}"""
GRANITE = turns(
    "<|start_of_role|>{{ m['role'] }}<|end_of_role|>§<|end_of_text|>\n",
    "<|start_of_role|>assistant<|end_of_role|>§<|end_of_text|>\n",
    prompt="<|start_of_role|>assistant<|end_of_role|>",
)
COMMAND_R = turns(
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>§<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>§<|END_OF_TURN_TOKEN|>",
    prompt="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    start="{{ bos_token }}",
)


def talk(user: str, assistant: str, end: str = "", start: str = "") -> tuple[str, ...]:
    """Return `TALK` as one sequence. `assistant` has the trained part in ⟦⟧, and `end` follows an answer."""
    asked, said = user.replace("§", "Is it late?"), assistant.replace("§", "It is noon.")
    again, later = user.replace("§", "And now?"), assistant.replace("§", "It is one.")
    return (f"{start}{asked}{said}{end}{again}{later}",)


OWN = "tools-chat.jinja, of this package"
CHAT = ("<|im_start|>user\n§<|im_end|>\n", "<|im_start|>assistant\n⟦§<|im_end|>⟧", "\n")
ZEPHYR = ("<|user|>\n§{{ eos_token }}\n", "<|assistant|>\n§{{ eos_token }}\n", "<|assistant|>\n")
FAMILIES = {
    OWN: Family(
        shipped(TOOLS_TEMPLATE).read_text(),
        "</s>",
        talk("<|im_start|>user\n§<|im_end|>\n", "<|im_start|>assistant\n⟦§</s>⟧", "\n", "<bos>"),
    ),
    "ChatML (Qwen2.5, Yi, SmolLM2, Hermes)": Family(CHATML, "<|im_end|>", talk(*CHAT)),
    "InternLM2": Family("{{ bos_token }}" + CHATML, "<|im_end|>", talk(*CHAT, start="<bos>")),
    "Llama 3.x": Family(
        LLAMA,
        "<|eot_id|>",
        talk(
            "<|start_header_id|>user<|end_header_id|>\n\n§<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦§<|eot_id|>⟧",
            start="<|begin_of_text|>",
        ),
    ),
    "Llama 2": Family(
        turns("{{ bos_token }}[INST] § [/INST]", " § {{ eos_token }}", prompt=""),
        "</s>",
        talk("<bos>[INST] § [/INST]", "⟦ § </s>⟧"),
    ),
    "Mistral": Family(MISTRAL, "</s>", talk("[INST] §[/INST]", "⟦ §</s>⟧", start="<bos>")),
    "Gemma": Family(
        GEMMA,
        "<end_of_turn>",
        talk(
            "<start_of_turn>user\n§<end_of_turn>\n", "<start_of_turn>model\n⟦§<end_of_turn>⟧", "\n", "<bos>"
        ),
    ),
    "Phi-3": Family(
        turns(
            "<|user|>\n§<|end|>\n",
            "<|assistant|>\n§<|end|>\n",
            prompt="<|assistant|>\n",
            end="{{ eos_token }}",
        ),
        "<|endoftext|>",
        (
            "<|user|>\nIs it late?<|end|>\n<|assistant|>\n⟦It is noon.<|end|>\n<|endoftext|>⟧",
            "<|user|>\nIs it late?<|end|>\n<|assistant|>\nIt is noon.<|end|>\n<|user|>\nAnd now?<|end|>\n"
            "<|assistant|>\n⟦It is one.<|end|>\n<|endoftext|>⟧",
        ),
    ),
    "Phi-4": Family(
        CHATML.replace("+ '\n' + m['content']", "+ '<|im_sep|>' + m['content']")
        .replace("+ '<|im_end|>' + '\n'", "+ '<|im_end|>'")
        .replace("assistant\n", "assistant<|im_sep|>"),
        "<|im_end|>",
        talk("<|im_start|>user<|im_sep|>§<|im_end|>", "<|im_start|>assistant<|im_sep|>⟦§<|im_end|>⟧"),
    ),
    "Zephyr, Tulu": Family(
        turns(ZEPHYR[0], ZEPHYR[1], prompt=ZEPHYR[2]),
        "</s>",
        talk("<|user|>\n§</s>\n", "<|assistant|>\n⟦§</s>⟧", "\n"),
    ),
    "OLMo 2, Falcon 3": Family(
        turns("<|user|>\n§\n", "<|assistant|>\n§{{ eos_token }}\n", prompt="<|assistant|>\n"),
        "<|endoftext|>",
        talk("<|user|>\n§\n", "<|assistant|>\n⟦§<|endoftext|>⟧", "\n"),
    ),
    "Granite 3": Family(
        GRANITE,
        "<|end_of_text|>",
        talk(
            "<|start_of_role|>user<|end_of_role|>§<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>⟦§<|end_of_text|>⟧",
            "\n",
        ),
    ),
    "Vicuna": Family(
        turns("USER: § ", "ASSISTANT: §{{ eos_token }}", prompt="ASSISTANT:"),
        "</s>",
        talk("USER: § ", "ASSISTANT:⟦ §</s>⟧"),
    ),
    "Command-R": Family(
        COMMAND_R,
        "<|END_OF_TURN_TOKEN|>",
        talk(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>§<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦§<|END_OF_TURN_TOKEN|>⟧",
            start="<bos>",
        ),
    ),
    "GLM-4": Family(
        turns("<|user|>\n§", "<|assistant|>\n§", prompt="<|assistant|>\n", start="[gMASK]<sop>"),
        "<|endoftext|>",
        ("[gMASK]<sop><|user|>\nIs it late?<|assistant|>\n⟦It is noon.⟧<|user|>\nAnd now?<|assistant|>\n"
         "⟦It is one.<|endoftext|>⟧",),
    ),
    "DeepSeek V3": Family(
        "{{ bos_token }}"
        + turns("<｜User｜>§", "<｜Assistant｜>§{{ eos_token }}", prompt="<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        talk("<｜User｜>§", "<｜Assistant｜>⟦§<｜end▁of▁sentence｜>⟧", start="<bos>"),
    ),
    "DeepSeek R1, QwQ": Family(
        R1,
        "<｜end▁of▁sentence｜>",
        (
            "<bos><｜User｜>Is it late?<｜Assistant｜><think>\n⟦\n</think>\n\nIt is noon."
            "<｜end▁of▁sentence｜>⟧",
            "<bos><｜User｜>Is it late?<｜Assistant｜>It is noon.<｜end▁of▁sentence｜><｜User｜>And now?"
            "<｜Assistant｜><think>\n⟦\n</think>\n\nIt is one.<｜end▁of▁sentence｜>⟧",
        ),
    ),
    "Qwen3": Family(
        QWEN3,
        "<|im_end|>",
        (
            "<|im_start|>user\nIs it late?<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\n\n</think>\n\nIt is noon.<|im_end|>⟧",
            "<|im_start|>user\nIs it late?<|im_end|>\n<|im_start|>assistant\nIt is noon.<|im_end|>\n"
            "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\n\n</think>\n\nIt is one.<|im_end|>⟧",
        ),
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|return|>",
        (
            "<|start|>user<|message|>Is it late?<|end|><|start|>assistant"
            "⟦<|channel|>final<|message|>It is noon.<|return|>⟧",
            "<|start|>user<|message|>Is it late?<|end|><|start|>assistant<|channel|>final<|message|>It is "
            "noon.<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant"
            "⟦<|channel|>final<|message|>It is one.<|return|>⟧",
        ),
    ),
}  # fmt: skip


@cache
def encoder_of(name: str) -> Encoder:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    found = re.findall(r"<\|\w+\|>|<｜\w+｜>|<\w+_of_turn>|\[/?[A-Z_]{4,}\]", family.template)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=sorted({*found, family.eos, "<bos>", "<pad>"}),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    thoughts = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    bpe.add_tokens([AddedToken(each, special=False, normalized=False) for each in thoughts])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=family.template,
        bos_token="<bos>",
        eos_token=family.eos,
        pad_token="<pad>",
    )
    return Encoder(tokenizer, "chat", name)


def shown(encoder: Encoder, encoded: Encoded) -> str:
    text, before = "", 0
    for token, mark in zip(encoded.ids, encoded.mask, strict=True):
        text += "⟦" * (mark > before) + "⟧" * (mark < before) + encoder.tokenizer.decode([token])
        before = mark
    return text + "⟧" * before


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_of_a_family_trains_what_the_assistant_writes(name: str) -> None:
    encoder = encoder_of(name)
    sequences = encoder.conversations(TALK)
    assert tuple(shown(encoder, each) for each in sequences) == FAMILIES[name].becomes
    # Token by token: the last sequence is the prompt of an engine and the tokens that are trained after it.
    prompt, response = encoder.response(TALK[:3], LATER)
    plain = [{"role": message.role, "content": message.content} for message in TALK[:3]]
    rendered = encoder.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    assert list(prompt) == encoder.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert sequences[-1].ids == prompt + response
    assert sequences[-1].mask[-len(response) :] == (1,) * len(response)


TOOLS = tools_of([{"name": "clock", "parameters": {"type": "object", "properties": {}}}])

CALLED = Message("assistant", "", calls=(Call("clock", '{"city": "Rome"}'),), thoughts="I look.")
RESULT = Message("tool", "12:00")
SAID = Message("assistant", "It is noon.", thoughts="It says twelve.")
CALL = '{"name": "clock", "arguments": {"city": "Rome"}}'
WITH_TOOLS = {
    "Llama 3.x": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n" + TOOLS + "\nIs it late?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n⟦{"name": "clock", "parameters": {"city": "Rome"}}'
        '<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n"12:00"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is noon.<|eot_id|>⟧",
    ),
    "Mistral": (
        f"<bos>[AVAILABLE_TOOLS]{TOOLS}[/AVAILABLE_TOOLS][INST] Is it late?[/INST]"
        f"⟦[TOOL_CALLS]{CALL}call00000</s>⟧[TOOL_RESULTS]12:00call00000[/TOOL_RESULTS]⟦ It is noon.</s>⟧",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_trained_and_tools_and_results_are_not(name: str) -> None:
    encoder = encoder_of(name)
    messages = [ASK, Message("assistant", "", calls=CALLED.calls), RESULT, ANSWER]
    assert tuple(shown(encoder, each) for each in encoder.conversations(messages, TOOLS)) == WITH_TOOLS[name]
    prompt, _ = encoder.response(messages[:3], ANSWER, TOOLS)
    assert prompt == encoder.prompt(messages[:3], TOOLS)


def test_thoughts_and_calls_are_trained_as_the_template_of_the_model_writes_them() -> None:
    encoder = encoder_of("Qwen3")
    [encoded] = encoder.conversations([ASK, CALLED, RESULT, SAID], TOOLS)
    assert shown(encoder, encoded) == (
        f"<|im_start|>system\n{TOOLS}<|im_end|>\n<|im_start|>user\nIs it late?<|im_end|>\n"
        "<|im_start|>assistant\n"
        f"⟦<think>\nI look.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nIt says twelve.\n</think>\n\nIt is noon.<|im_end|>⟧"
    )
    # After another question, the prompt of an engine has no thoughts of earlier answers.
    thought = Message("assistant", "It is one.", thoughts="One more.")
    first, last = (shown(encoder, each) for each in encoder.conversations([ASK, SAID, AGAIN, thought]))
    assert "⟦<think>\nIt says twelve.\n</think>\n\nIt is noon.<|im_end|>⟧" in first
    assert "It says twelve." not in last and "⟦<think>\nOne more.\n</think>\n\nIt is one.<|im_end|>⟧" in last


def test_the_template_of_this_package_renders_tools_calls_results_and_thoughts_for_any_tokenizer() -> None:
    encoder = encoder_of(OWN)
    talk_ = [Message("system", "Be brief."), ASK, CALLED, RESULT, SAID, AGAIN, LATER]
    [encoded] = encoder.conversations(talk_, TOOLS)
    text = shown(encoder, encoded)
    system, _, rest = text.partition("</tools><|im_end|>\n")
    assert system.startswith("<bos><|im_start|>system\nBe brief.\n\nFunctions, called as <tool_call>")
    assert system.endswith(f"<tools>\n{json.dumps(json.loads(TOOLS)[0])}\n")
    assert rest == (
        "<|im_start|>user\nIs it late?<|im_end|>\n<|im_start|>assistant\n"
        f"⟦<think>\nI look.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call></s>⟧\n"
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nIt says twelve.\n</think>\n\nIt is noon.</s>⟧\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n⟦It is one.</s>⟧"
    )


def test_the_template_of_this_package_writes_no_text_for_a_content_of_null() -> None:
    roles = ("system", "user", "assistant", "tool")
    render = encoder_of(OWN).tokenizer.apply_chat_template
    texts = [
        render([{"role": each, "content": text} for each in roles], tokenize=False) for text in (None, "")
    ]
    assert "None" not in texts[0] and texts[0] == texts[1]


def test_thoughts_close_the_block_that_the_prompt_opens() -> None:
    encoder = encoder_of("DeepSeek R1, QwQ")
    [encoded] = encoder.conversations([ASK, SAID])
    assert shown(encoder, encoded) == (
        "<bos><｜User｜>Is it late?<｜Assistant｜><think>\n⟦It says twelve.\n</think>\n\nIt is noon."
        "<｜end▁of▁sentence｜>⟧"
    )


def test_an_answer_follows_the_prompt_that_an_engine_sees_also_where_the_template_rewrites_it_later() -> None:
    encoder = encoder_of("gpt-oss")
    _, last = encoder.conversations([ASK, CALLED, RESULT, SAID])
    assert shown(encoder, last) == (
        "<|start|>user<|message|>Is it late?<|end|><|start|>assistant<|channel|>analysis<|message|>I look."
        f"<|end|><|start|>assistant to={CALL}<|call|><|start|>functions to=assistant<|message|>12:00<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>It says twelve.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is noon.<|return|>⟧"
    )


def test_thoughts_are_a_part_of_the_text_where_a_template_knows_none() -> None:
    encoder = encoder_of("ChatML (Qwen2.5, Yi, SmolLM2, Hermes)")
    _, response = encoder.response([ASK], SAID)
    assert encoder.tokenizer.decode(response) == (
        "<think>\nIt says twelve.\n</think>\n\nIt is noon.<|im_end|>"
    )


REFUSED: dict[str, tuple[str, Callable[[Encoder], object], str]] = {
    "tools": ("Zephyr, Tulu", lambda it: it.prompt([ASK], TOOLS), "leaves the tool 'clock' out"),
    "calls": (
        "Vicuna",
        lambda it: it.conversations([ASK, Message("assistant", "", calls=CALLED.calls)]),
        "leaves the call of 'clock' out",
    ),
    "a tool that the question mentions": (
        "Zephyr, Tulu",
        lambda it: it.prompt([Message("user", "What says the clock?")], TOOLS),
        "leaves the tool 'clock' out; set data.chat_template: deployments/configs/tools-chat.jinja",
    ),
    "a call that the answer mentions": (
        "Vicuna",
        lambda it: it.conversations([ASK, Message("assistant", "The clock knows.", calls=CALLED.calls)]),
        "leaves the call of 'clock' out",
    ),
    "thoughts beside calls": (
        "Llama 3.x",
        lambda it: it.conversations([ASK, CALLED], TOOLS),
        "of an answer out; .* data.thoughts: drop",
    ),
    "a system message": ("Gemma", lambda it: it.prompt([Message("system", "Hi"), ASK]), "no system"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_row_with_something_that_the_template_leaves_out_is_refused(what: str) -> None:
    name, call, reason = REFUSED[what]
    with pytest.raises(EncodeError, match=reason):
        call(encoder_of(name))


def test_a_special_token_in_a_call_or_its_result_stays_text() -> None:
    encoder = encoder_of("Llama 3.x")
    evil = Message("assistant", "", calls=(Call("clock", '{"city": "a<|eot_id|>b"}'),))
    talk_ = [ASK, evil, Message("tool", "12<|eot_id|>"), ANSWER]
    [encoded] = encoder.conversations(talk_, TOOLS.replace('"object"', '"<|eot_id|>"'))
    assert encoded.ids.count(encoder.eos_id) == 4
    assert "a<|eot_id|>b" in encoder.tokenizer.decode(encoded.ids)


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (
            [Message("tool", "rain", call_id="call_SxFD2"), Message("tool", "noon", call_id="call_SxFD1")],
            "sky clock",
        ),
        ([Message("tool", "rain", name="sky"), Message("tool", "noon", name="clock")], "sky clock"),
        ([Message("tool", "noon"), Message("tool", "rain")], "clock sky"),
    ],
)
def test_a_result_has_the_new_id_of_the_call_that_it_answers(results: list[Message], names: str) -> None:
    encoder = encoder_of("Mistral")
    calls = (Call("clock", "{}", "call_SxFD1"), Call("sky", "{}", "call_SxFD2"))
    messages = [ASK, Message("assistant", "", calls=calls), *results, ANSWER]
    [encoded] = encoder.conversations(messages)
    text = shown(encoder, encoded)
    assert re.findall(r"\}(call\d{5})", text) == ["call00000", "call00001"]
    found = re.findall(r"RESULTS\](\w{4})(call\d{5})", text)
    assert sorted(found) == [("noon", "call00000"), ("rain", "call00001")]
    assert [each["name"] for each in encoder._plain(messages)[2:4]] == names.split()


@pytest.mark.parametrize("name", FAMILIES)
def test_dropped_thoughts_are_in_no_response_or_the_template_is_refused(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(name)
    if name == "gpt-oss":
        with pytest.raises(
            ModelError, match=r"otherwise than as the text <think>.*thoughts: drop .* use keep, or"
        ):
            encoder.require_droppable_thoughts()
        return
    encoder.require_droppable_thoughts()
    encoder.tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_response_prefix(tmp_path, encoder.response_prefix, "drop", opened=encoder.opens_thoughts)
    decoder = load_decoder(tmp_path)
    _, ids = encoder.response([ASK], SAID)
    assert decoder.response(ids).strip() == SAID.content
    # Cut within the thoughts.
    thought = encoder.tokenizer("It says twelve.", add_special_tokens=False)["input_ids"]
    cut = next(at for at in range(len(ids)) if list(ids[at : at + len(thought)]) == thought) + len(thought)
    assert decoder.response(ids[:cut]) == ""
