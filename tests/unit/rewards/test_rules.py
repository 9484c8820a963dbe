"""The rule rewards.

- each rule's value on small responses, computed by hand
- edge cases: empty responses, prompts without content words, other scripts
- a pattern that takes too long is stopped and counts as no match
- each rule tells a loop, an empty, a right and a wrong answer apart in scripts with and without blanks
- a pattern has the meaning of Python's `re` with DOTALL, unless it has syntax of the package `regex`; a brace
  that begins no repetition is refused
"""

import dataclasses
import re
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.rewards import (
    AnyReward,
    FormatReward,
    GoldReward,
    KeywordsReward,
    LengthReward,
    RelevanceReward,
    RepetitionReward,
    TokenShareReward,
    WellFormedReward,
    compiled,
    pattern_problem,
)
from rlhf_core.data.synthetic import gold_reward
from rlhf_core.rewards import rules
from rlhf_core.types import RewardInput


def sample(
    response: str = "", *, prompt: str = "", ids: tuple[int, ...] = (), finished: bool = True
) -> RewardInput:
    return RewardInput("p1", prompt, response, (1,), ids, finished)


@pytest.mark.parametrize(
    ("tokens", "value"), [(10, 1.0), (8, 0.5), (12, 0.5), (13, 0.25), (14, 0.0), (40, 0.0), (0, 0.0)]
)
def test_length_falls_linearly_from_the_target_to_zero(tokens: int, value: float) -> None:
    source = LengthReward(type="length", target=10, tolerance=4)
    assert rules.length(source, sample(ids=(5,) * tokens)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a happy dog", 2.0),
        ("Happy, HAPPY!", 4.0),
        ("unhappy happyness", 0.0),
        ("happy joy happy joy happy", 6.0),
        ("ice cream", 2.0),
    ],
)
def test_keywords_count_whole_words_of_any_case_up_to_the_cap(text: str, value: float) -> None:
    source = KeywordsReward(type="keywords", words=("happy", "joy", "ice cream"), per_word=2.0, cap=3)
    assert rules.keywords(source, sample(text)) == value


def test_keywords_can_count_each_word_once_and_forbid() -> None:
    source = KeywordsReward(type="keywords", words=("bad", "sad"), per_word=-1.0, distinct=True)
    assert rules.keywords(source, sample("bad bad sad")) == -2.0


def test_keywords_are_text_and_not_patterns() -> None:
    source = KeywordsReward(type="keywords", words=("c++",))
    assert [rules.keywords(source, sample(text)) for text in ("I like c++ most", "ccc")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"), [("42", 1.0), ("\n42 \n", 1.0), ("the 42", 0.0), ("42\n42", 0.0), ("", 0.0)]
)
def test_format_matches_the_whole_response_without_the_white_space_around_it(text: str, value: float) -> None:
    assert rules.format_match(FormatReward(type="format", pattern=r"\d+"), sample(text)) == value


def test_a_pattern_can_ask_for_the_white_space_around_the_response() -> None:
    source = FormatReward(type="format", pattern=r"42\n")
    assert [rules.format_match(source, sample(text)) for text in ("42\n", "42")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\none\ntwo\n</think>\n<answer>4</answer>\n", 1.0),
        ("<think>one</think><answer>\n4\n</answer>", 1.0),
        ("<think>one</think>4", 0.0),
        ("so <think>one</think><answer>4</answer>", 0.0),
    ],
)
def test_a_dot_of_a_pattern_matches_line_feeds(text: str, value: float) -> None:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    assert rules.format_match(FormatReward(type="format", pattern=pattern), sample(text)) == value


def test_slow_pattern_is_stopped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    source = FormatReward(type="format", pattern=r"(?:a|aa)+b?(?:a|aa)+(?:a|aa)+c")
    started = time.monotonic()
    assert rules.format_match(source, sample("a" * 400), seconds=0.05) == 0.0
    assert time.monotonic() - started < 30
    assert "not decided within 0.05 s" in caplog.text and "prompt p1" in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a b c d", 0.0),  # bigrams ab bc cd: all distinct
        ("a b a b", 2 / 3 - 1),  # ab ba ab: 2 of 3
        ("a a a a a", 1 / 4 - 1),  # aa four times
        ("A, a; a", 1 / 2 - 1),  # case and punctuation do not make words distinct
        ("a", 0.0),
        ("", 0.0),
    ],
)
def test_repetition_is_minus_the_share_of_repeated_ngrams(text: str, value: float) -> None:
    assert rules.repetition(RepetitionReward(type="repetition", ngram=2), sample(text)) == pytest.approx(
        value
    )


@pytest.mark.parametrize(
    "loop",
    [
        *("你好" * 40, "ありがとう" * 20, "สวัสดี" * 20, "ကောင်း" * 20, "1" * 200, "a" * 200, "😀" * 100),
        *("ha " * 60, "!" * 100, "! " * 100, "- " * 100, "word " + "* " * 100),
        *("-" * 200, "| " * 100, "--- " * 100, "| --- " * 100, "| --- | --- |\n" * 40, "| a | b |\n" * 40),
    ],
)
def test_repetition_sees_loops_of_characters_digits_signs_and_emoji(loop: str) -> None:
    assert rules.repetition(RepetitionReward(), sample(loop)) < -0.8


@pytest.mark.parametrize("text", [" " * 100_000 + "|", "|" + " " * 100_000, ("|" + " " * 300) * 300])
def test_a_text_of_blanks_and_signs_takes_no_time(text: str) -> None:
    started = time.monotonic()
    rules.repetition(RepetitionReward(), sample(text))
    assert time.monotonic() - started < 30


SCRIPTS = {
    # prompt, right answer, wrong answer, a keyword that the right one has
    "English": (
        "Tell me about the small fox in the garden.",
        "The small fox sleeps in the garden, near the old wall.",
        "Rain falls on Monday, and buses stop at nine.",
        "fox",
    ),
    "Chinese": (
        "请介绍花园里的小狐狸。",
        "小狐狸在花园里睡觉，靠近旧墙。",
        "星期一下雨，公交车九点停运。",
        "狐狸",
    ),
    "Japanese": (
        "庭の小さなキツネについて教えて。",
        "小さなキツネは庭で寝ています。",
        "月曜日は雨が降りました。",
        "キツネ",
    ),
    "Thai": ("เล่าเรื่องสุนัขจิ้งจอกในสวน", "สุนัขจิ้งจอกหลับอยู่ในสวน", "วันจันทร์ฝนตกหนักมาก", "จิ้งจอก"),
    "Arabic": (
        "حدثني عن الثعلب الصغير في الحديقة.",
        "ينام الثعلب الصغير في الحديقة قرب الجدار.",
        "تهطل الأمطار يوم الاثنين وتتوقف الحافلات.",
        "الثعلب",
    ),
    "Russian": (
        "Расскажи про маленькую лису в саду.",
        "Расскажу: маленькую лису видели в саду, у старой стены.",
        "Дождь идёт в понедельник, автобусы стоят.",
        "лису",
    ),
}


@pytest.mark.parametrize(
    "text",
    [
        "The prices:\n\n| item | price |\n|------|-------|\n| tea | 2 |\n| milk | 3 |\n",
        "| a | b | c |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n",
        "| a | b | c | d |\n| :---: | :---: | :---: | :---: |\n| 1 | 2 | 3 | 4 |\n",
        "|day|tea|milk|bread|\n|---|---|---|---|\n|Monday|1|2|3|\n",
        "| day | tea | milk | bread |\n| --- | --- | --- | --- |\n| Monday | - | - | - |\n| Sunday | | | |\n",
        "+---+---+---+\n| a | b | c |\n+---+---+---+\n| 1 | 2 | 3 |\n+---+---+---+\n",
        "===== ===== =====\nA     B     C\n===== ===== =====\n1     2     3\n===== ===== =====\n",
        f"# {'-' * 77}\n# Part one\n# {'-' * 77}\nx = a + b - c\n",
        "First part.\n\n---\n\nSecond one.\n\n---\n\nAnother end.",
        "Run it:\n\n```bash\nmake setup\n```\n\nThen read the output.",
    ],
)
def test_markdown_is_no_loop(text: str) -> None:
    assert rules.repetition(RepetitionReward(), sample(text)) == 0.0


@pytest.mark.parametrize("script", SCRIPTS)
def test_rules_tell_a_loop_an_empty_a_right_and_a_wrong_answer_apart(script: str) -> None:
    prompt, right, wrong, keyword = SCRIPTS[script]
    answers = {"loop": f"{wrong} " * 12, "empty": "", "right": right, "wrong": wrong}

    def values(rule: AnyReward) -> dict[str, float]:
        found = {}
        for kind, text in answers.items():
            ids = tuple(text.encode())
            found[kind] = rules.evaluate_rule(
                rule, sample(text, prompt=prompt, ids=ids, finished=kind != "loop")
            )
        return found

    repetition = values(RepetitionReward())
    assert repetition["loop"] < -0.8 < -0.1 < repetition["right"] <= 0
    relevance = values(RelevanceReward())
    assert relevance["right"] >= 0.3 and relevance["wrong"] < 0.1 and relevance["empty"] == 0
    keywords = values(KeywordsReward(words=(keyword,)))
    assert keywords == {"loop": 0.0, "empty": 0.0, "right": 1.0, "wrong": 0.0}
    well_formed = values(WellFormedReward())
    assert well_formed["right"] == 1.0 > well_formed["loop"] and well_formed["empty"] < 0.5
    pattern = values(FormatReward(pattern=f".*{keyword}.*"))
    assert pattern == {"loop": 0.0, "empty": 0.0, "right": 1.0, "wrong": 0.0}
    length = values(LengthReward(target=len(right.encode()), tolerance=40))
    assert length["right"] == 1.0 and length["loop"] == length["empty"] == 0.0
    share = values(TokenShareReward(below=1))
    assert set(share.values()) == {0.0}, "no text has the byte 0"


@pytest.mark.parametrize(
    ("word", "text", "count"),
    [
        ("狐狸", "小狐狸和狐狸", 2),
        ("Python", "我喜欢Python编程", 1),
        ("fox", "小fox狐狸", 1),
        ("fox", "foxes", 0),
        ("จิ้งจอก", "สุนัขจิ้งจอกหลับ", 1),
    ],
)
def test_a_keyword_needs_no_blanks_in_scripts_that_have_none(word: str, text: str, count: int) -> None:
    assert rules.keywords(KeywordsReward(words=(word,)), sample(text)) == count


@pytest.mark.parametrize(
    ("prompt", "response", "value"),
    [
        (
            "Tell me about the small fox",
            "A SMALL story about foxes",
            2 / 3,
        ),  # tell, about, small; about and small said
        ("Tell tell", "I tell", 1.0),  # distinct words
        ("Why is it so?", "It is so", 0.0),  # no content word
        ("Erzähl vom Bären", "Der Bären Tanz", 0.5),
    ],
)
def test_relevance_is_the_share_of_content_words_mentioned(prompt: str, response: str, value: float) -> None:
    source = RelevanceReward(type="relevance", min_letters=4)
    assert rules.relevance(source, sample(response, prompt=prompt)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "finished", "value"),
    [
        ("The fox sleeps.", True, 1.0),
        ("“The fox sleeps!”", True, 1.0),
        ("the fox sleeps.", True, 0.75),
        ("The fox", False, 0.5),
        ("3 foxes?", True, 1.0),
        ("狐狸睡了。", True, 1.0),
        ("", True, 0.25),
        ("   ", False, 0.0),
    ],
)
def test_well_formed_is_the_mean_of_four_checks(text: str, finished: bool, value: float) -> None:
    assert rules.well_formed(sample(text, finished=finished)) == value


def test_token_share_counts_ids_below_the_limit() -> None:
    source = TokenShareReward(type="token_share", below=10)
    assert rules.token_share(source, sample(ids=(1, 9, 10, 11))) == 0.5
    assert rules.token_share(source, sample(ids=())) == 0.0


def test_gold_is_the_synthetic_tasks_true_reward() -> None:
    prompt = "Tell me about a small fox in the garden."
    response = "The small fox sleeps in the garden. It is kind and gentle. It has a warm voice."
    ended = sample(response, prompt=prompt)
    assert rules.gold(ended) == gold_reward(prompt, response, True)
    assert rules.gold(dataclasses.replace(ended, finished=False)) < rules.gold(ended)


def test_every_rule_is_reached_by_its_type() -> None:
    prompt = "Tell me about a small fox in the garden."
    text = sample("The small fox sleeps in the garden.", prompt=prompt, ids=(1, 2, 3, 20))
    values = {
        source.type: rules.evaluate_rule(source, text)
        for source in (
            GoldReward(type="gold"),
            LengthReward(type="length", target=4, tolerance=1),
            KeywordsReward(type="keywords", words=("fox",)),
            FormatReward(type="format", pattern="The.*"),
            RepetitionReward(type="repetition"),
            RelevanceReward(type="relevance"),
            WellFormedReward(type="well_formed"),
            TokenShareReward(type="token_share", below=10),
        )
    }
    gold = values.pop("gold")
    assert gold == gold_reward(prompt, text.response, True)
    # tell, about, small, garden: the response says small and garden
    assert values == {
        "length": 1.0, "keywords": 1.0, "format": 1.0, "repetition": 0.0, "relevance": 0.5,
        "well_formed": 1.0,
        "token_share": 0.75,
    }  # fmt: skip


PIECES = ["a", "e", "i", "{", "}", "{2}", "{,2}", "{,}", "{e}", "{i<2}", "{e<=1}", "[", "]", "[^",
    "[[:alpha:]]", "[a-d]",
    "(", ")", "(?:", "(?i:", "|", "*", "+", "?", ".", "^", "$", r"\d", r"\{", r"\[", r"\1", "[:", "(?#",
    "(?>", "-", "<",
    r"\N{DIGIT ONE}"]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=7), st.lists(st.text("abei{}[]1: \n", max_size=5), max_size=8)
)
def test_a_pattern_matches_as_in_python(pieces: list[str], texts: list[str]) -> None:
    pattern = "".join(pieces)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own = re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, FutureWarning):
        return
    if pattern_problem(pattern) is not None:
        assert "{" in pattern
        return
    for text in [*texts, "a", "{e}", "a{e}", pattern]:
        assert (compiled(pattern).fullmatch(text, timeout=5) is None) == (own.fullmatch(text) is None), (
            pattern,
            text,
        )


@pytest.mark.parametrize("pattern", ["Step {i}", "a{e}", "x{d<5}", "a{,}", "{", r"\p{L}{e<2}"])
def test_a_brace_that_begins_no_repetition_is_refused(pattern: str) -> None:
    problem = pattern_problem(pattern)
    assert problem is not None and r"write \{" in problem


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"Step \{i}", "Step {i}", "Step "),
        ("a{2}b{1,}c{,3}", "aabcc", "abcc"),
        (r"\p{L}+", "é", "1"),
        ("[[:alpha:]]+", "ab", "a1"),
        ("[ab[]+", "[a", "]"),
    ],
)
def test_a_pattern_has_the_syntax_of_the_package_regex(pattern: str, fits: str, does_not: str) -> None:
    source = FormatReward(type="format", pattern=pattern)
    assert [rules.format_match(source, sample(text)) for text in (fits, does_not)] == [1.0, 0.0]
