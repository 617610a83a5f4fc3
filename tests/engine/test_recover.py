"""Recovery from out of memory, with errors of torch's own allocator; limits of real processes: test_out_of_memory."""

from __future__ import annotations

import errno
import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.plain import assert_same_bits, bits, cut, one_micro
from trainwright.checkpoint.average import Ema
from trainwright.checkpoint.batch_cut import cut as cut_batch
from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.cursor import BadSample, MicroBatch
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.dry_run import Mode, dry_run
from trainwright.engine.evaluate import evaluate
from trainwright.engine.guard import MAX_COPIED_TABLE_BYTES
from trainwright.engine.loss import Loss
from trainwright.engine.precision import FP32
from trainwright.engine.recover import is_out_of_memory
from trainwright.engine.step import make_step
from trainwright.errors import OutOfMemoryError, UsageError

TOO_MUCH = 2**50  # bytes; no machine has them, and torch's allocator says so


class Small(nn.Module):
    """Wants more than there is for more than ``room`` samples, in the pass that ``at`` names."""

    def __init__(self, room: int, at: str = "forward", *, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.room, self.at = room, at
        middle = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(len(x))
        out: Tensor = self.net(x)
        if len(x) > self.room and self.at == "forward":
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        if len(x) > self.room and self.at == "backward":
            out.register_hook(lambda grad: torch.empty(TOO_MUCH, dtype=torch.uint8))
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), float(len(batch[1])))


def data(rows: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(rows, 6, generator=draw), torch.randint(3, (rows,), generator=draw)


def stepped(model: nn.Module, micro: int, times: int = 3, **options: Any) -> tuple[TrainState, list[Any]]:
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    torch.manual_seed(9)
    advance = make_step(loss)
    return state, [advance(state, cut(data(), micro)) for _ in range(times)]


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize("scaler", [False, True])
def test_the_same_bits_as_with_the_smaller_micro_batch(at: str, scaler: bool) -> None:
    """BatchNorm, dropout, a loss scale, a buffer that no state_dict keeps."""
    scalers = [{"scaler": LossScaler()} if scaler else {} for _ in range(2)]
    short, results = stepped(Small(4, at), 16, **scalers[0])
    drawn = torch.rand(3)
    straight, others = stepped(Small(99), 4, **scalers[1])
    assert_same_bits(bits(short.model), bits(straight.model))
    assert torch.equal(drawn, torch.rand(3)) and torch.equal(short.model.seen, straight.model.seen)
    assert [float(r.loss) for r in results] == [float(r.loss) for r in others]
    assert [each.phase for each in results[0].oom_reports] == [at] * 3 and not results[1].oom_reports
    assert short.micro_limit == 4 and [micro.size for micro in results[2].batch.micro] == [4] * 4


def test_a_loss_that_returns_a_mean_is_weighted_by_samples() -> None:
    def grads(room: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)

        def mean(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            if len(batch[0]) > room:
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            return F.cross_entropy(net(batch[0]), batch[1])

        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
        make_step(lambda model, batch: mean(model, batch))(state, cut(data(13), 13))
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(grads(99), grads(3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_leaves_the_state_of_the_last_good_step() -> None:
    state, _ = stepped(Small(0, norm=False), 16, 0)
    before = bits(state.model)
    torch.manual_seed(4)
    generator = torch.get_rng_state()
    with pytest.raises(OutOfMemoryError, match="one sample does not fit") as caught:
        make_step(loss)(state, cut(data(), 16))
    assert caught.value.whole and state.step == 0 and state.micro_limit is None
    assert [each.micro for each in caught.value.reports] == [16, 16, 8, 4, 2, 1]  # type: ignore[attr-defined]
    assert_same_bits(bits(state.model), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in state.model.parameters())


def test_a_run_that_runs_out_in_each_step_ends_and_says_that_something_grows() -> None:
    """Each step has room for half of what the last one took: one size fails in each, until one sample is too much."""
    model = Small(16, norm=False)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    advance, tries = make_step(loss), []
    for room in (8, 4, 2, 1):
        model.room = room
        tries.append([each.micro for each in advance(state, cut(data(), 16)).oom_reports])
    assert tries == [[16, 16], [8], [4], [2]] and state.micro_limit == 1
    before = bits(model)
    model.room = 0
    for _ in range(2):  # also for a loop that takes the error and goes on: one try, and the same end
        with pytest.raises(
            OutOfMemoryError, match=r"one sample does not fit, though 1 at a time did .* something grows"
        ) as caught:
            advance(state, cut(data(), 16))
        assert [each.micro for each in caught.value.reports] == [1]  # type: ignore[attr-defined]
        assert caught.value.remedy and caught.value.whole
        assert state.step == 4 and state.micro_limit == 1
        assert_same_bits(bits(model), before)


def test_an_accumulated_step_that_runs_out_in_its_last_micro_batch_ends_too() -> None:
    """The first micro-batches fit; the last sample of each batch does not, however it is cut."""

    class Heavy(Small):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x[:, 0] == 99.0).any()):
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            out: Tensor = self.net(x)
            return out

    x, y = data()
    x[-1, 0] = 99.0
    state, _ = stepped(Heavy(99, norm=False), 4, 2)
    before = bits(state.model)
    with pytest.raises(OutOfMemoryError, match="one sample does not fit") as caught:
        make_step(loss)(state, cut((x, y), 4))
    assert [each.micro for each in caught.value.reports] == [4, 4, 2, 1]  # type: ignore[attr-defined]
    assert state.step == 2 and state.micro_limit is None
    assert_same_bits(bits(state.model), before)


def test_a_model_that_takes_no_single_sample_says_so() -> None:
    state, _ = stepped(Small(1), 16, 0)
    before = bits(state.model)
    with pytest.raises(OutOfMemoryError, match="ValueError in smaller micro-batches: Expected more than 1 value"):
        make_step(loss)(state, cut(data(), 16))
    assert_same_bits(bits(state.model), before)


def test_another_error_is_not_touched() -> None:
    def broken(model: nn.Module, batch: Any) -> Loss:
        raise RuntimeError("shapes do not match")

    state, _ = stepped(Small(99), 16, 0)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        make_step(broken)(state, cut(data(), 16))


def test_which_errors_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    wrapped = ValueError("in my own words")
    wrapped.__cause__ = caught.value
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("std::bad_alloc")) and is_out_of_memory(OSError(errno.ENOMEM, "mmap"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "write"))
    primitive = RuntimeError("could not create a primitive")  # of oneDNN: it has no memory, or no code for a shape
    assert is_out_of_memory(primitive, was_short=True) and not is_out_of_memory(primitive)
    assert not is_out_of_memory(RuntimeError("expected memory format")) and not is_out_of_memory(ValueError("batch"))


class Uncompiled(Small):
    """Short of memory once; afterwards oneDNN has none for the code of more than four samples, in its words."""

    def forward(self, x: Tensor) -> Tensor:
        is_first, self.was_short = not getattr(self, "was_short", False), True
        if is_first:
            raise MemoryError
        if len(x) > 4:
            raise RuntimeError("could not create a primitive")
        return super().forward(x)


def test_what_cannot_be_compiled_after_memory_ran_out_is_tried_in_smaller_micro_batches() -> None:
    short, results = stepped(Uncompiled(99), 16)
    straight, _ = stepped(Small(99), 4)
    assert_same_bits(bits(short.model), bits(straight.model))
    assert short.micro_limit == 4 and [each.micro for each in results[0].oom_reports] == [16, 16, 8]


def test_a_buffer_too_large_to_be_kept_twice_is_told() -> None:
    model = Small(4)
    model.register_buffer("cache", torch.zeros(MAX_COPIED_TABLE_BYTES + 1, dtype=torch.uint8), persistent=False)

    def writes(model: nn.Module, batch: Any) -> Loss:
        model.cache[0] += 1  # type: ignore[index, operator]
        return loss(model, batch)

    state, _ = stepped(model, 16, 0)
    with pytest.raises(OutOfMemoryError, match="the buffer cache, which is too large to be copied"):
        make_step(writes)(state, cut(data(), 16))


def test_draws_of_a_failed_try_are_undone() -> None:
    """Also the first ones from NumPy and Python, and a spare normal number that was drawn before the step."""
    model = Small(4)

    def draws(model: nn.Module, batch: Any) -> Loss:
        np.random.normal(), random.gauss(0, 1)
        return loss(model, batch)

    def after(micro_limit: int) -> list[float]:
        np.random.seed(0), random.seed(0)
        np.random.normal(), random.gauss(0, 1)  # both keep a spare number, which the next step uses up
        advance(state, cut(data(4), 4))
        state.micro_limit = micro_limit
        ran_out = bool(advance(state, cut(data(), 16)).oom_reports)
        assert ran_out == (micro_limit == 8)
        return [np.random.normal(), random.gauss(0, 1)]

    state, _ = stepped(model, 16, 0)
    advance = make_step(draws)
    assert after(8) == after(4)  # four micro-batches in both; the failed attempt of the first drew, too


def test_the_evaluation_takes_halves() -> None:
    batches = [MicroBatch(data(), np.arange(16)), MicroBatch(data(5), np.arange(5))]
    small, large = Small(4), Small(99)
    assert evaluate(small, loss, batches).loss == pytest.approx(evaluate(large, loss, batches).loss, abs=1e-6)
    with pytest.raises(OutOfMemoryError, match="batch 0 of the evaluation: one sample"):
        evaluate(Small(0), loss, batches)


def test_the_rehearsal_takes_what_fits() -> None:
    state, _ = stepped(Small(4), 16, 0)
    before, modes = bits(state.model), [Mode(FP32, 1)]
    seen = dry_run(state, cut(data(), 16), loss, modes=modes, budget_s=0.0)
    assert seen.seconds["fp32", 1] > 0 and state.micro_limit is None
    assert_same_bits(bits(state.model), before)
    with pytest.raises(OutOfMemoryError, match="one sample does not fit"):
        dry_run(stepped(Small(0, norm=False), 16, 0)[0], cut(data(), 16), loss, modes=modes, budget_s=0.0)


def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """With a metric; what is not a number stays one."""
    out = model(batch[0])
    right = (out.argmax(1) == batch[1]).sum()
    return Loss(F.cross_entropy(out, batch[1], reduction="sum"), float(len(batch[1])), {"right": right})


@pytest.mark.parametrize("bad", [False, True])
def test_what_is_reported_and_counted_is_that_of_the_smaller_micro_batch(bad: bool) -> None:
    """The average, metrics, samples, quarantine, the ledger of a step that is skipped with the ids of its samples."""
    x, y = data()
    if bad:
        x[13, 2] = float("nan")

    def done(room: int, micro: int) -> tuple[TrainState, Any]:
        model = Small(room, norm=False)
        state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ema=Ema(model, 0.9))
        torch.manual_seed(9)
        batch = replace(cut((x, y), micro, first_id=100), bad=(BadSample(7, "torn"),))
        return state, make_step(counted)(state, batch)

    (short, result), (straight, other) = done(4, 16), done(99, 4)
    assert len(result.oom_reports) == 3 and not other.oom_reports
    assert_same_bits(bits(short.model), bits(straight.model))
    assert_same_bits(short.ema.shadow, straight.ema.shadow)  # type: ignore[union-attr]
    assert torch.equal(result.metrics["right"], other.metrics["right"]) and result.weight == other.weight == 16.0
    assert torch.equal(result.grad_norm.nan_to_num(), other.grad_norm.nan_to_num())
    assert result.batch.ids.tolist() == list(range(100, 116)) and result.batch.cursor == other.batch.cursor
    assert (short.num_samples, short.step, set(short.quarantine)) == (16, 1, {7})
    short.ledger.read_pending()
    skipped = [(each.step, each.micro_batch, each.sample_ids) for each in short.ledger.entries]
    assert skipped == ([(1, 3, (112, 113, 114, 115))] if bad else [])


@pytest.mark.slow
def test_a_compiled_model_and_one_that_computes_again() -> None:
    """The failed attempt leaves nothing in what torch keeps for either."""
    whole, again, compiled = Small(99), Small(4, "backward"), Small(4)
    again.net[0].forward = partial(checkpoint, again.net[0].forward, use_reentrant=False)  # type: ignore[method-assign]
    stepped_again, _ = stepped(again, 16)
    _, results = stepped(torch.compile(compiled, backend="eager"), 16)  # type: ignore[arg-type]
    straight, _ = stepped(whole, 4)
    assert_same_bits(bits(stepped_again.model), bits(straight.model))
    assert_same_bits(bits(compiled), bits(straight.model))
    assert [each.micro for each in results[0].oom_reports] == [16, 16, 8]


def test_tokens_are_those_of_the_batch_as_it_was_given() -> None:
    """The first sample of each micro-batch counts, so a smaller micro-batch would count more tokens."""

    def samples(model: nn.Module, batch: list[tuple[Tensor, int]]) -> Loss:
        if len(batch) > 2:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        out = torch.stack([model(ids.float()).sum() for ids, _ in batch])
        return Loss(out.sum(), float(len(batch)))

    model = nn.Linear(6, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = make_step(samples)(state, one_micro([(torch.ones(2, 6, dtype=torch.int64), 1) for _ in range(8)], 8))
    assert [micro.size for micro in result.batch.micro] == [2] * 4
    assert state.num_tokens == 12


# how data are cut

Pair = namedtuple("Pair", "image label")
X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def pieces(value: Any, size: int = 4, limit: int = 3) -> list[Any]:
    return [micro.data for micro in cut_micro(MicroBatch(value, np.arange(size)), limit)]


def test_nested_batches_are_cut_along_their_samples() -> None:
    one, two = pieces({"x": (X, [Y]), "name": ["a", "b", "c", "d"], "scale": torch.tensor(2.0), "kind": "train"})
    assert torch.equal(one["x"][0], X[:3]) and torch.equal(two["x"][1][0], Y[3:])
    assert (one["name"], two["name"]) == (["a", "b", "c"], ["d"])
    assert float(two["scale"]) == 2.0 and two["kind"] == "train"
    pair, _ = pieces(Pair(X, Y.numpy()))
    assert isinstance(pair, Pair) and pair.label.tolist() == [0, 1, 2]
    assert pair.image.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()  # a view


def test_mappings_keep_their_class() -> None:
    class Read(UserDict[str, Tensor]):
        """As the batches of tokenizers are: values by name, and as attributes."""

        def __getattr__(self, name: str) -> Tensor:
            return self.data[name]

    one, two = pieces(Read(x=X))
    assert torch.equal(one.x, X[:3]) and torch.equal(two.x, X[3:])
    assert type(pieces(OrderedDict(x=X))[0]) is OrderedDict
    assert torch.equal(pieces(defaultdict(list, x=X))[0]["x"], X[:3])


def test_a_list_of_samples_is_told_from_parts_of_a_batch() -> None:
    images = [torch.zeros(3, side, side) for side in (5, 6, 7, 8)]
    boxes = [{"boxes": torch.zeros(count, 4)} for count in (1, 5, 2, 9)]
    (first, targets), (last, _) = pieces((images, boxes))
    assert [len(first), len(last)] == [3, 1] and last[0] is images[3] and targets[1] is boxes[1]
    x, y = pieces([X[:2], Y[:2]], 2, 1)[0]  # two samples, two parts
    assert torch.equal(x, X[:1]) and torch.equal(y, Y[:1])
    samples = pieces([(torch.zeros(3), 1), (torch.zeros(5), 0)], 2, 1)
    assert [len(each) for each in samples] == [1, 1] and len(samples[1][0][0]) == 5


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((X, torch.zeros(9, 2)), r"batch\[1\] has the shape \(9, 2\)"),
        ({"x": X, "extra": object()}, r"batch\['extra'\] is a object"),
        ({"kind": "train"}, "nothing in it has a row"),
        (X.to_sparse(), "torch.sparse_coo"),
        ({"four": [X, X, X, X]}, "may hold 4 samples, or 4 tensors"),
    ],
)
def test_what_cannot_be_cut_is_refused(value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pieces(value)


def test_a_batch_that_fits_is_not_touched() -> None:
    batch = cut((X, Y), 2)
    assert cut_batch(batch, None) is batch and cut_batch(batch, 2) is batch
    assert [micro.ids.tolist() for micro in cut_batch(batch, 1).micro] == [[0], [1], [2], [3]]


def test_data_that_cannot_be_cut_end_in_a_sentence() -> None:
    def graphs(model: nn.Module, batch: Any) -> Loss:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
        raise AssertionError

    state, _ = stepped(Small(4), 16, 0)
    with pytest.raises(OutOfMemoryError, match=r"cannot be cut: batch\[1\] has the shape"):
        make_step(graphs)(state, one_micro((X, torch.zeros(7)), 4))
