"""Answers about watched runs: the lines of the loop and the optimizers, also without a finding."""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report_pages.runs import BEGAN_S, ended, found, make_run, started
from trainwright.agent.tools import RunTools, described, described_fields, optimizer_lines
from trainwright.agent.untrusted import NOTE, answer, as_text
from trainwright.doctor.context import RunContext
from trainwright.errors import UsageError
from trainwright.runs.records import Examined, Watched, Where

PROGRAM = """
import torch
from torch import nn
import trainwright as tw

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x @ torch.randn(8, 1)


def make_optimizer(module):
    groups = [{"params": [module.weight], "weight_decay": 10.0}, {"params": [module.bias]}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


body, head = nn.Linear(8, 16), nn.Linear(16, 1)
model = nn.Sequential(body, nn.Tanh(), head)
opt_body = make_optimizer(body)
opt_head = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)


def train_step(rows):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    opt_body.zero_grad()
    opt_head.zero_grad()
    loss.backward()
    opt_head.step()
    opt_body.step()


with tw.watch(model, [opt_body, opt_head], out=OUT, quiet=True):
    for rows in torch.randperm(256).split(32):
        train_step(rows)
"""


def line_of(text: str) -> str:
    number = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.strip().startswith(text))
    return f"loop.py:{number}"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> RunTools:
    """The tools for a run of ``PROGRAM``, which has no finding."""
    root = tmp_path_factory.mktemp("project")
    (root / "loop.py").write_text(PROGRAM)
    os.utime(root / "loop.py", (1e9, 1e9))
    runpy.run_path(str(root / "loop.py"), {"OUT": str(root / "runs" / "quiet")})
    return RunTools(root / "runs", root)


def test_a_run_without_a_finding_names_its_lines(tools: RunTools) -> None:
    made = tools.diagnose_run("quiet")
    assert made["findings"] == []
    calls = made["calls"]
    assert isinstance(calls, list) and f"backward {line_of('loss.backward')}" in calls
    assert made["optimizers"] == [
        f"optimizer 0: AdamW opt_body, made {line_of('return torch.optim')}, "
        f"step {line_of('opt_body.step')}, zero_grad {line_of('opt_body.zero_grad')}",
        f"optimizer 1: SGD opt_head, made {line_of('opt_head =')}, "
        f"step {line_of('opt_head.step')}, zero_grad {line_of('opt_head.zero_grad')}",
    ]


def test_source_lines_without_a_finding_are_those_of_the_loop(tools: RunTools) -> None:
    made: Any = tools.source_lines("quiet")
    assert made["file"] == "loop.py" and any(">" in each and "loss.backward()" in each for each in made["lines"])


def test_the_setup_has_the_groups_of_each_optimizer(tools: RunTools) -> None:
    made: Any = tools.get_setup("quiet")
    body, head = made["optimizers"]
    assert [(each["tensors"], each["lr"], each["weight_decay"]) for each in body["groups"]] == [
        (1, 0.01, 10.0),
        (1, 0.01, 0.0),
    ]
    assert head["groups"] == [{"tensors": 2, "lr": 0.1, "weight_decay": 0.0}]
    assert (head["class"], head["variable"]) == ("SGD", "opt_head") and "momentum=0.9" in head["made_by"]


def test_an_error_without_a_finding_suggests_tools(tools: RunTools) -> None:
    for ask in (tools.finding_evidence, tools.source_lines):
        with pytest.raises(UsageError, match="has no finding") as refused:
            ask("quiet", code="optim.lr_too_high")
        assert "source_lines" in str(refused.value) and "trainwright " not in str(refused.value)


def test_measurements_are_described(tools: RunTools) -> None:
    listed: Any = tools.measurements("quiet")
    assert listed["experiments"]["update"].endswith(": One replayed update")
    assert all(text.partition(": ")[2] for text in listed["experiments"].values())
    made: Any = tools.measurements("quiet", "update")
    assert made["about"] == "One replayed update"
    assert made["fields"]["weight_decay"] == "Weight decay of each group in each update"
    assert made["fields"].keys() <= made["values"].keys() and "norm_at_clip" not in made["fields"]  # without a clip


def test_comments_before_a_field_describe_it() -> None:
    assert described_fields("calls")["split_windows"].startswith("(step, backward passes before the end of an epoch")
    assert described("weights").endswith(" ...") and len(described("weights")) <= 64
    assert "experiment" not in described_fields("calls") and described("nothing") == ""


def test_changed_code_is_noted_beside_an_optimizer(tools: RunTools) -> None:
    path = tools.code / "loop.py"
    os.utime(path)
    made: Any = tools.diagnose_run("quiet")
    os.utime(path, (1e9, 1e9))
    assert all("was changed after the run" in each for each in made["optimizers"])


def test_a_diagnosis_without_a_finding_takes_few_tokens(tools: RunTools) -> None:
    answers = (
        tools.list_runs(),
        tools.diagnose_run("quiet"),
        tools.get_setup("quiet"),
        tools.source_lines("quiet"),
        tools.measurements("quiet"),
        tools.measurements("quiet", "update"),
        tools.measurements("quiet", "weights"),
        tools.get_series("quiet", "loss"),
    )
    made = [as_text(answer(each, 800)) for each in answers]
    assert sum(map(len, made)) / 4 < 3000 and "left_out" not in "".join(made)


@pytest.mark.parametrize("line", ["loop.py:3", "loop.py", "src/loop.py:3"])
def test_a_line_may_be_named_with_its_folder_or_without_its_number(tools: RunTools, line: str) -> None:
    made: Any = tools.source_lines("quiet", line=line)
    assert made["file"] == "loop.py" and made["lines"]


@pytest.mark.parametrize("line", ["other.py:3", "loop", "loop.py:x", "loop.py:3:4", "../../etc/passwd:1"])
def test_an_unknown_file_lists_those_that_are_there(tools: RunTools, line: str) -> None:
    with pytest.raises(UsageError, match=r"known files: loop\.py"):
        tools.source_lines("quiet", line=line)


def watched(events: Any, lines: Any) -> Watched:
    return Watched(time_s=BEGAN_S, step=1, loss=1.0, grad_norm=1.0, lr=0.1, events=events, values={"lines": lines})


def test_the_backward_call_comes_first_without_a_finding(tmp_path: Path) -> None:
    for name in ("a_model", "loop"):
        (tmp_path / f"{name}.py").write_text("a = 1\nb = 2\n")
    step = watched([], [["forward", "a_model.py:1"], ["backward", "loop.py:2"]])
    make_run(tmp_path / "runs", "one", [started(), step, ended(1)])
    made: Any = RunTools(tmp_path / "runs", tmp_path).source_lines("one")
    assert made["file"].startswith("loop.py") and made["lines"][1] == "> 2  b = 2"
    assert (made["shown_file"], made["shown_lines"][0]) == ("a_model.py", "> 1  a = 1")


def test_calls_without_a_line_or_of_a_module_are_of_no_optimizer() -> None:
    step = [["step", {"optimizer": 1}], ["step", {"optimizer": 0}]]
    module = [["zero_grad", -1], ["zero_grad", 0]]
    one = watched([*step, *module], [["step", "a.py:1"], ["zero_grad", "a.py:2"], ["zero_grad", "a.py:3"]])
    assert optimizer_lines(RunContext([one])) == {0: {"zero_grad": "a.py:3"}}


def test_evidence_does_not_repeat_the_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n".join(f"line_{n} = {n}" for n in range(1, 40)))
    finding = replace(found(), where=Where(source="train.py:20"))
    make_run(tmp_path / "runs", "one", [started(), finding, ended(100)])
    made: Any = RunTools(tmp_path / "runs", tmp_path).finding_evidence("one")
    diagnosed = {"finding", "calls", "others", "cause", "remedy", "symptom"}
    assert made["code"] == "optim.lr_too_high" and not diagnosed & made.keys()
    assert made["expected_and_seen"] == [["the loss jumps (measure)", "3.5", "less"]]
    assert "> 20  line_20 = 20" in made["lines"]


EVIL = "<script>x</script>\x1b[2J [a](http://x) token=abcdefgh"


@pytest.mark.parametrize(
    ("events", "lines", "facts"),
    [
        ([["step", EVIL], ["step", {}]], [["step", f"{EVIL}.py:1"], ["step", "../../m.py:1"]], {"optimizers": EVIL}),
        ([["step", {"optimizer": -5}], [], 3], [["step"], 3], {"optimizers": [{"parameters": 1}]}),
        ([["step", {"optimizer": 10**9}]], [["step", "m.py:99999999"]], {"carried": {}}),
        ([["step", {"optimizer": 0}]], [["step", f"{EVIL}.py:1"]], {}),
    ],
    ids=["texts", "shapes", "numbers", "names"],
)
def test_a_damaged_watched_run_is_data(tmp_path: Path, events: Any, lines: Any, facts: Any) -> None:
    examined = [Examined(time_s=BEGAN_S, step=1, experiment=name, values=facts) for name in ("calls", "update", EVIL)]
    make_run(tmp_path / "runs", "bad", [started(), watched(events, lines), *examined, ended(1)])
    tools = RunTools(tmp_path / "runs", tmp_path)
    for made in (
        tools.diagnose_run("bad"),
        tools.get_setup("bad"),
        tools.measurements("bad"),
        tools.source_lines("bad"),
    ):
        text = as_text(answer(made, 800))
        assert NOTE in text
        for part in ("<script", "\x1b", "](", "abcdefgh"):
            assert part not in text
