"""The verbs with the arguments of ``tw.fit``, and runs whose objects a function makes again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from tests import forked
from tests.commands.made import dataset, make, make_by_name
from trainwright.cli import app
from trainwright.commands import python_api
from trainwright.errors import RecipeError, UsageError

NAME = "tests.commands.made:make"
pytestmark = pytest.mark.process  # each starts threads that read the machine


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def objects() -> Iterator[tuple[Any, ...]]:
    """Model, data, loss and optimizer; nothing of them and no generator may have changed afterwards."""
    torch.manual_seed(0)
    model, data, loss, optimizer = make()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(1)
    random = torch.get_rng_state()
    yield model, data, loss, optimizer
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert model.training and not optimizer.state and all(each.grad is None for each in model.parameters())


def objects_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "provenance.json").read_text())["objects"]
    return found


def test_plan(objects: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    model, data, loss, optimizer = objects
    shown = tw.plan(model, data, loss, optimizer=optimizer, on="h100-80gb")
    assert shown.forecast.parameters == 4 * 16 + 16 + 16 * 2 + 2 and shown.exit_code == 0
    assert shown.forecast.trace.resident["optimizer"] >= 2 * 4 * shown.forecast.parameters, "AdamW has two moments"
    assert "114 parameters, 8 samples a step" in capsys.readouterr().out


def test_plan_measures_a_step_of_the_objects(objects: tuple[Any, ...]) -> None:
    model, data, loss, optimizer = objects
    shown = tw.plan(model, data, loss, optimizer=optimizer, quiet=True)
    assert shown.why_not_measured == ""
    assert shown.measured is not None and shown.measured.predicted.step_s is not None


@pytest.mark.parametrize("verb", [tw.check, tw.plan, tw.profile, tw.lr_range])
def test_all_problems_of_the_settings_are_found_at_once(objects: tuple[Any, ...], verb: Any) -> None:
    model, data, loss, _ = objects
    settings = {"model.freeze": ["9.*"], "optimizer.groups": [{"match": "head.*"}]}
    with pytest.raises(RecipeError) as caught:
        verb(model, data, loss, settings=settings)
    assert [each.path for each in caught.value.problems] == ["model.freeze.0", "optimizer.groups.0.match"]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[3].parameters(), 0.1)],
        lambda model: torch.optim.SGD,
        lambda model: "sgd",
    ],
    ids=["two", "class", "name"],
)
def test_plan_with_other_optimizers(objects: tuple[Any, ...], optimizer: Callable[[nn.Module], Any]) -> None:
    model, data, loss, _ = objects
    rate = {} if optimizer(model).__class__ is list else {"lr": 0.1}
    assert tw.plan(model, data, loss, optimizer=optimizer(model), quiet=True, **rate).exit_code == 0  # type: ignore[arg-type]


def test_lr_range(objects: tuple[Any, ...]) -> None:
    model, data, loss, optimizer = objects
    found = tw.lr_range(model, data, loss, optimizer=optimizer, steps=30, highest=1.0)
    assert len(found.lrs) == 30 and found.lrs[-1] == pytest.approx(1.0) and found.suggestion
    again = tw.lr_range(model, data, loss, optimizer=optimizer, steps=30, highest=1.0)
    assert again == found, "each time from the same start"


@pytest.mark.slow
def test_check(objects: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    model, data, loss, optimizer = objects
    seen = tw.check(model, data, loss, optimizer=optimizer, val=dataset(), steps=200)
    words = {each.what: each.word for each in seen.verdicts}
    assert words["memory"] == words["one batch"] == words["checkpoint"] == "ok" and seen.complete
    assert words["validation"] == "fail", "it validates on its training samples"
    assert "memory" in capsys.readouterr().out


@pytest.mark.slow
def test_profile(objects: tuple[Any, ...]) -> None:
    model, data, loss, optimizer = objects
    found = tw.profile(model, data, loss, optimizer=optimizer, steps=3000, seconds=0.1, budget_s=0, quiet=True)
    assert found.profile.facts.steps > 1 and (found.folder / "profile.json").exists()


@pytest.mark.slow
def test_verify_resume(objects: tuple[Any, ...]) -> None:
    model, data, loss, optimizer = objects
    proof = tw.verify_resume(model, data, loss, optimizer=optimizer, steps=3, quiet=True)
    assert proof.equal and not proof.trial.kill


class Counting(nn.Linear):
    """Keeps a number that no checkpoint has."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + self.calls)


@pytest.mark.slow
def test_verify_resume_finds_what_a_checkpoint_lacks() -> None:
    torch.manual_seed(0)
    proof = tw.verify_resume(Counting(4, 2), dataset(), nn.CrossEntropyLoss(), batch=8, steps=3, quiet=True)
    assert not proof.equal and proof.cause == "resume"


@pytest.mark.slow
def test_verify_resume_of_a_function_kills_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_api, "in_new_python", forked.run_part)  # the same, with torch imported already
    proof = tw.verify_resume(NAME, steps=2, quiet=True)
    assert proof.equal and proof.trial.kill


@pytest.mark.examined
def test_replay_with_the_objects(objects: tuple[Any, ...]) -> None:
    model, data, loss, optimizer = objects
    more: Any = {"steps": 12, "seed": 3, "quiet": True, "settings": {"checkpoint.every": "4steps"}}
    other, loader, _, its_optimizer = make()
    other.load_state_dict(model.state_dict())
    result = tw.fit(other, loader, loss, optimizer=its_optimizer, **more)
    torch.manual_seed(1)
    assert objects_of(result.run)["function"] is None
    for step in (3, 11):  # from the start, and from a checkpoint
        done = tw.replay(result.run, step, model, data, loss, optimizer=optimizer, quiet=True)
        assert done.same_bits, done.lines()
    with pytest.raises(UsageError, match=r"passed as objects(.|\n)*tw.replay\('runs/run', step, model, data"):
        tw.replay(result.run, 11)


@pytest.mark.parametrize("what", [NAME, make, make_by_name], ids=["name", "function", "dict"])
def test_a_run_of_a_function_says_how_it_is_made_again(what: Any) -> None:
    result = tw.fit(what, steps=6, seed=5, quiet=True)
    name = NAME if what == NAME else f"tests.commands.made:{what.__name__}"
    assert objects_of(result.run) == {"function": name, "reason": "", "is_seeded": True}
    assert ("accuracy" in result.metrics) == (what is make_by_name)
    assert tw.replay(result.run, 4, quiet=True).same_bits, "also from the start: the seed comes before the function"


def test_a_run_of_a_function_is_resumed_from_the_command_line() -> None:
    straight = tw.fit(NAME, steps=8, seed=5, name="straight", quiet=True)
    halves = tw.fit(NAME, steps=4, seed=5, quiet=True)
    call = ["resume", str(halves.run), "--set", "until=8steps", "--accept", "until"]
    assert "--allow tests" in CliRunner().invoke(app, [*call, "--allow", "torch"]).stderr
    done = CliRunner().invoke(app, [*call, "--allow", "tests", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["loss"] == straight.loss


@pytest.mark.parametrize(
    ("what", "more", "reason"),
    [
        (lambda: make(), {}, "cannot be imported by its name"),
        (make, {"val": dataset()}, "val did not come from its function"),
        (make, {"observers": [print]}, "observers did not come from its function"),
    ],
    ids=["lambda", "val", "observers"],
)
def test_why_a_run_cannot_be_made_again(what: Any, more: dict[str, Any], reason: str) -> None:
    found = objects_of(tw.fit(what, steps=1, quiet=True, **more).run)
    assert found["function"] is None and reason in found["reason"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tests.commands.made:number", "number returned a int(.|\n)*return .model, data, loss, optimizer"),
        ("tests.commands.made:nothing", "has no 'nothing'"),
        ("made", "the model is 'made'(.|\n)*pass an nn.Module, or a function"),
        (nn.Linear, "the model is <class"),
    ],
)
def test_what_is_no_function_of_objects(what: Any, said: str) -> None:
    with pytest.raises((UsageError, tw.TrainwrightError), match=said):
        tw.fit(what, steps=1)


def test_a_damaged_record_of_the_function_is_a_sentence() -> None:
    run = tw.fit(NAME, steps=1, quiet=True).run
    for text in ("{", "[1]", '{"objects": {"function": 3}}', '{"objects": {"function": null}}'):
        (run / "provenance.json").write_text(text)
        with pytest.raises(UsageError, match=r"cannot be built from its folder: .*provenance.json cannot be read"):
            tw.replay(run, 1, quiet=True)


@pytest.mark.parametrize("verb", [tw.check, tw.plan, tw.profile, tw.lr_range, tw.verify_resume])
def test_each_verb_names_the_remedy_for_a_wrong_argument(verb: Any) -> None:
    with pytest.raises(UsageError, match=r"epochz(.|\n)*did you mean epochs="):
        verb(*make()[:3], epochz=3)


@pytest.mark.parametrize(
    "call",
    [
        ["plan", NAME],
        ["lr-range", NAME, "--steps", "12", "--set", "precision=fp32"],
        ["verify", "plain", NAME, "--steps", "3"],
    ],
    ids=lambda call: call[0],
)
def test_a_function_on_the_command_line(call: list[str]) -> None:
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])
