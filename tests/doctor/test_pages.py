"""The pages of `explain`: whole, short, found by code, by group and by a misspelt code, and none is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.doctor.pages import FOLDER, SECTIONS, codes, page, title
from trainwright.errors import UsageError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z]+\.[a-z][a-z0-9_]*")


def zoo_labels() -> set[str]:
    """The labels of all `fault("D01", "data.nonfinite_input", ...)` of the zoo, without running it."""
    trees = [ast.parse(path.read_text(), str(path)) for path in (ROOT / "tests" / "zoo").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    faults = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "fault"]
    return {ast.literal_eval(label) for call in faults for label in call.args[1:]}


def found_codes() -> set[str]:
    """The codes that checks of the doctor name, wherever they are written in full as `finding("code", ...)`."""
    trees = [ast.parse(path.read_text(), str(path)) for path in (ROOT / "trainwright" / "doctor").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "finding"]
    return {each.value for each in named if isinstance(each, ast.Constant)}


@pytest.mark.parametrize("code", codes())
def test_a_page_is_whole_and_short(code: str) -> None:
    text = page(code)
    assert CODE.fullmatch(code)
    assert text.splitlines()[0] == f"## {code}"
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 120
    sections = re.findall(r"^\*\*(.+?)\.\*\* ?(.*)$", text, flags=re.MULTILINE)
    names = [name for name, _ in sections]
    assert names in (list(SECTIONS), list(SECTIONS[:-1]))
    assert all(rest for name, rest in sections if name != "Remedies")
    assert re.search(r"^\*\*Remedies\.\*\*\n- \S", text, flags=re.MULTILINE)
    assert text.count("`") % 2 == 0


@pytest.mark.parametrize("code", codes())
def test_a_title_is_one_sentence(code: str) -> None:
    assert title(code).endswith(".")
    assert 20 <= len(title(code)) <= 120
    assert "\n" not in title(code) and "**" not in title(code)


@pytest.mark.parametrize("code", codes())
def test_a_page_refers_to_pages_that_exist(code: str) -> None:
    groups = {each.partition(".")[0] for each in codes()}
    spans = re.findall(r"`([^`]+)`", page(code))
    meant = [each for each in spans if CODE.fullmatch(each) and each.partition(".")[0] in groups]
    assert set(meant) <= set(codes())
    assert {each[:-2] for each in spans if each.endswith(".*")} <= groups


def test_a_page_lies_in_the_file_of_its_group() -> None:
    written = [
        (path.stem, code) for path in FOLDER.glob("*.md") for code in re.findall(r"^## (.+)$", path.read_text(), re.M)
    ]
    assert [(stem, code) for stem, code in written if code.partition(".")[0] != stem] == []
    assert sorted(code for _, code in written) == list(codes()), "a code has two pages"


def test_every_label_of_the_zoo_has_a_page() -> None:
    assert len(zoo_labels()) > 50
    assert zoo_labels() - set(codes()) == set()


def test_every_code_of_a_check_has_a_page() -> None:
    assert found_codes() - set(codes()) == set()


@pytest.mark.parametrize("group", ["num.", "num"])
def test_a_group_lists_its_codes(group: str) -> None:
    lines = page(group).splitlines()
    assert [line.split()[0] for line in lines] == [code for code in codes() if code.startswith("num.")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [title(line.split()[0]) for line in lines]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("loss.softmax_before_cross_entropy", "'loss.softmax_before_ce'"),
        ("missing_zero_grad", "'opt.missing_zero_grad'"),
        ("optim.lr_too_high", "'opt.lr_too_high'"),
        ("num.zzz", "known are: num.div_by_zero"),
        ("qqq", "known are: accum., ckpt., "),
        ("", "known are: accum., ckpt., "),
        ("../data", "'data.'"),
    ],
)
def test_an_unknown_code_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match="there is no page for") as caught:
        page(wrong)
    assert right in caught.value.remedy
    with pytest.raises(UsageError, match="there is no page for"):
        title(wrong)


def test_pages_need_no_torch() -> None:
    program = "import sys; from trainwright.doctor.pages import page; page('num.'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
