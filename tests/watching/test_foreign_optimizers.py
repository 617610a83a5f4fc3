"""Optimizers that are not torch's, and modules that run no hooks of torch: what can be watched of them is watched."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.errors import UsageError

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second


class Descent:
    """Updates what it is called with, as the optimizers of keras do."""

    learning_rate = 0.05

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        torch._foreach_add_(list(parameters), list(gradients), alpha=-self.learning_rate)


class Layer(nn.Linear):
    """Replaces ``__call__``, so that torch's hooks do not run."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def trained(*, forgets: bool = False, capsys: pytest.CaptureFixture[str] | None = None) -> tw.Watch:
    """``forgets`` to empty the gradients."""
    torch.manual_seed(0)
    x, model, descent = torch.randn(64, 8), Layer(8, 4), Descent()
    y = (x @ torch.randn(8, 4)).argmax(1)
    with tw.watch(model, descent, out=None, quiet=capsys is None) as watch:  # type: ignore[arg-type]
        for step in range(16):
            rows = torch.arange(step * 16, step * 16 + 16) % 64
            if not forgets:
                model.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            parameters = list(model.parameters())
            descent.apply([p.grad for p in parameters if p.grad is not None], parameters)
    assert watch.session.failures == [] and watch.step == 16
    assert "__call__" in vars(Layer) and "apply" not in vars(descent)
    return watch


def test_updates_and_calls_are_heard(capsys: pytest.CaptureFixture[str]) -> None:
    watch = trained(capsys=capsys)
    assert [each.code for each in watch.findings() if each.severity != "info"] == []
    assert "which is not one of torch's: no step is replayed" in " ".join(capsys.readouterr().err.split())


def test_a_fault_is_found_without_a_replay() -> None:
    assert "optim.missing_zero_grad" in {each.code for each in trained(forgets=True).findings()}


def test_training_is_the_same_bits() -> None:
    torch.manual_seed(0)
    x, layer, descent = torch.randn(8, 8), Layer(8, 4), Descent()
    alike = Layer(8, 4)
    alike.load_state_dict(layer.state_dict())

    def step(model: Layer) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        descent.apply([p.grad for p in model.parameters() if p.grad is not None], list(model.parameters()))

    step(alike)
    with tw.watch(layer, descent, out=None, quiet=True):  # type: ignore[arg-type]
        step(layer)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), alike.parameters()))


def test_what_makes_no_update_is_refused() -> None:
    with pytest.raises(UsageError, match="the optimizer is a object"):
        tw.watch(Layer(2, 2), object(), out=None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    keras = importlib.import_module("keras")
    x = torch.randn(64, 8).numpy()
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    )
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with tw.watch(model, model.optimizer, out=None, quiet=True) as watch:
        model.fit(x, x[:, :4].argmax(1), epochs=4, batch_size=16, verbose=0, validation_split=0.25)
    assert watch.step == 12 and watch.session.failures == []
    assert [each.code for each in watch.findings() if each.severity != "info"] == []
