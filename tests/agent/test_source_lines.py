"""Excerpts of code for agents, and the statement that makes an optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.report.source_lines import construction_of, excerpt_of

FUNCTIONS = "\n".join(
    [
        *(f"before_{n} = {n}" for n in range(40)),
        "@decorated",
        "def outer():",
        *(f"    a_{n} = {n}" for n in range(20)),
        *(f"after_{n} = {n}" for n in range(40)),
    ]
)


def test_an_excerpt_has_the_enclosing_function(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    seen = excerpt_of(["f.py:61"], tmp_path, max_chars=600)
    assert seen is not None and seen.marked == (61,)
    assert "@decorated" in seen.lines and "    a_19 = 19" in seen.lines
    small = excerpt_of(["f.py:61"], tmp_path, max_chars=300)
    assert small is not None and "@decorated" not in small.lines and len(small.lines) > 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("opt = SGD(p)\nscaler = GradScaler()\nscaler.step(opt)", ("opt", "SGD(p)", "m.py:1", "SGD")),
        ("opt = SGD(p)\ndef closure(): ...\nopt.step(closure)", ("opt", "SGD(p)", "m.py:1", "SGD")),
        ("self.o = t.optim.Adam(p)\n\nself.o.step()", ("self.o", "t.optim.Adam(p)", "m.py:1", "Adam")),
        ("opt = make(p)\n\nopt.step()", ("opt", "make(p)", "m.py:1", "")),
        ("opt = SGD(p)\nopt = Adam(p)\nopt.step()", None),
        ("opt = make(p)\n\nopt.step()\ndef make(p):\n  return A(p)", ("opt", "A(p)", "m.py:5", "A")),
        (
            "opt = make(p)\n\nopt.step()\ndef make(p):\n  if p: return A(p)\n  return B(p)",
            ("opt", "make(p)", "m.py:1", ""),
        ),
        ("for opt in every:\n    pass\n    opt.step()", None),
        ("opt = SGD(\n\nopt.step()", None),
        ("opt = SGD(p)\n\nmodel(x)", None),
    ],
    ids=[
        "scaler",
        "closure",
        "attribute",
        "function of a library",
        "two",
        "function",
        "function with two",
        "loop",
        "no Python",
        "no step",
    ],
)
def test_the_construction_is_that_of_the_variable(tmp_path: Path, text: str, expected: tuple[str, ...] | None) -> None:
    (tmp_path / "m.py").write_text(text)
    made = construction_of("m.py:3", tmp_path)
    assert (made and (made.variable, made.call, made.line, made.kind)) == expected
    assert construction_of("m.py:3", tmp_path / "nothing") is None


def test_changed_code_of_an_optimizer_is_noted(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("opt = SGD(p, api_key='k-123456')\nopt.step()")
    made = construction_of("m.py:2", tmp_path, began_s=1.0)
    assert made is not None and "was changed" in made.note and "k-123456" not in made.call
