"""The script of the review page, in Node.js with a small document. Skipped without Node.js.

- a reload keeps votes, session and name; the file that is saved then is one of the same person
- `Another person` begins without votes, in another session, and not before the votes are saved
- keys that are typed in the field of the name are no votes
- a browser without storage still votes and saves, and asks before it leaves unsaved votes; so does a tab
  whose votes another tab has replaced in the storage
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from rlhf_core.evaluation.review import blind_pairs, read_votes
from rlhf_core.evaluation.votes import newest_files, parse_votes
from rlhf_core.ops.review import render_page

PAIRS = blind_pairs(
    [
        {"prompt_id": f"p{i}", "prompt": f"{i}", "sft": f"a {i}", "ppo": f"b {i}", "winner": None}
        for i in range(3)
    ],
    "d" * 64,
)
DOCUMENT = """
const storage = {};
let saved = [], elements, keydown, beforeunload;
function element() {
  const listeners = {};
  return {
    dataset: {}, value: "", textContent: "", files: [], listeners,
    setAttribute() {}, addEventListener(name, act) { listeners[name] = act; },
    click() { if (listeners.click) listeners.click(); },
  };
}
function load(canStore) {
  elements = {};
  const pairs = Array.from({ length: PAIRS }, element);
  const choices = ["1", "tie", "2"].map((choice) => Object.assign(element(), { dataset: { vote: choice } }));
  const bar = element();
  globalThis.document = {
    body: { dataset: { page: PAGE } },
    querySelectorAll: (text) => (text === "article" ? pairs : choices),
    querySelector: () => bar,
    getElementById: (name) => (elements[name] = elements[name] || element()),
    createElement: () => element(),
    addEventListener: (name, act) => { keydown = act; },
  };
  globalThis.window = { scrollTo() {}, addEventListener: (name, act) => { beforeunload = act; } };
  globalThis.localStorage = {
    getItem(name) { if (!canStore) throw new Error("no storage"); return storage[name] ?? null; },
    setItem(name, text) { if (!canStore) throw new Error("no storage"); storage[name] = text; },
  };
  globalThis.Blob = class { constructor(parts) { URL.last = parts.join(""); } };
  globalThis.URL = {
    createObjectURL() { saved.push(URL.last); return ""; }, revokeObjectURL() {},
  };
  eval(SCRIPT);
}
const key = (text, target) => keydown({ key: text, target, preventDefault() {} });
const click = (name) => elements[name].listeners.click();
const call = (name) => { elements.person.value = name; elements.person.listeners.change(); };
const asks = () => { let asked = false; beforeunload({ preventDefault() { asked = true; } }); return asked; };
const message = () => elements.message.textContent;
"""


def run(actions: str) -> Any:
    """Return the value of `out` after the actions, and the files that the page saved."""
    document = render_page("demo", PAIRS)
    [script] = re.findall("<script>(.*?)</script>", document, re.DOTALL)
    [page] = re.findall('data-page="(.*?)"', document)
    constants = f"const PAIRS = {len(PAIRS)}, PAGE = {json.dumps(page)}, SCRIPT = {json.dumps(script)};"
    program = f"{constants}{DOCUMENT}let out = [];{actions};console.log(JSON.stringify([out, saved]));"
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_reload_keeps_votes_session_and_name() -> None:
    actions = """
    load(true); key("1"); call("Ann"); click("save");
    load(true); out.push(elements.person.value, message()); key("0"); out.push(asks());
    load(true); key("2"); click("save");
    """
    out, saved = run(actions)
    assert out == ["Ann", "The votes of the last visit are restored.", False]
    first, last = (parse_votes(text, "file") for text in saved)
    assert (first.choices, last.choices) == (("1", None, None), ("1", "tie", "2"))
    assert (first.person, last.person, first.session) == ("Ann", "Ann", last.session)
    assert newest_files([first, last]) in ([last], [first]) and len(read_votes(last, PAIRS)) == 3


def test_another_person_begins_after_the_votes_are_saved() -> None:
    actions = """
    load(true); key("1"); click("another"); out.push(message());
    click("save"); click("another"); out.push(message(), elements.person.value); key("2"); click("save");
    load(true); key("2"); click("save");
    """
    out, saved = run(actions)
    assert out == [
        "Save the votes first. The page then begins without them.",
        "The page is ready for another person.",
        "",
    ]
    one, two, three = (parse_votes(text, "file") for text in saved)
    assert (one.choices[0], two.choices[0], two.person) == ("1", "2", None)
    assert one.session != two.session and two.session == three.session


def test_keys_in_the_field_of_the_name_are_no_votes() -> None:
    _, [saved] = run(
        'load(true); key("1", elements.person); key("s", elements.person); key("2"); click("save");'
    )
    assert parse_votes(saved, "file").choices == ("2", None, None)


def test_a_browser_without_storage_asks_before_votes_are_lost() -> None:
    out, [saved] = run('load(false); key("1"); out.push(asks()); click("save"); out.push(asks());')
    assert out == [True, False]
    assert parse_votes(saved, "file").choices == ("1", None, None)


@pytest.mark.parametrize("of_one_session", [False, True])
def test_a_tab_asks_if_another_tab_has_replaced_its_votes(of_one_session: bool) -> None:
    first = 'load(true); key("1"); ' if of_one_session else ""
    actions = f"""
    {first}load(true); const one = [beforeunload, keydown];
    load(true); const two = [beforeunload, keydown];
    const use = (tab) => {{ [beforeunload, keydown] = tab; }};
    use(one); key("1"); out.push(asks());
    use(two); key("2"); key("2"); out.push(asks());
    use(one); out.push(asks());
    """
    assert run(actions)[0] == [False, False, True]
