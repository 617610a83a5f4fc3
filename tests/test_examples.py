"""Each shape of training in ``examples/`` equals a plain PyTorch loop bit for bit, and is resumed in the same bits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests import by_hand
from tests.engine.plain import assert_same_bits, bits

pytestmark = pytest.mark.examined

EXAMPLES = Path(__file__).parent.parent / "examples"
SHARED = {"corridor", "rewards"}
"""Files that others import, and no shape."""
SHAPES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - SHARED)
STEPS = 12


class Killed(BaseException):
    """Nothing in between handles it, as nothing handles a SIGKILL."""


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(
        "trainwright.training.open_run.MIN_FRACTION_SAVE_INTERVAL_S", 0.0
    )  # these runs take a fraction of a second
    threads = torch.get_num_threads()
    yield importlib.import_module(request.param)
    torch.set_num_threads(threads)


@contextmanager
def killed_after_a_checkpoint(folder: Path) -> Iterator[None]:
    """Raises Killed in the first update once there is a checkpoint."""

    def kill(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if any(folder.glob("step-*")):
            raise Killed

    handle = register_optimizer_step_post_hook(kill)
    try:
        with pytest.raises(Killed):
            yield
    finally:
        handle.remove()


def by_fit(example: ModuleType) -> nn.Module:
    """The model of a run that was killed and resumed."""
    run = Path("runs/run")
    with killed_after_a_checkpoint(run / "checkpoints"):
        example.main(STEPS)
    result = example.main(STEPS, resume=run)
    assert (result.ending, result.step, result.skipped) == ("finished", STEPS, 0)
    assert not [found.code for found in result.findings if found.severity != "info"]
    torch.set_num_threads(json.loads((run / "plan.json").read_text())["threads"])
    return result.state.model


def by_loop(example: ModuleType) -> nn.Module:
    with killed_after_a_checkpoint(Path("checkpoints")):
        example.main(STEPS)
    (newest,) = Path("checkpoints").glob("step-*")
    return example.main(STEPS, resume=newest).model


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("example", SHAPES, indirect=True)
def test_a_shape_that_is_killed_and_resumed_gives_the_bits_of_a_loop_by_hand(example: ModuleType) -> None:
    owns_its_loop = "tw.steps" in Path(str(example.__file__)).read_text()
    trained = (by_loop if owns_its_loop else by_fit)(example)
    assert_same_bits(bits(trained), bits(getattr(by_hand, example.__name__)(example, STEPS)))


def way(source: str) -> str:
    if "advance=" in source:
        return "a step"
    return "a loop" if "tw.steps" in source else "a loss"


def test_the_page_lists_every_shape_and_how_it_is_trained() -> None:
    rows = ["| shape | file | way |", "|---|---|---|"]
    for shape in SHAPES:
        source = (EXAMPLES / f"{shape}.py").read_text()
        what = source.splitlines()[0].strip('"').removesuffix(".")
        rows.append(f"| {what} | [{shape}.py](../../examples/{shape}.py) | {way(source)} |")
    page = (EXAMPLES.parent / "docs/how-to/custom-step.md").read_text()
    listed = page.partition("<!-- shapes -->\n")[2].partition("<!-- /shapes -->")[0]
    assert listed == "\n".join(rows) + "\n"
