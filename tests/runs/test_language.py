"""Output in Chinese: the same codes, placeholders, figures and code as the English lines, which the program prints."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright
from tests.report_pages.runs import ended, found, make_run, started, step
from trainwright.cli.app import app
from trainwright.doctor.discovery import all_checks
from trainwright.monitoring.progress import ProgressLine
from trainwright.report.pages.report import write_report
from trainwright.runs.language import PLACEHOLDER, VARIABLE, Catalogue, catalogue, language

LINES = catalogue("zh").lines
CODE = re.compile(r"`[^`]+`|\b[a-z]+(?:_[a-z]+)+\b|\b\w+\(\)")
FIGURE = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")
WORD = re.compile(r"\w+")
HAN = re.compile("[\u4e00-\u9fff]")
TRANSLATED = ("Why it matters", "How it is detected", "Exceptions", "Usual cause", "Fix")
ROOMS = ("cli", "commands", "doctor", "plan", "report", "training", "watching", "monitoring")


@cache
def english() -> set[tuple[str, str]]:
    """Return all pairs of words that follow on each other in a text of the program or of a check."""
    house = Path(trainwright.__file__).parent
    files = [path for room in ROOMS for kind in ("py", "html", "js") for path in (house / room).rglob(f"*.{kind}")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    source = re.sub(r'"\s*\n\s*f?"', "", source).replace('\\"', '"')
    pages = [each.page for each in all_checks()]
    texts = [text for page in pages for text in [page.title, page.further, *map(page.words, TRANSLATED)]]
    return set(pairwise(WORD.findall("\n".join([source, *texts]))))


def signature(text: str) -> list[list[str]]:
    return [sorted({*PLACEHOLDER.findall(text)} - {"s"}), sorted(CODE.findall(text)), sorted(FIGURE.findall(text))]


def test_a_line_has_the_same_placeholders_figures_and_code() -> None:
    assert {key: text for key, text in LINES.items() if signature(key) != signature(text)} == {}
    assert [text for text in LINES.values() if not HAN.search(text)] == []


@pytest.mark.slow
def test_each_english_line_is_one_that_the_program_prints() -> None:
    """Else a line is left in the catalogue after its text was changed."""
    known = english()
    for key in LINES:
        parts = [WORD.findall(part) for part in PLACEHOLDER.split(key)[::2]]
        gone = [pair for part in parts for pair in pairwise(part) if pair not in known]
        assert len(gone) <= 1, (key, gone)  # one joint of two texts of the program


def test_every_page_of_a_check_is_translated() -> None:
    for check in all_checks():
        page = check.page
        texts = [page.title.rstrip("."), page.further, *map(page.words, TRANSLATED)]
        assert [text for text in texts if text and text not in LINES] == [], check.code


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "C", VARIABLE: "zh"}, "zh"),
    ],
)
def test_the_language_is_that_of_the_locale(environ: dict[str, str], expected: str) -> None:
    assert language(environ) == expected


def test_a_line_without_an_entry_stays_english() -> None:
    small = Catalogue(
        {"{n} step{s}": "{n} 步", "seen: {texts}": "实测：{texts}", "{text} (expected {e})": "{text}（预期 {e}）"}
    )
    assert small.text("a\n  1,200 steps\nten steps") == "a\n  1,200 步\nten steps"
    assert small.line("   seen: 3 steps (expected 4); b") == "   实测：3 步（预期 4）；b"
    assert small.line("{n} step") == "{n} step"


def test_a_diagnosis_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "en")
    run = make_run(tmp_path, "run", [started(), *map(step, range(1, 31)), found("optim.lr_too_high", 20), ended(30)])
    chinese = CliRunner().invoke(app, ["diagnose", str(run.path), "--lang", "zh"]).output
    assert "1. 警告：optim.lr_too_high" in chinese or "1. 严重：optim.lr_too_high" in chinese
    assert "结论：" in chinese and "原因：" in chinese and "建议：" in chinese
    as_json = [
        CliRunner().invoke(app, ["--lang", lang, "diagnose", str(run.path), "--json"]).output for lang in ("en", "zh")
    ]
    assert as_json[0] == as_json[1]
    assert CliRunner().invoke(app, ["--lang", "xx", "diagnose", str(run.path)]).exit_code == 2


def test_a_page_in_chinese_escapes_the_text_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "zh")
    evil = replace(
        found(), symptom="step 3 is not finite", cause="labels are counted from 1", remedy="<script>1</script>"
    )
    run = make_run(tmp_path, "run", [started(), *map(step, range(1, 31)), evil, ended(30)])
    page = write_report([run.path]).path.read_text(encoding="utf-8")
    for part in ('<html lang="zh">', "<dt>原因</dt><dd>标签从 1 开始计数</dd>", "第 3 步出现非有限值"):
        assert part in page, part
    assert "<script>1" not in page and "&lt;script&gt;1" in page


def test_the_page_of_a_check_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "en")
    said, english = (
        CliRunner().invoke(app, ["explain", "data.batches_repeat", "--lang", lang]).output for lang in ("zh", "en")
    )
    assert said.startswith("## data.batches_repeat\n\n连续多步都在同一批数据上训练\n\n**为什么重要**：")
    assert "**建议**：遍历 loader" in said
    blocks = [line for line in english.splitlines() if line.startswith("    ")]
    assert blocks and [line for line in said.splitlines() if line.startswith("    ")] == blocks


LINES_OF_COMMANDS = {
    "  backward   23.9 MiB WOOOaa <- peak": "  反向       23.9 MiB WOOOaa <- 峰值",
    "between steps 3.68 MiB: weights 937 KiB, inputs 24 KiB": "步与步之间 3.68 MiB：权重 937 KiB，输入 24 KiB",
    "  checkpointing none: nothing is recomputed; block would be 15.4 MiB, 22% slower": (
        "  重算          none：什么都不重算；block 则为 15.4 MiB，慢 22%"
    ),
    "  seen: norm at the update 3 (expected 1.5); rows used 4": "  实测：更新时的范数 3（预期 1.5）；用到的行 4",
    "  tried: clip at: no better with gradients clipped at 1: loss 2 -> 3 in 8 steps": (
        "  已尝试：裁剪梯度：没有改善，梯度裁剪在 1：损失 2 -> 3（8 步）"
    ),
    "  tried: in fp32: in fp32: loss 2, gradient norm 1; unchanged: loss 3, gradient norm 2": (
        "  已尝试：用 fp32：用 fp32：损失 2，梯度范数 1；不改：损失 3，梯度范数 2"
    ),
    "step      6   validation loss 2.256   accuracy 0.1": "第      6 步   验证损失 2.256   accuracy 0.1",
    "  a: finished (no finding) at step 60 after 7.2 s, loss 1.5, validation 1.6 (best 1.4)": (
        "  a：已结束（没有发现问题），第 60 步，历时 7.2 s，损失 1.5，验证损失 1.6（最低 1.4）"
    ),
    "    validation loss 1.6 reached at step 54, after 6.3 s": "    验证损失在第 54 步达到 1.6，历时 6.3 s",
    "waits for data 14%": "等数据 14%",
    "loss nan": "损失 nan",
    "loss of the second kind": "loss of the second kind",
}


@pytest.mark.parametrize("line", LINES_OF_COMMANDS)
def test_lines_of_commands(line: str) -> None:
    assert catalogue("zh").line(line) == LINES_OF_COMMANDS[line]


def test_the_progress_line_is_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ProgressLine(
        fraction=0.43,
        step=860,
        loss=2.912,
        lr=0.00025,
        memory_bytes=2**31,
        samples_s=1234.0,
        memory_of="GPU",
        findings="1 warning",
        skipped=2,
        left_s=130.0,
    )
    english = line.text()
    monkeypatch.setenv(VARIABLE, "zh")
    assert line.text().split("  ")[:4] == [" 43%", "第 860 步", "损失 2.912", "学习率 0.00025"]
    assert "1 条警告  跳过 2 步  剩余 2m10s  显存 2.00 GiB  1,234 样本/秒" in line.text()
    monkeypatch.setenv(VARIABLE, "en")
    assert line.text() == english


def test_help_is_chinese_for_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "en")  # restored afterwards: --lang sets it
    said = CliRunner().invoke(app, ["--lang", "zh", "--help"]).output
    commands = said.partition("Commands:")[2].strip().split("\n")
    assert len(commands) > 25 and [line for line in commands if not HAN.search(line)] == []
    monkeypatch.setenv(VARIABLE, "zh")
    said = CliRunner().invoke(app, ["train", "--help"]).output
    assert "按配置文件训练" in said and "退出码" in said and "覆盖配置中的一个值" in said
