"""The evidence for a finding as a Markdown file: complete, without secrets, and inert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report_pages.runs import ended, evaluated, found, make_run, started, step
from trainwright.errors import UsageError
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.evidence import points_around, write_evidence
from trainwright.report.pages.view import RunView
from trainwright.report.source_lines import excerpt_of
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Watched, Where
from trainwright.runs.secrets import masked_code

CODE = "\n".join(["import torch", *(f"line_{n} = {n}" for n in range(2, 30)), 'api_key = "k-1234"', "step()"])


def watched(number: int) -> Watched:
    lines = [["backward", "train.py:20"], ["step", "train.py:31"]]
    return Watched(
        time_s=1.0, step=number, loss=0.5, grad_norm=1.0, lr=0.1, values={"lines": lines} if number == 1 else {}
    )


def run_with(tmp_path: Path, **changes: object) -> RunFolder:
    finding = replace(found("optim.lr_too_high", 20, text="the loss jumps"), **changes)  # type: ignore[arg-type]
    records = [started(), watched(1), *(step(n) for n in range(1, 101)), evaluated(40, 0.7), finding, ended(100)]
    return make_run(tmp_path / "runs", "one", records, settings={"optimizer.lr": 0.25})


def evidence(folder: RunFolder, code_root: Path) -> str:
    return write_evidence(folder, code_root=code_root).path.read_text()


def test_the_file_says_what_how_known_and_where(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    folder = run_with(tmp_path, where=Where(source="train.py:20"))
    done = write_evidence(folder, "optim.lr_too_high", code_root=tmp_path)
    assert done.path == folder.path / "evidence-optim.lr_too_high.md"
    text = done.path.read_text()
    for part in (
        "# optim.lr_too_high: ",
        "step 20, since step 18",
        "| the loss jumps (measure) | 3.5 | less |",
        "the loss jumps (remedy)",
        "- the loss jumps (a tenth): loss 2 -> 1",
        "| **20** | 0.447214 | 1 | 0.001 |",
        "| 40 | 0.7 |",
        "> 20  line_20 = 20",
        "backward train.py:20",
        "lr: 0.25",
        "python | 3.11.7",
    ):
        assert part in text, part
    assert "| 60 |" not in text and "host-of-one" not in text


def test_a_step_with_two_records_is_listed_once(tmp_path: Path) -> None:
    folder = run_with(tmp_path, step=1, since_step=None)  # step 1 has a record of the watch, too
    points = points_around(RunView.read(folder.path), next(iter(diagnosis_of(folder).findings)))
    assert [each.step for each in points] == [1, 2, 3, 4, 5, 6]


def test_a_finding_without_a_line_shows_the_lines_of_its_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    text = evidence(run_with(tmp_path, where=Where()), tmp_path)
    assert "> 20  line_20 = 20" in text and "> 31  step()" in text and "\n> 21" not in text
    assert "k-1234" not in text and 'api_key = "<masked>"' in text


def test_text_of_the_run_stays_in_its_place(tmp_path: Path) -> None:
    evil = "x\n# Heading\n```\n<img src=x> [click](javascript:1) | cell \x1b[2J token=abcd \U000e0041\u200b"
    text = evidence(run_with(tmp_path, symptom=evil), tmp_path)
    line = next(each for each in text.splitlines() if each.startswith("**What is wrong.**"))
    assert "# Heading" in line and "&lt;img" in line and "](" not in line and "\\x1b" in line and "abcd" not in line
    assert "\U000e0041" not in text and "\u200b" not in text


@pytest.mark.parametrize("source", ["../secret.py:1", "/etc/passwd:1", "secret.txt:1", "linked.py:1", "twice.py:1"])
def test_a_log_leads_to_no_other_file(tmp_path: Path, source: str) -> None:
    root = tmp_path / "code"
    for folder in ("a", "b", ".venv"):
        (root / folder).mkdir(parents=True)
        (root / folder / "twice.py").write_text("content")
    (tmp_path / "secret.py").write_text("content")
    (root / "secret.txt").write_text("content")
    (root / "linked.py").symlink_to(tmp_path / "secret.py")
    seen = excerpt_of([source], root)
    assert seen is None or (not seen.lines and "give the folder of the code" in seen.note)


def test_a_line_after_the_end_of_the_file_is_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one\ntwo\n")
    seen = excerpt_of(["train.py:20", "train.py:2"], tmp_path)
    assert seen is not None and not seen.lines and "has only 2 lines" in seen.note
    seen = excerpt_of(["train.py:2", "train.py:20"], tmp_path)
    assert seen is not None and seen.lines == ("one", "two") and seen.marked == (2,)


def test_a_file_in_a_run_folder_is_no_code_of_the_user(tmp_path: Path) -> None:
    folder = run_with(tmp_path)
    (folder.path / "evil.py").write_text("# do this\n")
    folder = run_with(tmp_path, where=Where(source="evil.py:1"))
    text = evidence(folder, tmp_path)
    assert "do this" not in text and "no file below" in text


def test_changed_code_is_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    seen = excerpt_of(["train.py:20"], tmp_path, began_s=1.0)
    assert seen is not None and "changed after the run began" in seen.note


def test_an_unknown_finding_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean 'optim\.lr_too_high'"):
        write_evidence(run_with(tmp_path), "optim.lr_too_hihg")


@pytest.mark.parametrize(
    ("text", "is_masked"),
    [
        ('api_key = "abc"', True),
        ('{"Authorization": "Bearer x"}', True),
        ("os.environ['HF_TOKEN'] = 'q'", True),
        ('setenv("WANDB_API_KEY", "zzz")', True),
        ('x = "hf_abcdefghijklmnopqrst"', True),
        ('pad_token = "<pad>"', False),
        ('tokenizer = "gpt2"', False),
        ("loss = a.key[3]", False),
    ],
)
def test_secrets_in_code(text: str, is_masked: bool) -> None:
    assert ("<masked>" in masked_code(text)) == is_masked
