"""The measures of the structure script, on a small tree.

- import cycles are found inside packages, and lazy imports are counted separately
- the PPO step follows functions, methods, remote method names and re-exported names
- comments are counted without directives, code without blank lines, comments and docstrings
- configuration leaves: lists and maps of values count as one, sections in maps and inherited sections once
- public functions with more than four parameters have `Args`
- the script prints its help, and names a commit that does not exist
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.structure import (
    code_lines,
    comment_lines,
    count_leaves,
    files_naming,
    files_of_ppo_step,
    lacks_args,
    main,
)
from tests.support.source_tree import SourceTree, cycles, product

FILES = {
    "rlhf_core/__init__.py": "",
    "rlhf_core/ppo/__init__.py": "",
    "rlhf_core/ppo/controller.py": (
        "from rlhf_core.ppo.fleet.fleet import Fleet\n"
        "from rlhf_core import losses\n"
        "class PPOController:\n"
        "    def iterate(self, fleet: Fleet):\n"
        "        fleet.update()\n"
        "        losses.clip()\n"
        "    def save(self):\n"
        "        from rlhf_core.unused import save\n"
        "        save()\n"
    ),
    "rlhf_core/ppo/fleet/fleet.py": (
        "class Fleet:\n"
        "    def update(self):  # why\n"
        "        self.submit('train')  # noqa: S1\n"
        "    def submit(self, name): ...\n"
    ),
    "rlhf_core/ppo/fleet/worker.py": "class Worker:\n    def train(self):\n        return 'register'\n",
    "rlhf_core/losses.py": "def clip():\n    from rlhf_core import ratio\n",
    "rlhf_core/ratio.py": "from rlhf_core import losses\n",
    "rlhf_core/unused.py": "def save(): ...\n",
}


def tree(folder: Path) -> SourceTree:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceTree(folder)


def test_cycles_are_found_with_and_without_lazy_imports(tmp_path: Path) -> None:
    source = tree(tmp_path)
    assert cycles(source.import_graph(only_at_import=True)) == []
    assert cycles(source.import_graph(only_at_import=False)) == [["rlhf_core.losses", "rlhf_core.ratio"]]
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles(ring) == [["a", "b", "c"]]


def test_ppo_step_follows_calls_and_remote_method_names(tmp_path: Path) -> None:
    names = [module.name for module in files_of_ppo_step(tree(tmp_path))]
    assert names == [
        "rlhf_core.losses",
        "rlhf_core.ppo.controller",
        "rlhf_core.ppo.fleet.fleet",
        "rlhf_core.ppo.fleet.worker",
    ]


def test_comments_and_stage_names_are_counted(tmp_path: Path) -> None:
    source = tree(tmp_path)
    assert comment_lines(source.modules["rlhf_core.ppo.fleet.fleet"]) == 1
    assert files_naming(source, "register") == 1


def test_sections_of_a_copied_configuration_and_names_of_seeds_are_no_names_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "rlhf_core/one.py"
    file.parent.mkdir()
    file.write_text("derive_seed(1, 'sft')\nconfig.model_copy(update={'ppo': 1, 'data': x['data']})\n")
    found = SourceTree(tmp_path)
    assert [files_naming(found, stage) for stage in ("sft", "ppo", "data")] == [0, 0, 1]


def test_configuration_leaves_are_counted_once_for_maps_and_inherited_sections() -> None:
    number, section = {"type": "number"}, {"$ref": "#/$defs/Pair"}
    definitions: dict[str, Any] = {"Pair": {"properties": {"a": number, "b": number}}}
    absent: dict[str, Any] = {"anyOf": [section, {"type": "null"}], "default": None}
    fields: dict[str, Any] = {
        "number": number,
        "list": {"type": "array", "items": section},
        "values": {"additionalProperties": number},
        "sections": {"additionalProperties": section},
        "absent": absent,
    }
    assert count_leaves({"properties": fields}, definitions) == 1 + 1 + 1 + 2 + 2
    definitions["Judge"] = {"properties": {"own": number, "pair": absent}}
    judge = {"anyOf": [{"$ref": "#/$defs/Judge"}, {"type": "null"}]}
    assert count_leaves(judge, definitions) == 1 + 2
    assert count_leaves({**judge, "inherits": True}, definitions) == 1 + 1


def test_public_functions_with_many_parameters_have_args() -> None:
    # A nested function, and an interface of torch.
    allowed = {
        "rlhf_core.models.attention.attend",
        "rlhf_core.models.attention.forward",
    }
    found = {
        f"{module.name}.{function.name}"
        for module in product().modules.values()
        for function in module.functions()
        if lacks_args(function)
    }
    assert found == allowed


def test_code_is_counted_without_blank_lines_comments_and_docstrings(tmp_path: Path) -> None:
    source = tree(tmp_path)
    module = source.modules["rlhf_core.ppo.fleet.fleet"]
    assert code_lines(module) == 4
    (tmp_path / "rlhf_core/ppo/fleet/fleet.py").write_text(
        '"""A module\nof two lines."""\n\n# why\nTEXT = """\n\ntext\n"""\n"""A field."""\n'
        "x = f(\n    1,  # one\n)\n"
    )
    assert code_lines(SourceTree(tmp_path).modules["rlhf_core.ppo.fleet.fleet"]) == 4 + 3


@pytest.mark.parametrize(("argument", "code", "message"), [("--help", 0, "usage"), ("nothing", 2, "nothing")])
def test_arguments_that_are_no_commits(
    argument: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == code
    output = capfd.readouterr()
    assert message in (output.err if code else output.out) and "Traceback" not in output.err
