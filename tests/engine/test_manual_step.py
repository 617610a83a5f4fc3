"""A step of the user's own: the same bits as by hand, guarded updates, and what is counted and logged."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import optimizer as optimizer_module

import trainwright as tw
from tests.engine.plain import assert_same_bits, bits, cut
from trainwright.checkpoint.chained_optimizer import ChainedOptimizer
from trainwright.engine.manual_step import OwnStep
from trainwright.errors import UsageError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def in_turns(model: Pair) -> tuple[ChainedOptimizer, OwnStep]:
    """Each half is updated against the other."""
    one, other = Adam(model.one.parameters(), lr=0.1), SGD(model.other.parameters(), lr=0.1, momentum=0.9)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
        losses = [update(model, batch.data, optimizer, sign) for optimizer, sign in ((one, 1.0), (other, -1.0))]
        return tw.Loss(losses[0], 1.0, {"other": losses[1]})

    return ChainedOptimizer([one, other]), step


def update(model: Pair, batch: tuple[Tensor, Tensor], optimizer: Optimizer, sign: float) -> Tensor:
    loss = sign * F.mse_loss(model.other(model.one(batch[0])), batch[1])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def trained(model: Pair, steps: int, state: tw.TrainState | None = None) -> tuple[tw.TrainState, list[tw.StepResult]]:
    optimizer, step = in_turns(model)
    state = state or tw.TrainState(model, optimizer)
    advance = tw.make_own_step(step)
    return state, [advance(state, cut(data(number), 8)) for number in range(state.step, steps)]


def test_optimizers_that_take_turns_give_the_bits_of_a_loop_by_hand() -> None:
    plain = Pair()
    one, other = Adam(plain.one.parameters(), lr=0.1), SGD(plain.other.parameters(), lr=0.1, momentum=0.9)
    seen = [
        [float(update(plain, data(step), optimizer, sign).detach()) for optimizer, sign in ((one, 1.0), (other, -1.0))]
        for step in range(20)
    ]
    state, results = trained(Pair(), 20)
    assert_same_bits(bits(state.model), bits(plain))
    assert [[float(result.loss), float(result.metrics["other"])] for result in results] == seen
    assert (state.step, state.num_samples, state.data) == (20, 160, tw.Cursor(0, 8))
    assert not any(bool(result.skipped) for result in results)


def test_it_is_resumed_in_the_same_bits(tmp_path: Path) -> None:
    whole, _ = trained(Pair(), 20)
    half, _ = trained(Pair(), 9)
    path, _ = tw.save_checkpoint(half, tmp_path)
    torch.manual_seed(5)
    model = Pair()
    optimizer, step = in_turns(model)
    state = tw.TrainState(model, optimizer)
    tw.load_checkpoint(state, path)
    advance = tw.make_own_step(step)
    for number in range(9, 20):
        advance(state, cut(data(number), 8))
    assert_same_bits(bits(state.model), bits(whole.model))


def test_an_update_with_gradients_that_are_not_finite_is_left_out_and_the_others_are_not() -> None:
    model = Pair()
    optimizer, _ = in_turns(model)
    one, other = optimizer.parts
    before, moments = bits(model), {}

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        loss = update(model, batch.data, one, 1.0)
        (update(model, batch.data, other, float("nan")))
        moments.update(other.state_dict()["state"])
        return loss

    state = tw.TrainState(model, optimizer)
    result = tw.make_own_step(step)(state, cut(data(0), 8))
    after = bits(model)
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("other"))  # buffers, too
    assert not torch.equal(after["one.weight"], before["one.weight"])
    assert not moments and bool(result.skipped) and state.ledger.total == 1
    assert state.ledger.entries[0].sample_ids == tuple(range(8))


def test_the_gradient_norm_is_that_of_all_updates_and_a_step_begins_without_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.0)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        assert model.weight.grad is None
        for slope in ([3.0, 0.0], [0.0, 4.0]):
            model.weight.grad = torch.tensor([slope])
            optimizer.step()
        return torch.zeros(())

    result = tw.make_own_step(step, schedule=lambda step, fraction: 0.5)(
        tw.TrainState(model, optimizer), cut(data(0), 8)
    )
    assert float(result.grad_norm) == 5.0


def test_an_optimizer_that_calls_the_loss_itself_has_its_norm_measured_afterwards() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        x, y = batch.data

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Tensor = optimizer.step(closure)  # type: ignore[no-untyped-call]
        return loss

    state = tw.TrainState(model, optimizer)
    advance = tw.make_own_step(step)
    norms = [float(advance(state, cut(data(0), 8)).grad_norm) for _ in range(3)]
    assert norms[0] > norms[2] > 0


def test_an_update_by_a_closure_whose_gradients_are_not_finite_is_undone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        x, y = batch.data

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (float("nan") if state.step == 2 else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Tensor = optimizer.step(closure)  # type: ignore[no-untyped-call]
        return loss

    state = tw.TrainState(model, optimizer)
    advance = tw.make_own_step(step)
    advance(state, cut(data(0), 8))
    advance(state, cut(data(0), 8))
    before, (known,) = bits(model), optimizer.state_dict()["state"].values()
    evaluations = known["func_evals"]
    assert bool(advance(state, cut(data(0), 8)).skipped) and state.ledger.total == 1
    assert_same_bits(bits(model), before)
    (known,) = optimizer.state_dict()["state"].values()
    assert known["func_evals"] == evaluations
    assert not bool(advance(state, cut(data(0), 8)).skipped)
    assert bool(model.weight.isfinite().all())


def test_an_optimizer_that_the_run_was_not_given_is_refused_before_its_first_update() -> None:
    model = Pair()
    optimizer, step = in_turns(model)
    given, before = optimizer.parts[0], bits(model)
    with pytest.raises(UsageError, match="of an optimizer outside the run") as caught:
        tw.make_own_step(step)(tw.TrainState(model, given), cut(data(0), 8))
    assert "optimizer=[one, other]" in caught.value.remedy
    assert all(torch.equal(value, before[name]) for name, value in bits(model).items() if name.startswith("other.0"))
    update(model, data(0), optimizer.parts[1], 1.0)  # outside of a step nobody asks


class Within(Optimizer):
    """Has another optimizer inside, as many have."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_inside_of_one_that_was_given_is_its_own_affair() -> None:
    model = nn.Linear(4, 1)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = Within(inner)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        loss = F.mse_loss(model(batch.data[0]), batch.data[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    advance = tw.make_own_step(step)
    results = [advance(tw.TrainState(model, optimizer), cut(data(0), 8)) for _ in range(2)]
    assert results[1].loss < results[0].loss and float(results[0].grad_norm) > 0


def test_the_rate_of_each_optimizer_follows_the_schedule() -> None:
    model = Pair()
    optimizer, step = in_turns(model)
    state = tw.TrainState(model, optimizer)
    result = tw.make_own_step(step, schedule=lambda step, fraction: 0.5)(state, cut(data(0), 8))
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.05, 0.05]
    assert result.lr == 0.05


@pytest.mark.parametrize(("given", "said"), [(None, "NoneType"), (torch.ones(2), r"shape \(2,\)")])
def test_a_step_that_returns_no_loss_is_told_so(given: object, said: str) -> None:
    model = nn.Linear(4, 1)
    advance = tw.make_own_step(lambda state, batch: given)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match=rf"step 1: the step function gave .*{said}"):
        advance(tw.TrainState(model, SGD(model.parameters(), lr=0.1)), cut(data(0), 8))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match="the step is a float"):
        tw.make_own_step(0.1)  # type: ignore[arg-type]


def test_the_data_of_several_micro_batches_are_not_those_of_one() -> None:
    with pytest.raises(UsageError, match="the batch has 2 micro-batches"):
        _ = cut(data(0), 4).data
    assert cut(data(0), 8).data[0].shape == (8, 4)


def test_the_hooks_of_a_step_go_with_its_function() -> None:
    gc.collect()  # hooks of steps of other tests go with them
    hooks = (optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)
    before = [len(each) for each in hooks]
    optimizer, step = in_turns(model := Pair())
    advance = tw.make_own_step(step)
    for number in range(3):
        advance(tw.TrainState(model, optimizer), cut(data(number), 8))
    assert [len(each) for each in hooks] == [count + 1 for count in before], "one of each kind, however many steps"
    SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()  # between two steps another optimizer may step
    del advance
    assert [len(each) for each in hooks] == before
