"""The learning rate range test where the right answer is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from tests.engine.plain import cut
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.lr_range import lr_range, suggest
from trainwright.optim.clip import make_clip

CURVATURE = 10.0


def stream() -> Iterator[StepBatch]:
    while True:
        yield cut((torch.ones(2, 1), torch.ones(2)), 2)


def parabola(lr: float = 1.0) -> TrainState:
    """Gradient descent on CURVATURE / 2 * w**2 converges up to a rate of 2 / CURVATURE."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    return TrainState(model, SGD(model.parameters(), lr=lr))


def height(model: nn.Module, pair: object) -> torch.Tensor:
    weight = model.weight
    assert isinstance(weight, torch.Tensor)
    return 1.0 + CURVATURE / 2 * weight.square().sum()


@pytest.mark.parametrize("lr", [1.0, 0.003])
def test_a_parabola_diverges_past_its_limit_and_stops_there(lr: float) -> None:
    found = lr_range(parabola(lr), stream(), height, lowest=1e-5, highest=100.0, num_steps=100)
    limit = 2 / CURVATURE
    assert found.stopped_at is not None
    assert limit < found.stopped_at < 20 * limit
    assert found.suggestion is not None
    assert limit / 100 < found.suggestion < limit
    assert len(found.lrs) == len(found.losses) < 100
    assert found.lrs[0] == pytest.approx(1e-5)
    growth = [after / before for before, after in zip(found.lrs, found.lrs[1:], strict=False)]
    assert growth == pytest.approx([(100 / 1e-5) ** (1 / 99)] * len(growth))


def test_a_clipped_gradient_takes_longer_to_diverge() -> None:
    plain = lr_range(parabola(), stream(), height)
    clipped = lr_range(parabola(), stream(), height, clip=make_clip("norm", 1e-3))
    assert plain.stopped_at is not None and clipped.stopped_at is None


def test_a_network_on_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(64, 8)
    y = x[:, :3].argmax(1)

    def batches() -> Iterator[StepBatch]:
        while True:
            yield cut((x, y), 64)

    found = lr_range(TrainState(model, SGD(model.parameters(), lr=1.0)), batches(), F.cross_entropy, highest=1e4)
    assert found.suggestion is not None
    assert found.stopped_at is not None
    trained = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = SGD(trained.parameters(), lr=found.suggestion)
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.cross_entropy(trained(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7  # the suggested rate trains: chance is 1.1


def test_every_group_keeps_its_ratio() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.05}], lr=1.0)
    state = TrainState(model, optimizer)
    lr_range(state, stream(), lambda model, pair: model(pair[0]).mean() * 0 + 1, lowest=1e-4, highest=1e-2, num_steps=5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 1e-3])


def test_a_loss_that_turns_nan_ends_the_test() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    state = TrainState(model, SGD(model.parameters(), lr=1.0))
    found = lr_range(
        state, stream(), lambda model, pair: -model.weight.log().sum() - 10 * model.weight.sum() + 100, highest=1e6
    )
    assert found.stopped_at is None or found.stopped_at < 1e6
    flat = lr_range(parabola(), stream(), lambda model, pair: height(model, pair) * float("nan"))
    assert (flat.stopped_at, flat.suggestion, len(flat.lrs)) == (flat.lrs[0], None, 1)


def test_suggest() -> None:
    nan = float("nan")
    assert suggest([0.1, 1.0, 10.0], [3.0, 1.0, 2.0]) == pytest.approx(0.1)
    assert suggest([0.1, 1.0, 10.0], [3.0, 2.99, 4.0]) is None  # fell by less than 1 %
    assert suggest([0.1, 1.0, 10.0], [1.0, 2.0, 4.0]) is None
    assert suggest([0.1, 1.0, 10.0], [-1.0, -2.0, nan]) == pytest.approx(0.1)  # a loss may be negative
    assert suggest([0.1, 1.0], [nan, nan]) is None
    assert suggest([], []) is None
