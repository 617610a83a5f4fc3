"""The pages of `explain`: whole, short, found by code, by group and by a misspelt code, and none is missing."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house import files, nodes
from tests.rows import each_row
from trainwright.doctor.pages import FOLDER, SECTIONS, codes, law_codes, page, title
from trainwright.doctor.pages import files as files_of_pages
from trainwright.doctor.precision.names.mechanisms import WORDS
from trainwright.errors import UsageError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z]+\.[a-z][a-z0-9_]*")


def zoo_labels() -> set[str]:
    """The labels of all `fault("D01", "data.nonfinite_input", ...)` of the zoo, without running it."""
    calls = (call for path in (ROOT / "zoo").glob("*.py") for call in nodes(path, ast.Call))
    faults = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "fault"]
    return {ast.literal_eval(label) for call in faults for label in call.args[1:]}


@cache
def calls_of(*names: str) -> list[ast.Call]:
    """Every call of a function of these names in the package."""
    calls = (call for path in files() for call in nodes(path, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]


def first_arguments(*names: str) -> list[ast.expr]:
    """The first argument of each such call, whether by position or as ``code=``."""
    named = [[each.value for each in call.keywords if each.arg == "code"] for call in calls_of(*names)]
    return [(call.args[:1] or codes)[0] for call, codes in zip(calls_of(*names), named) if call.args or codes]


def emitted_codes() -> set[str]:
    """The code of every ``finding("code", ...)``, and of every Mechanism, which ``finding(mechanism.code)`` emits."""
    codes = [*first_arguments("finding"), *first_arguments("Mechanism")]
    return {each.value for each in codes if isinstance(each, ast.Constant)}


def explained() -> set[str]:
    """The patterns of ``explains=(...)``, and the codes that a Mechanism brings."""
    named = [each.value for call in calls_of("finding") for each in call.keywords if each.arg == "explains"]
    nodes = [node for value in named for node in ast.walk(value) if isinstance(node, ast.Constant)]
    brought = {code for word in WORDS.values() for code in word.brings}
    return {str(node.value) for node in nodes} | brought


def wrong_with(code: str) -> Iterator[str]:
    """What is not as it should be in the page of a code."""
    text = page(code)
    sections = re.findall(r"^\*\*(.+?)\.\*\* ?(.*)$", text, flags=re.MULTILINE)
    names = [name for name, _ in sections]
    for rule, holds in {
        "the code is well formed": CODE.fullmatch(code),
        "the heading is the code": text.splitlines()[0] == f"## {code}",
        "it has at most 30 lines": len(text.splitlines()) <= 30,
        "lines have at most 120 characters": max(map(len, text.splitlines())) <= 120,
        "the sections are those of every page": names in (list(SECTIONS), list(SECTIONS[:-1])),
        "no section is empty": all(rest for name, rest in sections if name != "Remedies"),
        "remedies are a list": re.search(r"^\*\*Remedies\.\*\*\n- \S", text, flags=re.MULTILINE),
        "every backtick is closed": text.count("`") % 2 == 0,
        "the title is one sentence": title(code).endswith(".") and 20 <= len(title(code)) <= 120,
        "the title is plain": "\n" not in title(code) and "**" not in title(code),
    }.items():
        if not holds:
            yield f"{code}: not so: {rule}"


def test_every_page_is_whole_and_short() -> None:
    assert [problem for code in codes() for problem in wrong_with(code)] == []


def test_every_page_refers_to_pages_that_exist() -> None:
    groups = {each.partition(".")[0] for each in codes()}
    spans = {code: re.findall(r"`([^`]+)`", page(code)) for code in codes()}
    meant = {(code, each) for code in spans for each in spans[code] if CODE.fullmatch(each)}
    assert {(code, each) for code, each in meant if each.partition(".")[0] in groups and each not in codes()} == set()
    assert {each[:-2] for code in spans for each in spans[code] if each.endswith(".*")} <= groups


def test_a_page_lies_in_the_family_that_emits_its_code() -> None:
    written = {path: re.findall(r"^## (.+)$", path.read_text(), re.M) for path in files_of_pages()}
    assert sorted(code for of_file in written.values() for code in of_file) == list(codes()), "a code has two pages"
    for path, of_file in written.items():
        sources = "".join(each.read_text() for each in path.parent.rglob("*.py"))
        of_family = [] if path.parent == FOLDER else of_file
        assert [code for code in of_family if f'"{code}"' not in sources] == [], path


def test_every_label_of_the_zoo_has_a_page() -> None:
    assert len(zoo_labels()) > 50
    assert zoo_labels() - set(codes()) == set()


@pytest.mark.slow
def test_a_page_exists_exactly_when_something_emits_its_code() -> None:
    of_laws = {each for each in emitted_codes() if each.startswith("law.")}
    assert set(codes()) == emitted_codes() - of_laws
    assert of_laws - set(law_codes()) == set()


@pytest.mark.slow
def test_the_code_of_a_finding_is_written_out_or_that_of_a_mechanism() -> None:
    """Otherwise the set of emitted codes could not be read from the source."""
    assert {type(each) for each in first_arguments("Mechanism")} == {ast.Constant}
    computed = [each for each in first_arguments("finding", "Found") if not isinstance(each, ast.Constant)]
    assert sorted(ast.unparse(each) for each in computed) == ["code", "code", "mechanism.code"]


@pytest.mark.slow
def test_every_verdict_of_check_names_a_code_with_a_page() -> None:
    named = [each.value for call in calls_of("Verdict") for each in call.keywords if each.arg == "code"]
    assert {each.value for each in named if isinstance(each, ast.Constant)} - set(codes()) == set()


@pytest.mark.slow
def test_whatever_a_finding_explains_can_be_emitted() -> None:
    assert len(explained()) > 30
    assert [each for each in sorted(explained()) if not fnmatch.filter(codes(), each)] == []


@each_row("group", ["num.", "num"])
def test_a_group_lists_its_codes(group: str) -> None:
    lines = page(group).splitlines()
    assert [line.split()[0] for line in lines] == [code for code in codes() if code.startswith("num.")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [title(line.split()[0]) for line in lines]


@each_row(
    ("wrong", "right"),
    [
        ("loss.softmax_before", "'loss.softmax_before_cross_entropy'"),
        ("missing_zero_grad", "'optim.missing_zero_grad'"),
        ("optim.lr_too_high", "'optim.lr_too_high'"),
        ("num.zzz", "known are: num.div_by_zero"),
        ("qqq", "known are: accum., ckpt., "),
        ("../data", "'data.'"),
    ],
)
def test_an_unknown_code_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match="there is no page for") as caught:
        page(wrong)
    assert right in caught.value.remedy
    with pytest.raises(UsageError, match="there is no page for"):
        title(wrong)


@pytest.mark.process
def test_pages_need_no_torch() -> None:
    program = "import sys; from trainwright.doctor.pages import page; page('num.'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
