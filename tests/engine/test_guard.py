"""A step that is not finite: nothing of it is applied, in any precision, and the ledger names it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.engine.plain import assert_same_bits, bits, cut
from trainwright.checkpoint.codec import encode
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.evaluate import evaluate
from trainwright.engine.guard import update_on_device
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.step import StepFn, make_step
from trainwright.optim.clip import make_clip
from trainwright.optim.lamb import Lamb, Lars
from trainwright.optim.muon import Muon

ROWS, MICRO, BAD_ROW = 12, 4, 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int, poison: float | None = None) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 6, generator=generator)
    y = x[:, :3].argmax(1)
    if poison is not None:
        x[BAD_ROW, 2] = poison
    return cut((x, y), MICRO, first_id=100 * step)


def everything(state: TrainState) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state."""
    return {name: t.clone() for name, t in encode([state.model.state_dict(), state.optimizer.state_dict()])[0].items()}


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_bad_sample_touches_nothing_and_is_named(optimizer: str, name: PrecisionName, poison: float) -> None:
    model = network()
    scaler = Precision(name).scaler(torch.device("cpu"))
    state = TrainState(model, OPTIMIZERS[optimizer](model), scaler)
    advance = make_step(F.cross_entropy, precision=Precision(name), clip=make_clip("norm", 1.0))
    for step in range(3):
        assert not bool(advance(state, batch(step)).skipped)
    before, scale = everything(state), None if scaler.scale is None else float(scaler.scale)
    result = advance(state, batch(3, poison))
    assert bool(result.skipped)
    assert_same_bits(everything(state), before)
    assert state.step == 4
    assert state.num_samples == 4 * ROWS  # a skipped batch is consumed
    assert state.ledger.total == 1
    entry = state.ledger.entries[0]
    assert (entry.step, entry.micro_batch) == (4, BAD_ROW // MICRO)
    assert entry.sample_ids == (304, 305, 306, 307)
    assert entry.scale == scale
    assert entry.reason == "the gradient norm is not finite"
    assert not bool(advance(state, batch(4)).skipped)  # the run goes on
    assert not torch.equal(everything(state)["0.0.weight"], before["0.0.weight"])
    seen = evaluate(model, F.cross_entropy, list(batch(5).micro))
    assert math.isfinite(seen.loss)  # BatchNorm's running statistics hold no NaN
    if scaler.scale is not None:
        assert scale is not None
        assert float(scaler.scale) == scale / 2


def test_a_bad_gradient_behind_a_finite_loss_names_the_whole_step() -> None:
    model = nn.Linear(1, 1, bias=False)

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return (model(pair[0]) * 0).abs().sqrt().sum()  # its derivative at 0 is 0 * inf

    state = TrainState(model, SGD(model.parameters(), lr=1.0))
    assert bool(make_step(loss)(state, cut((torch.ones(4, 1), torch.ones(4)), 2, first_id=8)).skipped)
    assert state.ledger.total == 1
    assert state.ledger.entries[0].micro_batch is None
    assert state.ledger.entries[0].sample_ids == (8, 9, 10, 11)


def test_the_ledger_settles_by_itself_and_keeps_no_batch_alive() -> None:
    model = nn.Linear(1, 1)
    state = TrainState(model, SGD(model.parameters(), lr=0.0))
    advance = make_step(lambda model, pair: model(pair[0]).sum())
    bad = cut((torch.full((1, 1), math.nan), torch.ones(1)), 1)
    advance(state, bad)
    assert state.ledger.entries == []  # nobody has looked yet
    assert not any(isinstance(value, StepBatch) for pending in state.ledger._pending for value in pending)
    for _ in range(255):
        advance(state, bad)
    assert [entry.step for entry in state.ledger.entries] == list(range(1, 257))


def scaled_loop(overflows: set[int], num_steps: int) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """torch's own recipe for fp16 with GradScaler, on the CPU."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scales, skipped = [], []
    for step in range(num_steps):
        statistics = copy.deepcopy(bits(model))
        optimizer.zero_grad()
        for micro in batch(step, math.inf if step in overflows else None).micro:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(micro.data[0]), micro.data[1]) / 3
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:  # GradScaler does not look after BatchNorm's buffers: the test does
            skipped.append(step + 1)
            model.load_state_dict(statistics)
        scales.append(scaler.get_scale())
    return scales, bits(model), skipped


@pytest.mark.parametrize("seed", [0, 1])
def test_fp16_equals_grad_scaler_over_random_overflows(seed: int) -> None:
    num_steps = 40
    pattern = torch.rand(num_steps, generator=torch.Generator().manual_seed(seed)) < 0.25
    overflows = set(pattern.nonzero().flatten().tolist())
    expected, weights, skipped = scaled_loop(overflows, num_steps)
    model = network()
    state = TrainState(model, AdamW(model.parameters(), lr=1e-2), LossScaler(interval=3))
    advance = make_step(F.cross_entropy, precision=Precision("fp16"), clip=make_clip("norm", 0.5))
    scales = []
    for step in range(num_steps):
        advance(state, batch(step, math.inf if step in overflows else None))
        scales.append(float(state.scaler.scale))  # type: ignore[arg-type]
    assert scales == expected
    assert len(set(scales)) >= 4
    assert state.ledger.total == len(skipped)
    assert [entry.step for entry in state.ledger.entries] == skipped
    assert {step + 1 for step in overflows} <= set(skipped)
    assert_same_bits(bits(model), weights)


def test_the_scale_doubles_after_2000_clean_steps() -> None:
    model = nn.Linear(1, 1)
    state = TrainState(model, SGD(model.parameters(), lr=1e-6), Precision("fp16").scaler(torch.device("cpu")))
    advance: StepFn = make_step(lambda model, pair: model(pair[0]).float().sum() * 1e-3, precision=Precision("fp16"))
    data = cut((torch.ones(1, 1), torch.ones(1)), 1)
    state.scaler.load_state_dict({"scale": 2.0**16, "clean_steps": 1998})
    advance(state, data)
    assert float(state.scaler.scale) == 2.0**16  # type: ignore[arg-type]
    advance(state, data)
    assert float(state.scaler.scale) == 2.0**17  # type: ignore[arg-type]
    assert state.ledger.total == 0


ON_DEVICE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2, fused=True),
    "adam": lambda model: Adam(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
    "muon": lambda model: Muon([model[0].weight, model[3].weight], lr=1e-2),  # type: ignore[index]
    "lamb": lambda model: Lamb(model.parameters(), lr=1e-2),
    "lars": lambda model: Lars(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_an_optimizer_that_takes_the_flag_on_the_device(name: str) -> None:
    """Makes the call that runs on a GPU, where the flag is not read by the host."""
    guarded, plain = network(), network()
    mine, reference = ON_DEVICE[name](guarded), ON_DEVICE[name](plain)
    assert getattr(mine, "_step_supports_amp_scaling", False)
    for step in range(6):
        overflowed = step in (2, 3)
        for model in (guarded, plain):
            model.zero_grad()
            for micro in batch(step).micro[:1]:
                F.cross_entropy(model(micro.data[0]), micro.data[1]).backward()
        if overflowed:
            for parameter in guarded.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan)
            before = everything(TrainState(guarded, mine))
        update_on_device(torch.tensor(overflowed), mine)
        if overflowed:
            assert_same_bits(everything(TrainState(guarded, mine)), before)
        else:
            reference.step()
        assert getattr(mine, "found_inf", None) is None
        assert_same_bits(dict(guarded.named_parameters()), dict(plain.named_parameters()))


def test_the_scale_recovers_from_overflows_at_its_least() -> None:
    model = network()
    scaler = LossScaler(initial=2.0**-10, interval=3)
    state = TrainState(model, SGD(model.parameters(), lr=1e-2), scaler)
    advance = make_step(F.cross_entropy, precision=Precision("fp16"))
    for step in range(12):
        assert bool(advance(state, batch(step, math.inf)).skipped)
    assert float(scaler.scale) == 2.0**-14
    assert not any(bool(advance(state, batch(step)).skipped) for step in range(6))
    assert float(scaler.scale) == 2.0**-12
    scaler.load_state_dict({"scale": 1e-40, "clean_steps": 0})  # of a run before there was a least scale
    assert math.isfinite(float(scaler.scale.reciprocal()))
