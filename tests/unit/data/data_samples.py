"""Texts, templates and a writer that the tests of the data layer share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEXTS = [
    "Tell me about a small fox in the garden. The small fox plays in the garden. It is kind and gentle.",
    (
        "Is it late? It is noon. One day, a little girl named Lily found a needle in her room, and she was"
        " happy."
    ),
    "What is the sum of two and three? The answer is five. User: Assistant: system prompt.",
]

SENTENCEPIECE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + m['content'] | trim + eos_token }}{% endgeneration %}"
    "{% elif m['role'] == 'user' %}{{ 'User: ' + m['content'] | trim + ' Assistant:' }}"
    "{% else %}{{ m['content'] | trim + ' ' }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
