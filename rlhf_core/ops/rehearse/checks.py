"""What a rehearsal looks at besides the run itself: store, registry, rows with their template, and rewards.

Each check returns messages in the form of all others: field, rule, value, fix. They are cheap, and run before
anything is trained.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import TEXT
from rlhf_core.config.evaluate import LanguageModelConfig
from rlhf_core.config.ppo_sections import PythonLoss
from rlhf_core.config.rewards import AnswerReward, AnyReward, ExternalReward, LanguageModelReward, ModelReward
from rlhf_core.data.messages import Message
from rlhf_core.data.prepare import Prepared, read_and_encode
from rlhf_core.errors import RewardError, RLHFError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.rewards.chat_service import ModelReply, ask_service
from rlhf_core.rewards.compose import RewardComposer, reward_input
from rlhf_core.rewards.questions import FIELD, Pair, letter_of, questions_of, rubric_text
from rlhf_core.storage.store import open_store
from rlhf_core.tracking.tracker import open_tracking
from rlhf_core.types import PairExample, PromptExample, RewardInput, SFTExample

_TOO_LONG = 0.2
"""Share of the rows from which a limit takes too much. The longest rows are among them."""
_UNSCORED = 0.1
"""Share of responses without a value from which minibatches become too small."""
_UNUSABLE = 0.5
"""Share of replies without a grade from which a judge answers nothing."""
_EOS = 0.5
"""Share of demonstrations that must end with EOS."""
_PROBED = 1500
"""Characters of a long answer."""
_CONDITIONAL = "use a store with conditional puts (If-None-Match), or a folder"
_SCORED = 64
"""Responses that each reward scores."""


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


@dataclass(frozen=True)
class _Rows:
    """The encoded rows of each set, training and held out."""

    sft: list[SFTExample]
    pairs: list[PairExample]
    prompts: list[PromptExample]

    @classmethod
    def of(cls, prepared: Prepared) -> _Rows:
        def examples(name: Any) -> list[Any]:
            return [item.example for split in prepared.splits[name].values() for item in split]

        return cls(examples("sft"), examples("preference"), examples("prompts"))


def check_rows(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield what is wrong with the rendered rows."""
    rows = _Rows.of(prepared)
    yield from _special_tokens(config, prepared, rows)
    if config.data.template == "chat":
        yield from _template(prepared, rows)
    yield from _lengths(config, prepared)


def _template_field(config: PipelineConfig) -> str:
    return "model.path (its chat template)" if config.data.chat_template is None else "data.chat_template"


def _special_tokens(config: PipelineConfig, prepared: Prepared, rows: _Rows) -> Iterator[str]:
    """Check BOS at the beginning of prompts, and EOS at the end of demonstrations."""
    tokenizer, field = prepared.encoder.tokenizer, _template_field(config)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = [each.input_ids for each in rows.prompts] + [each.input_ids for each in rows.sft]
    if bos is not None and bos != eos and begins:
        most = max(ids.count(bos) for ids in begins)
        if most > 1:
            share = sum(ids.count(bos) > 1 for ids in begins) / len(begins)
            yield (
                f"{field}: a sequence must have {tokenizer.bos_token} once; got it {most} times, in"
                f" {share:.0%} of the rows; write it once in the template, or remove it from the texts"
            )
    learned = [
        [token for token, mask in zip(each.input_ids, each.loss_mask, strict=True) if mask]
        for each in rows.sft
    ]
    limit = prepared.limits.text
    ended = [eos in ids for ids, each in zip(learned, rows.sft, strict=True) if len(each.input_ids) < limit]
    if config.sft.enabled and ended and sum(ended) < _EOS * len(ended):
        yield (
            f"{field}: what demonstrations teach must end with {tokenizer.eos_token}; got it in"
            f" {sum(ended)} of {len(ended)} rows; write eos_token after each answer, inside of the generation"
            " marks, or the policy will never end a response"
        )
    if config.model.path is None:
        return
    settings = ModelFolder(config.model.path).text_config
    own = settings.get("eos_token_id")
    ends = own if isinstance(own, list) else [own]
    if own is not None and eos not in ends and not config.sft.enabled:
        yield (
            f"model.path: the model ends with {tokenizer.convert_ids_to_tokens(ends)} (eos_token_id of"
            f" config.json), but its tokenizer has {tokenizer.eos_token}, at which the engines stop; name"
            " the same token as eos_token in tokenizer_config.json, or train it with sft.enabled=true"
        )


def _template(prepared: Prepared, rows: _Rows) -> Iterator[str]:
    """Check with a long answer that the template loses no text, and that masks begin where prompts end."""
    encoder = prepared.encoder
    tokenizer = encoder.tokenizer
    text = " ".join(each.prompt for each in rows.prompts)[:_PROBED] or "It is noon."
    # As far as the tokenizer has these characters.
    text = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
    ask, answer = Message("user", text.strip()), Message("assistant", text.strip())
    field = "data.chat_template"
    try:
        prompt, response = encoder.response([ask], answer)
        # One whose second question has another beginning than the first.
        whole = encoder.conversations([ask, answer])[0]
    except ValueError as error:
        yield f"{field}: it must render a long answer; got: {error}; correct it"
        return
    wanted = _letters(text)
    parts = {"the user's message": prompt, "the assistant's answer": response}
    for what, ids in parts.items():
        found = _letters(tokenizer.decode(list(ids)))
        if wanted not in found:
            kept = next((end for end in range(len(wanted)) if wanted[: end + 1] not in found), 0)
            yield (
                f"{field}: it must render the whole text; got {kept} of {len(wanted)} characters of {what};"
                " remove what cuts or changes it from the template"
            )
    start = whole.mask.index(1) if 1 in whole.mask else len(whole.mask)
    if start != len(prompt) or whole.ids[:start] != prompt:
        yield (
            f"{field}: the generation prompt must end where what is learned begins; got a prompt of"
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
            fate = "cut, so that their end is not learned" if row["field"] == TEXT else "left out"
            why = prepared.lengths.why(row["field"], [row["set"]], config.given_limits, prepared.limits)
            yield (
                f"{row['field']}: with the template, {row['longer']} of {row['rows']} rows of"
                f" data.{row['set']} are longer than {row['tokens']} tokens and {fate}; {why}"
            )


# -- functions of users --


def check_functions(config: PipelineConfig) -> Iterator[str]:
    """Yield what is wrong with the user's loss and advantages, which get random numbers."""
    import torch

    from rlhf_core.algo.advantages import AdvantageInputs
    from rlhf_core.algo.losses import LossInputs
    from rlhf_core.ppo.training.experience import own_advantages_of
    from rlhf_core.ppo.training.loss_step import loss_of

    ppo = config.ppo
    generator = torch.Generator().manual_seed(config.run.seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if isinstance(ppo.loss, PythonLoss):
        logprobs_BT = (-numbers(4, 8).abs()).requires_grad_()
        mask_BT = torch.ones(4, 8, dtype=torch.bool)
        old_BT, weights_BT = logprobs_BT.detach() + 0.01 * numbers(4, 8), torch.ones(4, 8)
        inputs = LossInputs(
            logprobs_BT, old_BT, old_BT, numbers(4, 8), weights_BT, mask_BT, ppo.loss_sum, 32.0
        )
        try:
            loss, _ = loss_of(ppo)(inputs)
            loss.backward()
            values = [loss.detach(), *(() if logprobs_BT.grad is None else (logprobs_BT.grad,))]
            if not all(bool(each.isfinite().all()) for each in values):
                yield f"ppo.loss: loss and gradient must be finite; got {loss.item():g}; correct it"
        except Exception as error:  # code of a user can raise any
            yield f"ppo.loss: it must compute a loss; got {_said(error)}; correct it"
    if ppo.advantages is not None:
        scores_B = numbers(2 * ppo.samples_per_prompt)
        count = len(scores_B)
        responses = AdvantageInputs(
            scores_B,
            torch.arange(count) // ppo.samples_per_prompt,
            torch.arange(1, count + 1),
            torch.arange(count) % 2 == 0,
        )
        try:
            compute = own_advantages_of(ppo)
            assert compute is not None
            compute(responses)
        except Exception as error:  # code of a user can raise any
            yield f"ppo.advantages: it must compute advantages; got {_said(error)}; correct it"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


# -- rewards --


def check_rewards(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield the sources of rewards that raise, have no value or always the same, and judges that do not
    answer. They score answers of the rows.
    """
    rows = _Rows.of(prepared)
    batch = _answers(config, prepared, rows)
    constant = []
    for index, source in enumerate(config.ppo.rewards):
        if isinstance(source, ModelReward) or not config.ppo.enabled:
            continue
        field = f"ppo.rewards.{index}"
        problem, values = _scored(field, source, batch)
        if problem is not None:
            yield problem
        elif len({round(value, 9) for value in values}) == 1:
            constant.append((field, source, values[0]))
    varies = len(constant) < len(config.ppo.rewards)
    for field, source, value in constant:
        if isinstance(source, ExternalReward) or not varies:
            yield (
                f"{field} ({source.used_name}): it must tell answers apart; got {value:g} for all"
                f" {len(batch)} different answers of the rows; correct it, or leave it out"
            )


def _answers(config: PipelineConfig, prepared: Prepared, rows: _Rows) -> list[RewardInput]:
    """Return prompts with answers of the rows, their own ones and those of others, an empty and a cut one."""
    tokenizer, eos = prepared.encoder.tokenizer, prepared.encoder.eos_id
    own = {pair.prompt_id: [pair.chosen_ids, pair.rejected_ids] for pair in rows.pairs}
    others = [ids for pair in rows.pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    for row in rows.sft:
        learned = tuple(token for token, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask)
        others.append((*learned[:512], eos))

    def tokens(text: str) -> tuple[int, ...]:
        return (*tokenizer(text, add_special_tokens=False)["input_ids"], eos)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    fields = [source.field for source in config.ppo.rewards if isinstance(source, AnswerReward)]
    batch = []
    for number, prompt in enumerate(rows.prompts[:_SCORED]):
        given = list(own.get(prompt.prompt_id, ()))
        given += [tokens(f"The answer is {prompt.meta[name]}.") for name in fields if name in prompt.meta]
        # Two, because rewards may compare the responses to a prompt.
        given += [others[(number + at) % len(others)] for at in range(min(2, len(others)))]
        if not given:
            given = [tokens(prompt.prompt)]
        batch += [reward_input(prompt, ids, True, decode) for ids in given]
        if number == 0:
            batch.append(reward_input(prompt, (eos,), True, decode))
            batch.append(reward_input(prompt, given[0][: len(given[0]) // 2] or (eos,), False, decode))
    return batch


def _scored(field: str, source: AnyReward, batch: list[RewardInput]) -> tuple[str | None, list[float]]:
    """Return what is wrong with a source, or None, and its values."""
    name = source.used_name
    try:
        with RewardComposer((source,)) as composer:
            scored = composer.score(batch, None)
    except RLHFError as error:
        fix = "correct it" if isinstance(error, RewardError) else "correct the source"
        return f"{field} ({name}): it must score answers of the rows; got: {error.message}; {fix}", []
    values = scored.by_source[name]
    present = [value for value in values if not math.isnan(value)]
    missing = len(values) - len(present)
    metrics = scored.usage_metrics()
    if isinstance(source, LanguageModelReward) and metrics.get(f"{name}/unusable", 0.0) >= _UNUSABLE:
        return (
            f"{field}.model ({name}): the judge must reply with a grade; got none in"
            f" {metrics[f'{name}/unusable']:.0%} of {metrics[f'{name}/requests']:.0f} replies; raise"
            f" {field}.max_tokens, or correct its rubric",
            [],
        )
    if missing > _UNSCORED * len(values):
        return (
            f"{field}.on_error ({name}): masked responses must be few, because minibatches lack them; got"
            f" {missing} of {len(values)} without a value; correct the source",
            [],
        )
    return None, present


def check_judge(settings: LanguageModelConfig, prepared: Prepared) -> Iterator[str]:
    """Ask the language model of the evaluation about one pair, if it is at an address."""
    pairs = _Rows.of(prepared).pairs
    if settings.url is None or not pairs:
        return
    pair, decode = pairs[0], prepared.encoder.tokenizer.decode
    asked = Pair(
        pair.prompt,
        decode(list(pair.chosen_ids), skip_special_tokens=True),
        decode(list(pair.rejected_ids), skip_special_tokens=True),
    )
    replies: list[str] = []

    def keep(question: str, reply: ModelReply) -> None:
        replies.append("" if reply.is_cut else reply.text)

    try:
        ask_service(FIELD, settings, questions_of(rubric_text(settings.rubric), asked), keep)
    except RLHFError as error:
        yield f"{FIELD}.url: the judge must answer; got: {error.message}; start it, or correct the address"
        return
    if not any(letter_of(reply) for reply in replies):
        yield (
            f"{FIELD}.model: the judge must end its reply with A, B or C; got {replies[0][-60:]!r}; raise"
            f" {FIELD}.max_tokens, or correct its rubric"
        )
