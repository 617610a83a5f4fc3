"""A recorded step with one change: what it would have been, beside the unchanged step."""

from __future__ import annotations

import re

import pytest

from tests.commands.replayed_runs import train, work_in
from trainwright.commands.replay import rerun
from trainwright.errors import UsageError
from trainwright.runs.folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("tried")
    with pytest.MonkeyPatch.context() as patch:
        work_in(folder, patch)
        run = train("until=6steps")
    return RunFolder(folder / run.path)


def tried(run: RunFolder, change: str, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = run.path.parents[1]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    done = rerun(run.path, 6, change=change)
    assert done.same_bits and done.changed is not None and done.changed.change == change
    assert not done.findings and f"tried {change}: " in "\n".join(done.lines())
    return done.changed.outcome


def test_without_a_learning_rate_the_loss_stays(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tried(run, "lr=0", monkeypatch)
    now, was = re.findall(r"loss ([\d.]+) -> ([\d.]+) in 8 steps; unchanged: ([\d.]+) -> ([\d.]+)", text)[0][:2], text
    assert now[0] == now[1] and "no better with the change" in was


@pytest.mark.parametrize("change", ["fp64", "eval", "op=linear", "clip=0.001"])
def test_the_change_is_made(run: RunFolder, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    text = tried(run, change, monkeypatch)
    assert "unchanged: " in text
    now, was = text.split("unchanged: ")[:2]
    if change not in ("op=linear", "fp64"):  # of which the printed digits may be the same
        assert re.findall(r"[\d.]{5,}", now) != re.findall(r"[\d.]{5,}", was)[: len(re.findall(r"[\d.]{5,}", now))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nothing", "must be one of"),
        ("lr", "needs a value"),
        ("fp32=1", "has a value, which it does not accept"),
        ("lr=fast", "not a number of 0 or more"),
        ("op=nothing", "does not call nothing; it calls .*linear"),
        ("remedy=optim.lr_too_high", "no finding"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, change: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        tried(run, change, monkeypatch)


def test_a_part_of_a_micro_batch_is_compared_with_that_micro_batch(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="its samples are") as error:
        tried(run, "without=999", monkeypatch)
    samples = re.findall(r"\d+", str(error.value).partition("its samples are ")[2].partition("\n")[0])
    assert len(samples) == 12
    changes = ("lr=1", f"without={samples[0]}", f"without={samples[-1]}")
    losses = {re.findall(r"unchanged: loss ([\d.]+)", tried(run, change, monkeypatch))[0] for change in changes}
    assert len(losses) == 3, "of the step, and of each of its two micro-batches"
