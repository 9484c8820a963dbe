"""What a rehearsal looks at besides the run itself: store, registry, rows with their template, and rewards.

Each check returns messages in the form of all others: field, rule, value, fix. They are cheap, and run before
anything is trained.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import TEXT, SetName
from rlhf_core.config.evaluate import LanguageModelConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.rewards import ExternalReward
from rlhf_core.data.messages import Message
from rlhf_core.data.prepare import Prepared, read_and_encode
from rlhf_core.errors import RLHFError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.ops.check_reward import score_card
from rlhf_core.rewards.chat_service import ModelReply, ask_service
from rlhf_core.rewards.check import functions_of_ppo
from rlhf_core.rewards.questions import FIELD, Pair, letter_of, questions_of, rubric_text
from rlhf_core.storage.store import open_store
from rlhf_core.tracking.tracker import open_tracking

_TOO_LONG = 0.2
"""Share of the rows from which a limit takes too much. The longest rows are among them."""
_UNSCORED = 0.1
"""Share of masked responses from which minibatches become too small."""
_PROBED = 1500
"""Characters of a long answer."""
_CONDITIONAL = "use a store with conditional puts (If-None-Match), or a folder"
_PAIR = Pair("What is 2 + 3?", "2 + 3 is 5.", "I do not know.")
_SCORED = 64
"""Prompts whose answers each reward scores."""


def check_store(config: PipelineConfig) -> Iterator[str]:
    """Yield what the store does not do: creating an object only once, and giving it back."""
    store, key = open_store(config), f"rehearsal-{uuid.uuid4().hex}"
    try:
        first, second = store.put_if_absent(key, b"first"), store.put_if_absent(key, b"second")
        content = store.read_bytes(key)
        store.delete([key])
    except RLHFError as error:
        yield f"store.url: {config.store_url} must create an object; got: {error.message}; {_CONDITIONAL}"
        return
    if not first or second or content != b"first":
        yield (
            f"store.url: {config.store_url} must refuse to create an object that exists, because of two"
            f" processes only one may commit; got a second one that replaced the first; {_CONDITIONAL}"
        )


def check_registry(config: PipelineConfig) -> Iterator[str]:
    """Yield why the registry takes no version of a model."""
    name = config.registered_model
    mlflow = open_tracking(config).mlflow
    try:
        mlflow.prepare()
        mlflow.ensure_model(name, "Versions of rehearsals (`rlhf rehearse`); it can be deleted.")
        version = mlflow.create_version(
            name, source=str(Path(config.run.home).resolve()), run_id=None, tags={}, description="A probe."
        )
        mlflow.set_alias(name, "probe", version.version)
        mlflow.delete_alias(name, "probe")
    except Exception as error:  # the client raises those of four libraries
        yield (
            f"tracking.uri: the registry at {mlflow.uri} must take a version of {name}; got"
            f" {type(error).__name__}: {str(error)[:200]}; give this user the right to register models, or"
            " name another server"
        )


def read(config: PipelineConfig, place: Path) -> Prepared:
    """Read and encode the rows of a rehearsal as the stage `data` does. Raises its errors."""
    contents = {f"data.{name}[{index}]": None for name, index, _ in config.data.sources()}
    place.mkdir(parents=True, exist_ok=True)
    return read_and_encode(config, place, lambda done, total: None, contents)


def _examples(prepared: Prepared, name: SetName) -> list[Any]:
    """Return the encoded rows of a set, training and held out."""
    return [item.example for split in prepared.splits[name].values() for item in split]


def check_rows(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield what is wrong with the rendered rows."""
    yield from _special_tokens(config, prepared)
    if config.data.template == "chat":
        yield from _template(prepared)
    yield from _lengths(config, prepared)


def _special_tokens(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Check that sequences have one BOS, and that the model ends with the EOS of its tokenizer."""
    tokenizer = prepared.encoder.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = (*_examples(prepared, "prompts"), *_examples(prepared, "sft"))
    doubled = sum(each.input_ids.count(bos) > 1 for each in rows)
    if bos not in (None, eos) and doubled:
        field = "data.chat_template" if config.data.chat_template else "model.path (its chat template)"
        yield (
            f"{field}: a sequence must have {tokenizer.bos_token} once; got it more often in {doubled} of"
            f" {len(rows)} rows; write it once in the template, or remove it from the texts"
        )
    if config.model.path is None or config.sft.enabled:
        return
    own = ModelFolder(config.model.path).text_config.get("eos_token_id")
    ends = own if isinstance(own, list) else [own]
    if own is not None and eos not in ends:
        yield (
            f"model.path: the model ends with {tokenizer.convert_ids_to_tokens(ends)} (eos_token_id of"
            f" config.json), but its tokenizer has {tokenizer.eos_token}, at which the engines stop; name"
            " the same token as eos_token in tokenizer_config.json, or train it with sft.enabled=true"
        )


def _template(prepared: Prepared) -> Iterator[str]:
    """Check with a long answer that the template loses no text, and that masks begin where prompts end."""
    encoder = prepared.encoder
    text = " ".join(each.prompt for each in _examples(prepared, "prompts"))[:_PROBED] or "It is noon."
    # As far as the tokenizer has these characters.
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    text = encoder.tokenizer.decode(ids, skip_special_tokens=True).strip()
    ask, answer = Message("user", text), Message("assistant", text)
    try:
        prompt, response = encoder.response([ask], answer)
        whole = encoder.conversations([ask, answer])[0]
    except ValueError as error:
        yield f"data.chat_template: it must render a long answer; got: {error}; correct it"
        return
    for what, ids in {"the user's message": prompt, "the assistant's answer": response}.items():
        if _letters(text) not in _letters(encoder.tokenizer.decode(list(ids))):
            yield (
                f"data.chat_template: it must render the whole text; got a part of {what}, which has"
                f" {len(text)} characters; remove what cuts or changes it from the template"
            )
    start = whole.mask.index(1) if 1 in whole.mask else len(whole.mask)
    if whole.ids[:start] != prompt:
        yield (
            f"data.chat_template: the prompt must end where what is learned begins; got a prompt of"
            f" {len(prompt)} tokens, and the first learned token at {start}; put {{% generation %}} right"
            " after what add_generation_prompt writes"
        )


def _letters(text: str) -> str:
    return "".join(text.casefold().split())


def _lengths(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Check that the limits take few rows."""
    table = prepared.lengths.table(config.given_limits, prepared.limits)
    for row in table:
        if row["longer"] and row["longer"] >= _TOO_LONG * row["rows"]:
            fate = "cut" if row["field"] == TEXT else "left out"
            why = prepared.lengths.why(row["field"], [row["set"]], config.given_limits, prepared.limits)
            yield (
                f"{row['field']}: with the template, {row['longer']} of {row['rows']} rows of"
                f" data.{row['set']} are longer than {row['tokens']} tokens and {fate}; {why}"
            )


def check_functions(config: PipelineConfig) -> Iterator[str]:
    """Yield what is wrong with the user's loss and advantages, which get random numbers."""
    for field in functions_of_ppo(config):
        try:
            _compute_loss(config.ppo) if field == "ppo.loss" else _compute_advantages(config.ppo)
        except Exception as error:  # code of a user can raise any
            yield f"{field}: it must compute with random numbers; got {_said(error)}; correct it"


def _compute_loss(ppo: PPOConfig) -> None:
    import torch

    from rlhf_core.algo.losses import LossInputs
    from rlhf_core.ppo.training.loss_step import loss_of

    torch.manual_seed(0)
    logprobs_BT = (-torch.rand(4, 8)).requires_grad_()
    old_BT, ones_BT = logprobs_BT.detach() + 0.01, torch.ones(4, 8)
    inputs = LossInputs(
        logprobs_BT, old_BT, old_BT, torch.randn(4, 8), ones_BT, ones_BT.bool(), ppo.loss_sum, 32.0
    )
    loss, _ = loss_of(ppo)(inputs)
    loss.backward()
    gradient_BT = logprobs_BT.grad
    if not loss.isfinite() or (gradient_BT is not None and not gradient_BT.isfinite().all()):
        raise ValueError(f"loss {loss.item():g} and gradient {gradient_BT} must be finite")


def _compute_advantages(ppo: PPOConfig) -> None:
    import torch

    from rlhf_core.algo.advantages import AdvantageInputs
    from rlhf_core.ppo.training.experience import own_advantages_of

    compute = own_advantages_of(ppo)
    assert compute is not None
    number_B = torch.arange(2 * ppo.samples_per_prompt)
    group_B = number_B // ppo.samples_per_prompt
    compute(AdvantageInputs(torch.randn(len(number_B)), group_B, number_B + 1, number_B % 2 == 0))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def check_rewards(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield the sources of rewards that fail on answers of the rows, or give all of them the same value."""
    if not config.ppo.enabled:
        return
    sources = {each.used_name: (f"ppo.rewards.{n}", each) for n, each in enumerate(config.ppo.rewards)}
    try:
        card = score_card(config, prepared, _SCORED, checks=("constant", "cut"))
    except RLHFError as error:
        yield f"ppo.rewards: {error.message}"
        return
    constant = {found.source for found in card.findings if found.check == "constant"}
    for found in card.findings:
        field, source = sources[found.source]
        is_external, is_constant = isinstance(source, ExternalReward), found.check == "constant"
        # A format that no answer of the rows has is sound beside another reward.
        adds_nothing_yet = is_constant and not is_external and len(constant) < len(sources)
        may_be_masked = not is_constant and getattr(source, "on_error", None) == "mask"
        few = may_be_masked and card.unscored[found.source] <= _UNSCORED
        if found.check == "cut" or adds_nothing_yet or few:
            continue
        yield (
            f"{field} ({found.source}): it must score answers of the rows, and tell them apart; got"
            f" {found.check}: {found.evidence}; correct it, see rlhf check-reward"
        )


def check_judge(settings: LanguageModelConfig) -> Iterator[str]:
    """Ask the language model of the evaluation about one pair, if it is at an address."""
    if settings.url is None:
        return
    replies: list[ModelReply] = []
    questions = questions_of(rubric_text(settings.rubric), _PAIR)
    try:
        ask_service(FIELD, settings, questions, lambda question, reply: replies.append(reply))
    except RLHFError as error:
        yield f"{FIELD}.url: the judge must answer; got: {error.message}; start it, or correct the address"
        return
    if all(reply.is_cut or letter_of(reply.text) is None for reply in replies):
        yield (
            f"{FIELD}.model: it must end its reply with A, B or C; got {replies[0].text[-60:]!r}; raise"
            f" {FIELD}.max_tokens, or correct its rubric"
        )
