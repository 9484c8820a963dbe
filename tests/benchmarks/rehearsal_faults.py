"""Planted faults that the checks before a run pass, and sound configurations, through `rlhf rehearse`.

    python -m tests.benchmarks.rehearsal_faults [--only NAME] [--whole] [--table]

A fault is named if a message of the rehearsal begins with the expected field and has a fix. One that
`rlhf plan` refuses, which makes all checks before a run, does not count: the program then ends with an error.
The layers that can show these faults are the checks of the rehearsal, before its run. `--whole` also runs
each case, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from typing_extensions import override

from rlhf_core.data.tokenizer import TINY_TEMPLATE, train_tokenizer
from rlhf_core.errors import RLHFError
from rlhf_core.ops.data_table import ROWS
from rlhf_core.ops.plan.plan import make_plan
from rlhf_core.ops.rehearse import Rehearsal, rehearse
from tests.support.chat_server import ChatServer, prefer_longer
from tests.support.tiny_llama import save_tiny_llama

RUN = [sys.executable, "-m", "rlhf_cli.main", "run"]
_PLACES = ("river", "market", "school", "garden", "harbour", "library", "station", "bakery", "castle")
_THINGS = ("lamp", "basket", "letter", "window", "ladder", "mirror", "bottle", "blanket")

Tree = dict[str, Any]


@dataclass
class Base:
    """What each case starts from: a model, rows, and a configuration that is sound."""

    folder: Path
    servers: ExitStack

    def tree(self) -> Tree:
        """Return a sound configuration: PPO with a rule, on the CPU."""
        rows = str(self.folder / "rows.jsonl")
        return {
            "run": {"name": "case", "home": str(self.folder / "home"), "device": "cpu", "threads": 1},
            "model": {"path": str(self.folder / "model")},
            # The same one for all cases: its tables take seconds.
            "tracking": {"uri": f"sqlite:///{self.folder.parent / 'mlflow.db'}"},
            "data": {
                "sft": [{"path": rows, "format": "completion", "rename": {"chosen": "completion"}}],
                "preference": [{"path": rows}],
                "prompts": [{"path": rows}],
                "max_prompt_tokens": 96,
                "max_response_tokens": 96,
                "max_text_tokens": 192,
            },
            "reward": {"enabled": False},
            "ppo": {
                "steps": 20,
                "prompts_per_step": 16,
                "minibatches": 4,
                "max_new_tokens": 48,
                "rewards": [{"type": "relevance"}],
            },
        }

    def template(self, text: str) -> str:
        return self.write("template.jinja", text)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text, encoding="utf-8")
        return str(self.folder / name)

    def python(self, body: str, **fields: Any) -> Tree:
        """Return the configuration with a reward function with this body."""
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        tree, file = self.tree(), self.write("own.py", f"def score(samples):\n{lines}\n")
        source = {"type": "python", "function": "own:score", "file": file, "retries": 0, **fields}
        tree["ppo"]["rewards"] = [source]
        return tree

    def grader(self, reply: Any, **fields: Any) -> Tree:
        """Return the configuration with a language model that replies so to each question."""
        server = self.servers.enter_context(ChatServer(reply if callable(reply) else lambda question: reply))
        tree = self.tree()
        source = {"type": "language_model", "url": server.url, "model": "judge", "retries": 0, **fields}
        tree["ppo"]["rewards"] = [source]
        return tree

    def judge(self, reply: Any) -> Tree:
        """Return the configuration with a judge of the evaluation that replies so."""
        server = self.servers.enter_context(ChatServer(reply if callable(reply) else lambda question: reply))
        tree = self.tree()
        tree["evaluate"] = {"language_model": {"url": server.url, "model": "judge", "retries": 0}}
        return tree

    def service(self, answer: Callable[[list[Any]], Any]) -> Tree:
        """Return the configuration with a remote reward."""
        tree, url = self.tree(), self.servers.enter_context(_server(_scores(answer)))
        tree["ppo"]["rewards"] = [{"type": "remote", "urls": [f"{url}/score"], "retries": 0}]
        return tree

    def tracker(self, refused: str, status: int = 403) -> Tree:
        """Return the configuration with an MLflow server that refuses a request."""
        tree, url = self.tree(), self.servers.enter_context(_server(_mlflow(refused, status)))
        tree["tracking"] = {"uri": url}
        return tree

    def hub(self, **settings: Any) -> Tree:
        """Return the configuration with a model of the hub, and other fields of its config.json."""
        file = self.folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        tree = self.tree()
        tree["model"] = {"path": "owner/model", "revision": "0" * 40}
        return tree


@dataclass(frozen=True)
class Case:
    """A fault, or a sound configuration."""

    name: str
    make: Callable[[Base], Tree]
    field: str = ""
    """Beginning of the expected message; empty for a sound configuration."""


# -- servers --


@contextmanager
def _server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(BaseHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, content: Any) -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")


def _scores(answer: Callable[[list[Any]], Any]) -> type[_Quiet]:
    class Handler(_Quiet):
        def do_POST(self) -> None:
            found = answer(self.body()["items"])
            self.answer(*(found if isinstance(found, tuple) else (200, {"scores": found})))

    return Handler


def _mlflow(refused: str, status: int) -> type[_Quiet]:
    made: list[str] = []

    class Handler(_Quiet):
        def respond(self) -> None:
            self.body()
            if refused in self.path:
                self.answer(status, {"error_code": "PERMISSION_DENIED", "message": "Permission denied"})
            elif "experiments/get-by-name" in self.path:
                self.answer(
                    200, {"experiment": {"experiment_id": "1", "name": "x", "lifecycle_stage": "active"}}
                )
            elif "registered-models/get" in self.path and not made:
                self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"})
            elif "model-versions/create" in self.path:
                self.answer(200, {"model_version": {"name": "x", "version": "1"}})
            elif "registered-models/" in self.path and "alias" not in self.path:
                made.append(self.path)
                self.answer(200, {"registered_model": {"name": "x"}})
            else:
                self.answer(200, {})

        do_GET = do_POST = do_PATCH = do_DELETE = respond

    return Handler


# -- faults --


def _template(text: str, **data: Any) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        tree["data"] |= {"chat_template": base.template(text), **data}
        return tree

    return make


_CONTENT = "{{ message['content'] | trim + eos_token }}"
_ASKED = "{{ message['content'] | trim }}"
_DOUBLED = TINY_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}", 1)
_BOS_AGAIN = TINY_TEMPLATE.replace(_ASKED, "{{ bos_token + (message['content'] | trim) }}", 1)


def _policy(**ppo: Any) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        tree["ppo"] |= ppo
        return tree

    return make


def _limits(**data: Any) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        tree["data"] |= data
        return tree

    return make


def _own_loss(body: str) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        file = base.write("own_loss.py", f"import torch\n\ndef loss(inputs):\n    {body}\n")
        tree["ppo"]["loss"] = {"type": "python", "function": "own_loss:loss", "file": file}
        return tree

    return make


def _own_advantages(body: str) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        file = base.write("own_adv.py", f"import torch\n\ndef advantages(inputs):\n    {body}\n")
        tree["ppo"] |= {"algorithm": "grpo", "samples_per_prompt": 4}
        tree["ppo"]["advantages"] = {"function": "own_adv:advantages", "file": file}
        return tree

    return make


def _hub_lora(base: Base) -> Tree:
    """Phi-3 has one layer for queries, keys and values."""
    tree = base.hub(model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0, sliding_window=None)
    tree["ppo"]["lora"] = {"r": 8, "targets": ["q_proj", "v_proj"]}
    return tree


def _hub_without_template(base: Base) -> Tree:
    tree = base.hub()
    (base.folder / "model" / "chat_template.jinja").unlink()
    return tree


def _hub_other_end(base: Base) -> Tree:
    tree = base.hub(eos_token_id=5)
    tree["sft"] = {"enabled": False}
    return tree


def _other_end(base: Base) -> Tree:
    tree = base.tree()
    file = base.folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 5}))
    tree["sft"] = {"enabled": False}
    return tree


def _dead_store(base: Base) -> Tree:
    """A bucket that ignores the condition of a conditional put."""
    from rlhf_core.storage.backend import LocalFiles

    def overwrite(self: Any, key: str, data: bytes) -> bool:
        self.put_bytes(key, data)
        return True

    base.servers.enter_context(mock.patch.object(LocalFiles, "put_if_absent", overwrite))
    return base.tree()


def _refusing_store(base: Base) -> Tree:
    from rlhf_core.errors import StoreError
    from rlhf_core.storage.backend import LocalFiles

    def refuse(self: Any, key: str, data: bytes) -> bool:
        raise StoreError("the bucket answers 501 NotImplemented to If-None-Match")

    base.servers.enter_context(mock.patch.object(LocalFiles, "put_if_absent", refuse))
    return base.tree()


_EACH = "[len(s.response) / 100 for s in samples]"
FAULTS: tuple[Case, ...] = (
    Case(
        "a template that cuts answers",
        _template(TINY_TEMPLATE.replace(_CONTENT, "{{ message['content'][:60] + eos_token }}")),
        "data.chat_template",
    ),
    Case(
        "a template that cuts questions",
        _template(TINY_TEMPLATE.replace(_ASKED, "{{ message['content'][:40] }}")),
        "data.chat_template",
    ),
    Case(
        "a template that replaces letters",
        _template(TINY_TEMPLATE.replace(_CONTENT, "{{ message['content'] | replace('r', '') + eos_token }}")),
        "data.chat_template",
    ),
    Case("a doubled BOS", _template(_DOUBLED), "data.chat_template"),
    Case("a BOS before each question", _template(_BOS_AGAIN), "data.chat_template"),
    Case("a limit that cuts answers", _limits(max_response_tokens=28), "data.max_response_tokens"),
    Case("an EOS that is never sampled", _other_end, "model.path"),
    Case("a hub model that ends with another token", _hub_other_end, "model.path"),
    Case("a hub model without a chat template", _hub_without_template, "model.path"),
    Case("a target module that the architecture lacks", _hub_lora, "ppo.lora.targets"),
    Case(
        "a hub model with a short context", lambda base: base.hub(max_position_embeddings=100), "model.path"
    ),
    Case("a hub model with a smaller vocabulary", lambda base: base.hub(vocab_size=200), "model.path"),
    Case(
        "a hub model with a narrow window",
        lambda base: base.hub(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64),
        "model.path",
    ),
    Case(
        "a hub model without a score class",
        lambda base: base.hub(model_type="mamba", architectures=["MambaForCausalLM"]),
        "--model",
    ),
    Case(
        "a reward that raises on row 57",
        lambda base: base.python("return [1 / (57 - int(s.meta['answer'])) for s in samples]"),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that fails on an empty answer",
        lambda base: base.python("return [s.response.count('a') / len(s.response) for s in samples]"),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that fails on a cut answer",
        lambda base: base.python("assert all(s.finished for s in samples)\nreturn " + _EACH),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that is NaN",
        lambda base: base.python("return [float('nan') if 'l' in s.response else 1.0 for s in samples]"),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that is always the same",
        lambda base: base.python("return [0.5 for s in samples]"),
        "ppo.rewards.0",
    ),
    Case("a reward with too few values", lambda base: base.python("return [1.0, 2.0]"), "ppo.rewards.0"),
    Case("a reward of texts", lambda base: base.python("return ['good' for s in samples]"), "ppo.rewards.0"),
    Case(
        "a reward that imports a missing package",
        lambda base: base.python("import no_such_package_here\nreturn " + _EACH),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that hangs",
        lambda base: base.python("import time\ntime.sleep(60)\nreturn " + _EACH, timeout=2),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that needs a field that no row has",
        lambda base: base.python("return [s.meta['gold'] for s in samples]"),
        "ppo.rewards.0",
    ),
    Case(
        "a reward whose masked answers starve a minibatch",
        lambda base: base.python(
            "return [float('nan') if i % 2 else float(i) for i, s in enumerate(samples)]", on_error="mask"
        ),
        "ppo.rewards.0",
    ),
    Case(
        "a reward that ends its process", lambda base: base.python("import os\nos._exit(1)"), "ppo.rewards.0"
    ),
    Case(
        "a service that fails",
        lambda base: base.service(lambda items: (500, {"error": "out of memory"})),
        "ppo.rewards.0",
    ),
    Case("a service with too few scores", lambda base: base.service(lambda items: [1.0]), "ppo.rewards.0"),
    Case(
        "a service that returns the same score",
        lambda base: base.service(lambda items: [0.0] * len(items)),
        "ppo.rewards.0",
    ),
    Case(
        "a service that is down",
        _policy(rewards=[{"type": "remote", "urls": ["http://127.0.0.1:9/score"], "retries": 0}]),
        "ppo.rewards.0",
    ),
    Case("a grader that answers nothing", lambda base: base.grader(""), "ppo.rewards.0"),
    Case(
        "a grader without grades",
        lambda base: base.grader("I think that this answer is fine."),
        "ppo.rewards.0",
    ),
    Case("a grader that gives everything a 7", lambda base: base.grader("7"), "ppo.rewards.0"),
    Case("a grader that refuses the key", lambda base: base.grader(401), "ppo.rewards.0"),
    Case("a judge that answers nothing", lambda base: base.judge(""), "evaluate.language_model"),
    Case("a judge whose model does not exist", lambda base: base.judge(404), "evaluate.language_model"),
    Case(
        "a pattern that no answer matches",
        _policy(rewards=[{"type": "format", "pattern": "<answer>\\d+</answer>"}]),
        "ppo.rewards.0",
    ),
    Case(
        "keywords that no answer has",
        _policy(rewards=[{"type": "keywords", "words": ["zeppelin"]}]),
        "ppo.rewards.0",
    ),
    Case(
        "a length that no answer reaches",
        _policy(rewards=[{"type": "length", "target": 5000, "tolerance": 10}]),
        "ppo.rewards.0",
    ),
    Case("a store that ignores conditional puts", _dead_store, "store.url"),
    Case("a store that refuses conditional puts", _refusing_store, "store.url"),
    Case(
        "a registry without the right to make models",
        lambda base: base.tracker("registered-models/create"),
        "tracking.uri",
    ),
    Case(
        "a registry without the right to make versions",
        lambda base: base.tracker("model-versions/create"),
        "tracking.uri",
    ),
    Case(
        "a registry without the right to set aliases",
        lambda base: base.tracker("registered-models/alias"),
        "tracking.uri",
    ),
    Case(
        "a loss that raises",
        _own_loss("return inputs.logprobs_BT.mean(), {'kl': inputs.kl_BT.mean()}"),
        "ppo.loss",
    ),
    Case(
        "a loss whose gradient is NaN",
        _own_loss("return inputs.mean((inputs.logprobs_BT - inputs.logprobs_BT).abs().sqrt()), {}"),
        "ppo.loss",
    ),
    Case(
        "advantages of another shape",
        _own_advantages("return inputs.scores_B.reshape(-1, 4).mean(1), {}"),
        "ppo.advantages",
    ),
)


# -- sound configurations --


def _answers(base: Base) -> Tree:
    tree = base.tree()
    tree["ppo"]["rewards"] = [{"type": "answer"}]
    return tree


def _with_reward(**reward: Any) -> Callable[[Base], Tree]:
    def make(base: Base) -> Tree:
        tree = base.tree()
        tree["reward"] = reward
        tree["ppo"]["rewards"] = [{"type": "model"}]
        return tree

    return make


def _of_gpus(base: Base) -> Tree:
    tree = base.hub()
    sharded = {"ranks": 8, "zero_stage": 3, "dtype": "bfloat16", "gradient_checkpointing": True}
    tree["run"]["device"] = "cuda"
    tree["sft"] = {"deepspeed": sharded, "batch_size": 128}
    tree["ppo"] |= {"prompts_per_step": 512, "colocate": "all"}
    tree["ppo"] |= {"policy_deepspeed": sharded, "critic_deepspeed": sharded}
    tree["ppo"]["engine"] = {"count": 8, "dtype": "bfloat16", "sleep_level": 1, "gpu_memory_utilization": 0.4}
    return tree


def _adapters(base: Base) -> Tree:
    tree = base.hub()
    tree["sft"] = {"lora": {"r": 8}}
    tree["ppo"] |= {"lora": {"r": 8}}
    return tree


_GROUPS = {"algorithm": "grpo", "samples_per_prompt": 4}


def _comparing(base: Base) -> Tree:
    """With prompts that no pair has."""
    tree = base.grader(prefer_longer, compare="pairs", max_tokens=64)
    tree["ppo"] |= _GROUPS
    rows = [{"prompt": f"Tell me what the {place} has for visitors."} for place in _PLACES for _ in range(4)]
    for number, row in enumerate(rows):
        row["prompt"] += f" Number {number}."
    tree["data"]["prompts"] = [{"path": base.write("asked.jsonl", "\n".join(map(json.dumps, rows)))}]
    return tree


SOUND: tuple[Case, ...] = (
    Case("PPO with a rule", Base.tree),
    Case("PPO with a reward model", _with_reward()),
    Case("a reward model and a judge", _with_reward(judge={})),
    Case("an ensemble", _with_reward(ensemble={"members": 3})),
    Case("GRPO", _policy(**_GROUPS)),
    Case("RLOO with filters", _policy(algorithm="rloo", samples_per_prompt=8, dynamic_filtering={})),
    Case("REINFORCE++ in float32", _policy(algorithm="reinforce_pp")),
    Case("GSPO", _policy(**_GROUPS, loss={"type": "gspo"})),
    Case("staleness", _policy(staleness=2, steps=40)),
    Case("a pretraining loss", _policy(ptx={"coef": 0.1})),
    Case("answers of problems", _answers),
    Case(
        "a format that answers do not have yet",
        _policy(rewards=[{"type": "relevance"}, {"type": "format", "pattern": "<a>.*</a>", "weight": 0.2}]),
    ),
    Case("a reward function", lambda base: base.python("return " + _EACH)),
    Case("a service", lambda base: base.service(lambda items: [float(i % 7) for i, _ in enumerate(items)])),
    Case("a grader", lambda base: base.grader(lambda question: str(1 + len(question) % 9))),
    Case("a reward that compares", _comparing),
    Case("a judge", lambda base: base.judge("A")),
    Case("an own loss", _own_loss("return inputs.mean(-inputs.advantages_BT * inputs.logprobs_BT), {}")),
    Case("an own template", _template(TINY_TEMPLATE.replace("<|assistant|>", "<|assistant|>"))),
    Case("plain text", _limits(template="plain")),
    Case("8 GPUs, ZeRO-3, colocated, hub model", _of_gpus),
    Case("adapters of a hub model", _adapters),
)


# -- the program --


def prepare(folder: Path) -> None:
    """Write model, tokenizer and rows."""
    rows = []
    for number in range(140):
        place, thing = _PLACES[number % 9], _THINGS[number % 8]
        rows.append(
            {
                "prompt": f"Where is the {thing} of house {number}, near the {place}?",
                "chosen": f"The {thing} is behind the {place}, "
                + "to the left of the door. " * (1 + number % 4),
                "rejected": f"I have lost number {number} of the {place}.",
                "answer": str(number),
            }
        )
    text = [" ".join(str(value) for value in row.values()) for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(text, 400)
    model = folder / "model"
    save_tiny_llama(
        model,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(model)


def try_case(case: Case, place_of_all: str, *, whole: bool) -> tuple[str | None, Rehearsal | None]:
    """Return why the checks before a run refuse a case, or None, and what its rehearsal found."""
    with tempfile.TemporaryDirectory(dir=place_of_all) as name, ExitStack() as servers:
        folder = Path(name)
        prepare(folder)
        tree = case.make(Base(folder, servers))
        file = folder / "case.yaml"
        file.write_text(yaml.safe_dump(tree))
        is_hub = tree["model"]["path"] == "owner/model"
        gpus = "8xA100-80G" if tree["run"]["device"] == "cuda" else None
        shape = str(folder / "model" / "config.json") if is_hub else None
        try:
            make_plan(file, (), gpus, shape, rows=ROWS)
        except RLHFError as error:
            return error.message, None
        place = folder / "place"
        place.mkdir()
        model = folder / "model" if is_hub else None
        try:
            found = rehearse(str(file), (), place, RUN if whole else (), model=model, gpus=gpus)
        except RLHFError as error:
            found = Rehearsal([], problems=error.message.splitlines())
        return None, found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these texts in their name")
    parser.add_argument("--whole", action="store_true", help="with the runs, minutes for each case")
    parser.add_argument("--table", action="store_true", help="print the faults as Markdown")
    given = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as place:
        return _try_all(given, place)


def _try_all(given: argparse.Namespace, place: str) -> int:
    wrong = named = passed = 0
    if given.table:
        print("| fault | named by |\n|---|---|")
    for case in (*FAULTS, *SOUND):
        if given.only and not any(text in case.name for text in given.only):
            continue
        started = time.monotonic()
        refused, found = try_case(case, place, whole=given.whole)
        seconds = time.monotonic() - started
        problems = [] if found is None else found.problems
        if refused is not None:
            wrong += 1
            print(f"REFUSED BEFORE  {case.name}: {refused}", flush=True)
            continue
        if case.field:
            hit = next((text for text in problems if text.startswith(case.field) and ";" in text), None)
            named += hit is not None
            state = "named " if hit else "MISSED"
            text = hit or "; ".join(problems) or "nothing"
        else:
            passed += not problems
            state, text = ("passed", "") if not problems else ("ALARM ", "; ".join(problems))
        if given.table:
            if case.field:
                print(f"| {case.name} | `{text.partition(':')[0]}` |", flush=True)
        else:
            print(f"{state} {seconds:4.0f} s  {case.name}: {text[:400]}", flush=True)
    if not given.only:
        print(f"{named} of {len(FAULTS)} faults named, {passed} of {len(SOUND)} sound configurations pass")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
