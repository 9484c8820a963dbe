"""`rlhf inspect` on small records.

- every page answers only with the token, to a loopback host, and without scripts
- responses are escaped, and invisible characters are replaced
- a secret of the environment is shown on no page and found by no search
- filters, orders and searches choose the right responses; a column that does not exist is refused, and so
  are numbers that no record has
- the guards that a step raised, and the share of clipped tokens, are columns and filters; a record without
  log-probabilities after the update says that it lacks them
- the answers of an evaluation are shown by prompt and by model, also of a run without PPO
- what a person says about a response is an annotation: shown, a filter, replaced and removed by the same
  person only, and there when the run is opened again; pages of other origins cannot write it
- each browser keeps the name of its person
- a response that was opened from a table leads to those before and after it there, also if a label takes it
  out of the table
- a record that was pruned, or a file that is none of its annotations, is a page that says what to do
- a folder `step=9` in the path of a record is no value of a column
- ranges are named only where they have a value
- NaN is no value, columns without values are left out, a missing level has no gap
- annotations are columns, also where some responses have none
- the phrase that became frequent is first, with what each score pays for it within the same step
- two scores: counts are those of the linked responses, and what one ranks above the other
- two runs: the last responses to the same prompt, by difference
- tokens have text, values and colours; a character of several tokens is whole; a measure has the same
  colours in responses that have other measures
- a record without scores is sorted by what it has
- the database reads no other files
- a step is exported as one file that loads nothing
- the command prints its link and ends with Ctrl-C; it exports a step of a run in a store
- without a name, the newest run is taken; runs without a record are input errors
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import duckdb
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr
from starlette.testclient import TestClient

from rlhf_cli import main as cli
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import RecordConfig, RecordLevel
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import InputError
from rlhf_core.evaluation.report import environment
from rlhf_core.ops.finished_run import find_run, newest_run
from rlhf_core.ops.inspect.pages import Pages, _templates, tokens_of
from rlhf_core.ops.inspect.queries import grid, lowest, pairs, parting, steps
from rlhf_core.ops.inspect.rollouts import (
    CLIPPED,
    GUARDS,
    ClipRange,
    Filter,
    Key,
    RecordedRun,
    Rollouts,
    clip_range,
    recorded_runs,
)
from rlhf_core.ops.inspect.server import export, make_app
from rlhf_core.pipeline import StageName
from rlhf_core.record.annotations import LABELS, annotate, annotations_of
from rlhf_core.record.schema import schema_of
from rlhf_core.record.writer import AnswerRecord, RecordWriter
from rlhf_core.run.local_context import stage_context
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.types import PromptExample, RewardInput

HOSTILE = "<script>alert('x')</script> \u202e gnp.exe & \"quoted\""
PHRASE = "calm calm dog"
NAN = float("nan")


def _without_filtered(values: list[list[float]]) -> list[list[float] | None]:
    return [*values[:2], None, *values[3:]]


def _record(folder: Path, *, better: float = 0.0, level: RecordLevel = "all", values: bool = False) -> Path:
    """Write four steps of four responses. The phrase is in all of step 4; the gold reward falls with it."""
    tokenizer = train_tokenizer([HOSTILE, PHRASE, "the dog is kind", "naïve 日本"] * 3, 400)
    tokenizer.save_pretrained(folder / "policy")
    writer = RecordWriter(folder / "parts", "ppo", RecordConfig(level=level))
    for step in range(1, 5):
        texts = [f"the dog is\nkind {PHRASE if step == 4 else step}"] * 3 + [HOSTILE if step == 2 else "日本"]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        scores = [step + index / 10 + better for index in range(4)]
        numbers = [[-0.5 - 0.1 * place for place in range(len(row))] for row in ids]
        rows = {
            "kind": ["ppo"] * 4,
            "step": [step] * 4,
            "index": [0, 1, 2, 3],
            "group": [0, 1, 2, 3],
            "prompt_id": [f"p{index}" for index in range(4)],
            "source": ["chats", "chats", "chats", "questions"],
            "prompt_ids": [tokenizer.encode(f"dog {index}", add_special_tokens=False) for index in range(4)],
            "response_ids": ids,
            "finished": [True] * 4,
            "policy_version": [step - 1] * 4,
            "seed": [7] * 4,
            "total": scores,
            "score": scores,
            "kl": [0.5 * step] * 4,
            "excluded": [None, None, "filtered", None],
            "rollout_logprobs": numbers,
            "old_logprobs": _without_filtered([[value + 0.25 for value in row] for row in numbers]),
            "ref_logprobs": _without_filtered([[value - 2.0 for value in row] for row in numbers]),
            "values": _without_filtered(numbers) if values else [None] * 4,
            "advantages": _without_filtered(numbers),
            "reward/model": scores,
            "reward/gold": [NAN, -step, -step, 1 - step],
        }
        schema = schema_of(level, ["model", "gold"])
        columns = [
            pa.array(rows[field.name], field.type) if field.name in rows else pa.nulls(4, field.type)
            for field in schema
        ]
        writer.add(step, pa.Table.from_arrays(columns, schema=schema))
        if step == 2:
            writer.save(folder)
    writer.save(folder)
    return folder


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _record(tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="module")
def both(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    """Two runs, decoded. The first has an annotation of step 4."""
    folder = tmp_path_factory.mktemp("two")
    annotation = folder / "annotation.parquet"
    rows = {"kind": ["ppo", "ppo"], "step": [4, 4], "index": [0, 1], "score": [9.0, NAN], "why": ["a", "b"]}
    pq.write_table(pa.table(rows), annotation)
    other = _record(folder / "step=9", better=1.0, level="rewards")
    (folder / "database").mkdir()
    runs = [RecordedRun("one", record, {"judge": annotation}), RecordedRun("two", other)]
    rollouts = Rollouts(runs, folder / "database")
    rollouts.decode_all(threading.Event())
    yield rollouts


@pytest.fixture
def client(both: Rollouts) -> TestClient:
    return TestClient(make_app({"ppo": both}, "secret"), base_url="http://127.0.0.1:80")


@pytest.mark.parametrize(
    "page",
    ["steps", "responses", "response?of=0,2,3&beside=1,2,3", "phrases", "scores", "pairs"],
)
def test_every_page_answers_with_the_token_only_and_has_no_scripts(client: TestClient, page: str) -> None:
    answer = client.get(f"/secret/ppo/{page}")
    assert answer.status_code == 200, answer.text
    assert "<script" not in answer.text and "\u202e" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'self'")
    assert client.get(f"/{page}").status_code == 404
    assert client.get(f"/other/{page}").status_code == 404
    assert client.get(f"/secret/ppo/{page}", headers={"host": "evil.example"}).status_code == 403
    assert client.get(f"/secret/ppo/{page}", headers={"origin": "http://evil.example"}).status_code == 403


def test_a_hostile_response_is_shown_as_text(client: TestClient) -> None:
    shown = client.get("/secret/ppo/responses", params={"text": "<script>"}).text
    assert "1 to 2 of 2" in shown
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; \N{REPLACEMENT CHARACTER} gnp.exe" in shown


def test_a_secret_that_the_process_knows_is_shown_nowhere(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [RecordedRun("one", record)]
    shown = []
    for place, value in enumerate(("", PHRASE)):
        monkeypatch.setenv("MY_TOKEN", value)
        (folder := tmp_path / str(place)).mkdir()
        rollouts = Rollouts(runs, folder)
        rollouts.decode_all(threading.Event())
        export(runs[0], 4, file := folder / "step.html")
        pages = Pages(rollouts, "")
        found = [pages.responses({}), pages.response({"of": "0,4,0"}), pages.phrases({}), file.read_text()]
        texts = [re.sub("<[^>]*>", "", each) for each in found]
        shown.append([PHRASE in each for each in texts])
        assert ("3 of 3" in pages.responses({"text": PHRASE})) == (not value)
        if value:
            assert "kind (hidden)" in texts[0] and "*" * len(PHRASE) in texts[1]
    assert shown == [[True] * 4, [False] * 4]


def test_filters_and_orders_choose_responses(both: Rollouts) -> None:
    def found(chosen: Filter, sort: str = "score", *, descending: bool = True) -> list[tuple[int, int, int]]:
        _, rows = both.page(chosen, sort, descending=descending, offset=0, limit=100)
        return [(row["run"], row["step"], row["index"]) for row in rows]

    assert found(Filter({"step": (2, 3), "score": (None, 2.15)}, run=0)) == [(0, 2, 1), (0, 2, 0)]
    assert found(Filter({"score": (4.0, None)}, run=0, excluded="yes")) == [(0, 4, 2)]
    assert found(Filter({"step": (4, 4)}, run=0, excluded="no")) == [(0, 4, 3), (0, 4, 1), (0, 4, 0)]
    assert found(Filter(run=1, prompt="p1"), "step", descending=False) == [
        (1, step, 1) for step in range(1, 5)
    ]
    assert found(Filter(source="questions", run=0)) == [(0, step, 3) for step in (4, 3, 2, 1)]
    assert len(found(Filter(text="Dog  is kind", run=1))) == 12, "white space and case are alike"
    assert found(Filter(text="CALM dog", run=1)) == [(1, 4, 2), (1, 4, 1), (1, 4, 0)]
    assert found(Filter({"step": (1, 1)}), "reward/gold")[-2:] == [(0, 1, 0), (1, 1, 0)], "NaN is the last"


def test_values_of_a_query_are_no_sql(client: TestClient) -> None:
    for name, value in {"text": "' OR 1=1 --", "prompt": "' OR 1=1 --", "excluded": "' OR 1=1 --"}.items():
        assert "<span>none</span>" in client.get("/secret/ppo/responses", params={name: value}).text
    large = {"offset": "9" * 20}, {"offset": "9" * 5000}, {"run": "1e300"}
    for wrong in (
        {"sort": 'score" --'}, {"min:score": "1 OR 1"}, {"offset": "x"}, {"sort": "prompt_ids"}, *large
    ):  # fmt: skip
        assert client.get("/secret/ppo/responses", params=wrong).status_code == 400
    assert client.get("/secret/ppo/scores?x=nothing").status_code == 400
    for key in ("0,9,9", "2,1,1", "0,1", "a,b,c", "", "0,1," + "9" * 20):
        assert client.get("/secret/ppo/response", params={"of": key}).status_code == 400
    assert client.get("/secret/ppo/nothing").status_code == 404


def test_columns_are_those_with_values(both: Rollouts) -> None:
    # `total` equals the score, there is no ensemble, and only the level `all` has log-probabilities.
    assert both.numbers == [
        "step", "score", "kl", "length", "reward/model", "reward/gold", "annotation/judge", "gap"
    ]  # fmt: skip
    assert both.sources == ["reward/model", "reward/gold", "annotation/judge"]
    _, rows = both.page(Filter(), "gap", descending=True, offset=0, limit=100)
    assert {(row["run"], row["gap"] and round(row["gap"], 5)) for row in rows} == {
        (0, 0.25),
        (0, None),
        (1, None),
    }


def test_an_annotation_is_a_column_of_its_run(both: Rollouts) -> None:
    _, rows = both.page(Filter({"annotation/judge": (0, None)}), "step", descending=True, offset=0, limit=9)
    assert [(row["run"], row["step"], row["index"], row["annotation/judge"]) for row in rows] == [
        (0, 4, 0, 9.0)
    ]


def test_steps_are_means_without_nan(both: Rollouts) -> None:
    last = steps(both, Filter(run=0))[-1]
    assert (last["first"], last["last"], last["responses"], last["excluded"]) == (4, 4, 4, 1)
    assert last["reward/gold"] == pytest.approx((-4 - 4 - 3) / 3)


def test_a_phrase_that_rose_is_found_with_what_it_is_paid_within_its_steps(
    both: Rollouts, client: TestClient
) -> None:
    shown = client.get("/secret/ppo/phrases?run=0").text
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", shown.partition("Phrases that rose")[2])
    cells = [html.unescape(re.sub("<[^>]*>", " ", row)).split() for row in rows]
    [found] = [row for row in cells if " ".join(row).startswith(f"is kind {PHRASE}")]
    # 0 % before, 75 % after, once in each. All scores of step 4 are higher by the model and lower by the gold
    # reward, which is not the phrase: without it, this step has 4.3 and -3.
    assert found[5:9] == ["0.0%", "75.0%", "75.0%", "1.0"]
    assert [float(each) for each in found[9:11]] == pytest.approx([4.1 - 4.3, -4 + 3])
    assert "calm calm" in rows[0], "the largest rise is first"


def test_a_number_of_the_grid_is_that_of_its_responses(both: Rollouts, client: TestClient) -> None:
    shown = client.get("/secret/ppo/scores?x=reward/model&y=reward/gold&run=0").text
    cells = re.findall(r'<td class="number heat[^>]*><a href="([^"]*)">(\d+)</a>', shown)
    assert sum(int(count) for _, count in cells) == 12, "without the four of NaN"
    for address, count in cells:
        query = {name: values[0] for name, values in parse_qs(urlsplit(html.unescape(address)).query).items()}
        found, _ = both.page(Filter.of(query, both.numbers), "step", descending=True, offset=0, limit=1)
        assert found == int(count)


def test_a_value_on_the_border_of_a_bin_is_in_one_bin(both: Rollouts) -> None:
    ranges = [Filter({"step": (lowest(one), one[1])}) for one in ((None, 2.0), (2.0, 3.0), (3.0, None))]
    found = [both.page(chosen, "step", descending=True, offset=0, limit=1) for chosen in ranges]
    assert [count for count, _ in found] == [16, 8, 8]
    assert lowest((2.0, 2.0)) == 2.0, "a bin of one value"


def test_few_values_have_a_bin_each(both: Rollouts) -> None:
    found = grid(both, Filter(run=0), "step", "reward/gold")
    assert found.columns == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert found.rows == [(0, 0), (-1, -1), (-2, -2), (-3, -3), (-4, -4)]
    assert found.counts[0, 0] == 1 and found.counts[4, 3] == 2


def test_what_one_score_ranks_above_another(both: Rollouts) -> None:
    correlation, above, below = parting(both, Filter(run=0), "reward/model", "reward/gold", 2)
    rows = both.rows('FROM rollouts WHERE run = 0 AND "reward/gold" IS NOT NULL')
    expected = spearmanr([row["reward/model"] for row in rows], [row["reward/gold"] for row in rows])
    assert correlation == pytest.approx(expected.statistic) and expected.statistic < -0.8
    assert {row["step"] for row in above} == {4} and {row["step"] for row in below} == {1}
    assert PHRASE in above[-1]["text"] or PHRASE in above[0]["text"]


def test_two_runs_are_joined_by_prompt(both: Rollouts) -> None:
    count, rows = pairs(both, Filter({"step": (None, 3)}), "score", descending=True, offset=1, limit=2)
    assert count == 4 and len(rows) == 2
    for row in rows:
        assert row["one"]["step"] == row["other"]["step"] == 3
        assert row["one"]["prompt_id"] == row["other"]["prompt_id"]
        assert row["difference"] == pytest.approx(1.0)
        assert row["one"]["text"] == row["other"]["text"]


def test_tokens_have_texts_values_and_colours(both: Rollouts) -> None:
    row = both.tokens([Key(0, 3, 3)])[Key(0, 3, 3)]
    tokens = tokens_of(row, both.tokenizers[0])
    assert "".join(tokens.pieces) == "日本" and len(tokens.pieces) == len(row["response_ids"]) > 0
    assert [measure.name for measure in tokens.measures] == ["log-probability", "KL", "advantage"]
    logprob, kl, _ = tokens.measures
    assert logprob.values[0] == pytest.approx(-0.25) and kl.values[0] == pytest.approx(2.25)
    assert logprob.levels[0] == -1 and kl.levels[0] == 3
    without = tokens_of(both.tokens([Key(1, 3, 3)])[Key(1, 3, 3)], both.tokenizers[1])
    assert without.measures == [], "the level `rewards` has no values of tokens"


def test_a_measure_has_the_same_colours_in_responses_with_others(record: Path, tmp_path: Path) -> None:
    other = _record(tmp_path / "other", level="logprobs", values=True)
    rollouts = Rollouts([RecordedRun("one", record), RecordedRun("two", other)], tmp_path)
    shown = Pages(rollouts, "").response({"of": "1,3,0", "beside": "0,3,0"})
    found = re.findall(r'id="colour-(\d)"[^>]*> ([\w-]+)', shown)
    assert found == [("0", "log-probability"), ("1", "KL"), ("2", "advantage"), ("3", "value")]
    places = [set(re.findall(r"m(\d)[np]\d", article)) for article in shown.split("<article>")[1:]]
    assert places == [{"0", "1", "3"}, {"0", "1", "2"}]
    # The first one was filtered: only the engine's log-probabilities are known.
    shown = Pages(rollouts, "").response({"of": "1,3,2", "beside": "1,3,1"})
    assert re.findall(r'id="colour-(\d)"', shown) == ["0", "1", "3"]


def test_a_record_without_scores_is_sorted_by_what_it_has(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path / "ppo")
    for part in (tmp_path / "ppo" / "record").iterdir():
        rows = pq.read_table(part)
        for name in ("total", "score"):
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.nulls(len(rows), pa.float32()))
        pq.write_table(rows.drop_columns(["source"]), part)  # as an earlier release
    rollouts = Rollouts([RecordedRun("one", tmp_path / "ppo")], tmp_path)
    assert "Responses, sorted by kl." in Pages(rollouts, "").responses({})
    assert "<span>none</span>" in Pages(rollouts, "").responses({"source": "chats"})


def test_ranges_are_named_only_where_they_have_a_value(client: TestClient) -> None:
    shown = client.get("/secret/ppo/responses?text=&source=&min:score=&max:score=&min:kl=1&max:kl=").text
    assert "<summary>Ranges: kl</summary>" in shown and 'name="source"' in shown
    assert "<summary>Ranges</summary>" in client.get("/secret/ppo/responses?min:score=&max:score=").text


def test_the_database_reads_no_other_files(both: Rollouts, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    for query in (f"FROM '{other}'", f"ATTACH '{tmp_path}/x.db'", "SET enable_external_access = true"):
        with pytest.raises(duckdb.Error):
            both.one(query)


def test_a_search_says_how_far_it_reaches(record: Path, tmp_path: Path) -> None:
    rollouts = Rollouts([RecordedRun("one", record)], tmp_path)
    shown = Pages(rollouts, "").responses({"text": "calm"})
    assert "reaches 0 of 16 responses" in shown
    rollouts.decode_all(threading.Event())
    assert "reaches" not in Pages(rollouts, "").responses({"text": "calm"})


def test_a_step_is_exported_as_one_file(record: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    assert export(RecordedRun("one", record), 2, file) == 2
    shown = file.read_text()
    assert shown.count("<article>") == 4 and "<style>:root" in shown
    assert "default-src 'none'; style-src 'sha256-" in shown
    assert not re.search(r"<script|<link|src=|href=", shown) and "\u202e" not in shown
    with pytest.raises(InputError, match="steps 1 to 4"):
        export(RecordedRun("one", record), 5, file)
    assert export(RecordedRun("one", record), None, file) == 4


def test_the_guards_of_a_step_are_a_column_and_a_filter(run: Path, tmp_path: Path) -> None:
    kinds = recorded_runs([find_run("small", str(run))])
    [one] = kinds["ppo"]
    # The limit of `loops` is 0.2, and two steps in a row raise it: 2/10 and 3/10.
    assert one.guards == {3: ["loops"], 4: ["loops"]}
    (tmp_path / "database").mkdir()
    rollouts = Rollouts([one], tmp_path / "database")
    assert rollouts.numbers[-1] == GUARDS and rollouts.guards == ["loops"]
    for guard, found in {"loops": {3, 4}, "any": {3, 4}, "eos_loss": set()}.items():
        count, rows = rollouts.page(Filter(guard=guard), GUARDS, descending=True, offset=0, limit=99)
        assert count == 4 * len(found) and {row["step"] for row in rows} == found
    pages = Pages(rollouts, "")
    assert ">loops</option>" in pages.responses({}) and "<small>loops</small>" in pages.responses({})
    assert pages.steps({}).count("<small>loops</small>") == 2


@pytest.mark.parametrize(
    ("clip", "shares"),
    [
        (ClipRange(0.2, 0.2), {0: 0.0, 1: 1.0, 3: 0.5}),
        (ClipRange(0.2, 0.9), {0: 0.0, 1: 0.0, 3: 0.0}),
        (ClipRange(1.0, 4.0), {0: 0.0, 1: 0.0, 3: 0.0}),
        (ClipRange(0.2, 0.2, of_response=True), {0: 0.0, 1: 1.0, 3: 1.0}),
    ],
)
def test_the_share_of_clipped_tokens_follows_from_both_log_probabilities(
    record: Path, tmp_path: Path, clip: ClipRange, shares: dict[int, float]
) -> None:
    shutil.copytree(record, tmp_path / "ppo")
    for part in (tmp_path / "ppo" / "record").iterdir():
        rows = pq.read_table(part)
        new = []
        for index, old in zip(rows["index"].to_pylist(), rows["old_logprobs"].to_pylist(), strict=True):
            # The ratios are 1, exp(0.5) = 1.65, and in the last response both, by turns, from 1.65 on.
            moved = {0: [0.0], 1: [0.5], 2: [0.5], 3: [0.5, 0.0]}[index]
            new.append(None if old is None else [x + moved[n % len(moved)] for n, x in enumerate(old)])
        place = rows.schema.get_field_index("new_logprobs")
        pq.write_table(
            rows.set_column(place, rows.schema[place], pa.array(new, rows.schema[place].type)), part
        )
    rollouts = Rollouts([RecordedRun("one", tmp_path / "ppo", clip=clip)], tmp_path)
    _, found = rollouts.page(Filter({"step": (4, 4)}), CLIPPED, descending=True, offset=0, limit=9)
    values = {row["index"]: row[CLIPPED] for row in found}
    length = {row["index"]: row["length"] for row in found}[3]
    if shares[3] == 0.5:
        shares = {**shares, 3: -(-length // 2) / length}
    assert values == pytest.approx({**shares, 2: None}), "the filtered one has none"
    assert not rollouts.lacks_clipped


def test_a_record_that_lacks_what_clipping_needs_says_so(record: Path, tmp_path: Path) -> None:
    said = "The share of clipped tokens needs"
    for number, (clip, says) in enumerate({ClipRange(0.2, 0.2): True, None: False}.items()):
        (folder := tmp_path / str(number)).mkdir()
        rollouts = Rollouts([RecordedRun("one", record, clip=clip)], folder)
        assert (said in Pages(rollouts, "").responses({})) == says


def test_the_clip_range_is_that_of_the_loss() -> None:
    def of(ppo: dict[str, object]) -> ClipRange | None:
        return clip_range(PipelineConfig.model_validate({"ppo": ppo}).ppo)

    assert of({"clip_high": 0.3}) == ClipRange(0.2, 0.3)
    assert of({"loss": {"type": "gspo"}}) == ClipRange(3e-4, 4e-4, of_response=True)
    assert of({"loss": {"type": "cispo"}}) == ClipRange(1.0, 4.0)
    assert of({"loss": {"type": "python", "function": "loss.py:loss"}}) is None


def _publish(home: Path, name: str, folders: Mapping[StageName, Path]) -> None:
    """Publish the artifacts of a run in `folders`, which are moved, and write its summary."""
    config = PipelineConfig.model_validate(
        {"run": {"home": str(home), "name": name}, "ppo": {"guard_patience": 2}}
    )
    store = ArtifactStore(Store(config.store_url), home / "cache")
    made = Provenance(config=config.model_dump(mode="json", by_alias=True))
    key = name.encode().hex().rjust(16, "0")
    stages = {stage: {"artifact": store.publish(stage, key, at, made).uri} for stage, at in folders.items()}
    file = home / "runs" / name / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"run": name, "stages": stages}))


@pytest.fixture
def run(record: Path, tmp_path: Path) -> Path:
    """The home of a run whose artifact of `ppo` is in its store."""
    shutil.copytree(record, tmp_path / "ppo")
    at_first = {"rollout/eos_rate": 1.0, "policy/entropy": 1.0, "rollout/length": 20.0, "loss/policy": 0.1}
    metrics = [{"step": step, **at_first, "rollout/repeating_rate": step / 10} for step in range(1, 5)]
    (tmp_path / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    _publish(tmp_path, "small", {"ppo": tmp_path / "ppo"})
    return tmp_path


def _opened(run: Path, name: str) -> TestClient:
    """Return a browser with the pages of a run. `name` is a new folder for their database."""
    (run / name).mkdir()
    rollouts = Rollouts(recorded_runs([find_run("small", str(run))])["ppo"], run / name)
    return TestClient(make_app({"ppo": rollouts}, "secret"), base_url="http://127.0.0.1:80")


def test_a_label_of_a_person_is_an_annotation_and_a_filter(run: Path) -> None:
    found = find_run("small", str(run))

    def rows(name: str) -> list[dict[str, object]]:
        file = annotations_of(*found.artifact("ppo"), name)[name]
        rows: list[dict[str, object]] = pq.read_table(file).to_pylist()
        return rows

    web, page = _opened(run, "one"), "/secret/ppo/response?of=0,4,1&text=dog"
    assert "Labelled by" not in web.get("/secret/ppo/responses").text
    for by, label, note in (
        ("Ann", "hack", "calms"),
        ("bob", "fine\u200f", ""),
        ("ann", "<b>hack", "calms down"),
    ):
        form = {"response": "0,4,1", "by": by, "label": label, "note": note}
        answer = web.post(page, data=form, headers={"origin": "http://127.0.0.1"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, page)
    shown = web.get(page).text
    assert "ann: <b>&lt;b&gt;hack</b> calms down" in shown and "bob: <b>fine</b>" in shown
    assert '<input name="by" value="ann"' in shown and 'value="&lt;b&gt;hack" list="labels"' in shown
    response = {"kind": "ppo", "step": 4, "index": 1, "score": None}
    assert rows("ann") == [{**response, "label": "<b>hack", "note": "calms down"}]
    assert rows("bob") == [{**response, "label": "fine", "note": ""}]

    web.post(page, data={"response": "0,1,0", "by": "ann", "label": "fine"})
    further = [
        ("ppo", 3, 0, 0.5, "odd", None),
        ("ppo", 3, 1, 0.5, None, None),
        ("ppo", 9, 9, 0.5, "gone", ""),
    ]
    table = pa.Table.from_pylist([dict(zip(LABELS.names, row, strict=True)) for row in further], LABELS)
    annotate(*found.artifact("ppo"), "script", table, "script.py")
    web = _opened(run, "two")
    assert "script: <b>odd</b> <" in web.get("/secret/ppo/response?of=0,3,0").text
    assert "script" not in web.get("/secret/ppo/response?of=0,3,1").text.partition("<article>")[2]
    assert web.get("/secret/ppo/response?of=0,9,9").status_code == 400
    for query, count in {
        "label=any&person=ann": 2, "label=any": 3,
        "label=fine": 2, "label=%3Cb%3Ehack": 1, "person=bob": 1, "person=ann&label=fine": 1,
        "person=bob&label=%3Cb%3Ehack": 0,
    }.items():  # fmt: skip
        text = web.get(f"/secret/ppo/responses?{query}").text
        assert (f"1 to {count} of {count}" in text) == (count > 0), query
    assert web.get("/secret/ppo/responses?label=fine").text.count("ann: <b>fine</b>") == 1
    web.post(page, data={"response": "0,4,1", "by": "ann"})
    assert [row["step"] for row in rows("ann")] == [1] and len(rows("bob")) == 1
    assert "hack" not in web.get("/secret/ppo/responses").text

    scores = pa.table({name: [1] for name in ("kind", "step", "index", "score")})
    annotate(*found.artifact("ppo"), "gold", scores, "x")
    for wrong in ({"by": "gold"}, {"by": ""}, {"by": "../ann"}, {"response": "0,9,9"}, {"response": "7,1,0"}):
        refused = web.post(page, data={"response": "0,4,1", "by": "ann", "label": "hack"} | wrong)
        assert refused.status_code == 400 and 'role="alert"' in refused.text, wrong
    for origin in ("http://evil.example", "null"):
        assert web.post(page, data={"by": "ann"}, headers={"origin": origin}).status_code == 403
    assert web.post("/ppo/response", data={"by": "ann"}).status_code == 404
    assert web.post("/secret/match/response", data={"by": "ann"}).status_code == 404


def test_each_browser_keeps_the_name_of_its_person(run: Path) -> None:
    ann, page = _opened(run, "one"), "/secret/ppo/response?of=0,4,1"
    bob = TestClient(ann.app, base_url="http://127.0.0.1:80")
    for web, name in ((ann, "Ann"), (bob, "bob")):
        form = {"response": "0,4,1", "by": name, "label": f"of {name}"}
        cookie = web.post(page, data=form, follow_redirects=False).headers["set-cookie"]
        assert cookie == f"by={name.lower()}; HttpOnly; Path=/secret; SameSite=strict"
    for web, name in ((ann, "ann"), (bob, "bob")):
        assert f'<input name="by" value="{name}"' in web.get(page).text
        assert f'<input name="label" value="of {name.title() if web is ann else name}"' in web.get(page).text
    assert '<input name="by" value=""' in TestClient(ann.app, base_url="http://127.0.0.1:80").get(page).text


def _near(page: str) -> dict[str, str]:
    """Return the addresses of the links to the responses before and after one, without the server."""
    found = re.findall(r'<a rel="(prev|next)"[^>]* href="/secret/ppo/([^"]*)"', page)
    return {name: html.unescape(address) for name, address in found}


def test_a_response_leads_to_those_before_and_after_it_in_its_table(run: Path) -> None:
    web = _opened(run, "one")
    table = web.get("/secret/ppo/responses?sort=kl&order=up&source=chats").text
    addresses = [html.unescape(each) for each in re.findall(r'href="(/secret/ppo/response\?[^"]*)"', table)]
    of = [parse_qs(urlsplit(address).query)["of"][0] for address in addresses]
    assert len(of) == 12 and of[0] == "0,1,0"
    address, passed = addresses[0], list[str]()
    while address:
        page = web.get(address).text
        passed += re.findall('name="response" value="([^"]*)"', page)
        assert f"{len(passed)} of 12</a>" in page and ("prev" in _near(page)) == (len(passed) > 1)
        address = f"/secret/ppo/{_near(page)['next']}" if "next" in _near(page) else ""
    assert passed == of
    back = web.get(f"/secret/ppo/{_near(page)['prev']}").text
    assert f'name="response" value="{of[-2]}"' in back
    assert "/secret/ppo/responses?sort=kl&amp;order=up&amp;source=chats&amp;offset=0" in back
    assert not _near(web.get("/secret/ppo/response?of=0,1,0").text), "it was opened from no table"

    labelled = ["0,1,0", "0,2,1", "0,3,2"]
    for each in labelled:
        web.post("/secret/ppo/response?of=0,1,0", data={"response": each, "by": "ann", "label": "x"})
    opened = "/secret/ppo/response?of=0,2,1&label=x&sort=step&order=up&at=1"
    after = parse_qs(urlsplit(_near(web.get(opened).text)["next"]).query)
    assert (after["of"], after["at"]) == ([labelled[2]], ["2"])
    web.post(opened, data={"response": "0,2,1", "by": "ann"})
    after = parse_qs(urlsplit(_near(web.get(opened).text)["next"]).query)
    assert (after["of"], after["at"]) == ([labelled[2]], ["1"])
    assert web.get("/secret/ppo/response?of=0,1,0&at=-1").status_code == 400


def test_a_pair_leads_to_the_next_pair(client: TestClient) -> None:
    table = client.get("/secret/ppo/pairs?sort=score").text
    addresses = [html.unescape(each) for each in re.findall(r'href="/secret/ppo/(response\?[^"]*)"', table)]
    assert len(addresses) == 4
    links = [_near(client.get(f"/secret/ppo/{address}").text) for address in addresses]

    def key(address: str) -> tuple[list[str], list[str]]:
        query = parse_qs(urlsplit(address).query)
        return query["of"], query["beside"]

    assert [key(each["next"]) for each in links[:-1]] == list(map(key, addresses[1:]))
    assert [key(each["prev"]) for each in links[1:]] == list(map(key, addresses[:-1]))
    assert "next" not in links[-1] and "prev" not in links[0]


def test_a_record_that_was_pruned_or_replaced_is_a_page_that_says_so(run: Path) -> None:
    web, page = _opened(run, "one"), "/secret/ppo/response?of=0,4,1"
    parts = sorted((find_run("small", str(run)).recorded("ppo") / "record").iterdir())
    form = {"response": "0,4,1", "by": "ann", "label": "x"}
    foreign = pa.table({"a": [1]})
    for change in (
        lambda file: file.write_text("no Parquet"),
        lambda file: pq.write_table(foreign, file),
        Path.unlink,
    ):
        change(parts[1])
        for answer in (web.get(page), web.get("/secret/ppo/responses"), web.post(page, data=form)):
            assert answer.status_code == 400
            assert f"{parts[1].name} was pruned or replaced; run its configuration" in answer.text
    assert web.get("/secret/ppo/steps").status_code == 200


def test_a_file_that_is_no_annotation_is_named(run: Path) -> None:
    web, page = _opened(run, "one"), "/secret/ppo/response?of=0,4,1"
    found = find_run("small", str(run))
    form = {"response": "0,4,1", "by": "ann", "label": "x"}
    web.post(page, data=form)
    file = annotations_of(*found.artifact("ppo"), "ann")["ann"]
    foreign, of_nobody = pa.table({"a": [1]}), pq.read_table(file).replace_schema_metadata(None)
    for write in (
        lambda: file.write_text("no Parquet"),
        lambda: pq.write_table(foreign, file),
        lambda: pq.write_table(of_nobody, file),
    ):
        write()
        answer = web.post(page, data=form)
        assert answer.status_code == 400 and f"{file} is no annotation of" in answer.text
        with pytest.raises(InputError, match=r"ann\.parquet is no annotation .* move it to another folder"):
            recorded_runs([found])


def test_a_run_without_ppo_shows_the_answers_of_its_evaluation_by_prompt(
    record: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "without"
    context = stage_context(tmp_path / "stage")
    answers = AnswerRecord("evaluation", RecordConfig(), seed=lambda _: 7)
    prompts = [PromptExample(f"p{number}", "", (5,), source="chats") for number in range(2)]
    for score, model in enumerate(("sft", "dpo")):
        rows = [RewardInput(each.prompt_id, "", "", (5,), (6, 7, 8)[: score + 1], True) for each in prompts]
        answers.add(model, prompts, rows, "held-out")
        answers.note("score", rows, [score + 0.5, score - 0.5])
    answers.save(context)
    shutil.copytree(record / "policy", tmp_path / "data" / "tokenizer")
    _publish(home, "dpo", {"data": tmp_path / "data", "evaluate": context.output})

    kinds = recorded_runs([find_run("dpo", str(home))])
    assert list(kinds) == ["evaluation"]
    (tmp_path / "database").mkdir()
    rollouts = Rollouts(kinds["evaluation"], tmp_path / "database", "evaluation")
    rollouts.decode_all(threading.Event())
    web = TestClient(make_app({"evaluation": rollouts}, "secret"), base_url="http://127.0.0.1:80")
    shown = web.get("/secret/").text
    assert "Answers, those to one prompt together" in shown and ">Steps<" not in shown
    cells = re.findall(
        r'<td>(\w+)<br><small>held-out</small></td>.*?<td class="number">([-\d.]+)<', shown, re.S
    )
    assert cells == [("sft", "0.500"), ("dpo", "1.500"), ("sft", "-0.500"), ("dpo", "0.500")]
    assert "1 to 2 of 2" in web.get("/secret/evaluation/responses?model=dpo").text
    assert "1 to 3 of 3" in web.get("/secret/evaluation/responses?min:score=0").text
    by_score = web.get("/secret/evaluation/responses?sort=score").text
    assert by_score.index("1.500") < by_score.index("-0.500"), "the largest is first"
    assert web.get("/secret/evaluation/response?of=0,0,2").status_code == 200
    assert "rank correlation" in web.get("/secret/evaluation/scores").text
    for page in ("evaluation/steps", "ppo/steps", "match/responses"):
        assert web.get(f"/secret/{page}").status_code == 404

    file = str(tmp_path / "step.html")
    assert cli.main(["inspect", "--home", str(home), "--export", file]) == 2
    assert "dpo has no recorded steps of PPO; leave --export out" in capsys.readouterr().err
    both = recorded_runs([find_run("small", str(run)), find_run("dpo", str(home))])
    assert {kind: [each.name for each in runs] for kind, runs in both.items()} == {
        "ppo": ["small"], "evaluation": ["dpo"],
    }  # fmt: skip


def test_the_command_exports_a_step_of_the_newest_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.html"
    assert cli.main(["inspect", "--home", str(run), "--export", str(file), "--step", "3"]) == 0
    assert capsys.readouterr().out == f"step 3 of small: {file}\n"
    assert "<title>Step 3 · small</title>" in file.read_text()
    assert cli.main(["inspect", "--home", str(run), "--step", "3"]) == 2
    assert cli.main(["inspect", "small", "small", "--home", str(run), "--export", str(file)]) == 2


def test_the_command_prints_a_link_and_ends_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "rlhf_cli.main", "inspect", "small", "--home", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        [url] = re.findall(
            r"open (http://127\.0\.0\.1:\d+/[\w-]{22}/) in a browser", server.stdout.readline()
        )
        answer = httpx.get(url, follow_redirects=True, timeout=60)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    assert answer.status_code == 200 and "Means by step" in answer.text


def test_a_run_without_a_record_is_an_input_error(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path / "ppo", ignore=shutil.ignore_patterns("record"))
    _publish(tmp_path, "bare", {"ppo": tmp_path / "ppo"})
    with pytest.raises(InputError, match=r"bare has no record \(record\.level"):
        recorded_runs([find_run("bare", str(tmp_path))])


def test_the_newest_run_is_the_one_that_finished_last(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished run"):
        newest_run(str(tmp_path))
    for place, name in enumerate(("b", "c", "a")):
        file = tmp_path / "runs" / name / "summary.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (place, place))
    assert newest_run(str(tmp_path)).endswith("runs/a/summary.json")
    for name, updated in (("b", 3.0), ("c", 1.0), ("a", 2.0)):  # a copy of the home has other times
        (tmp_path / "runs" / name / "run.json").write_text(
            json.dumps({"state": "finished", "updated": updated})
        )
    assert newest_run(str(tmp_path)).endswith("runs/b/summary.json")


def test_its_pages_leave_the_filters_of_the_report_as_they_are() -> None:
    before = dict(environment().filters)
    assert _templates().filters["column"] is not before["column"]
    assert environment().filters == before
