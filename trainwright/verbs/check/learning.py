"""Verdicts of short trainings on the first batches: which learning rates would do, and one batch learned by heart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainwright.engine.clip import make_clip
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loop import steps
from trainwright.engine.loss import as_loss_fn
from trainwright.engine.lr_range import LrRange, lr_range
from trainwright.engine.step import make_step
from trainwright.engine.until import for_steps
from trainwright.state.cursor import MicroBatch, StepBatch
from trainwright.state.train_state import TrainState
from trainwright.verbs.check.first_batch import Tap
from trainwright.verbs.check.sandbox import Sandbox, within
from trainwright.verbs.check.verdict import Verdict

LOWEST, HIGHEST = 1e-6, 10.0
RANGE_STEPS, LEAST_STEPS = 60, 24
BY_HEART, HEART_STEPS = 16, 200
"""Samples that are to be learned by heart, and updates at the most."""
LEARNED, NOT_AT_ALL = 0.5, 0.05
"""Share of the first loss by which it is to fall, and from which down nothing was learned."""
MOVES = 10.0
TOO_HIGH, SLOWLY, FALL = 10.0, 5.0, 0.05
"""Rate over the one at which the loss explodes; rates of all steps over the one that helps; fall that is clear."""


def range_test(bench: Sandbox, *, budget_s: float, step_s: float) -> LrRange | None:
    """Smith's test on the first batches; None where there is no time for steps enough."""
    count = min(RANGE_STEPS, int(budget_s / max(step_s, 1e-9)))
    if count < LEAST_STEPS or not bench.kept:
        return None
    clip = bench.job.recipe.optimizer.clip
    with bench.fresh() as state:
        return lr_range(
            state,
            within(bench.again(), 3 * budget_s),
            bench.job.parts.loss,
            lowest=LOWEST,
            highest=HIGHEST,
            num_steps=count,
            precision=bench.job.precision,
            clip=make_clip(clip.by, clip.at),
        )


def falls_from(found: LrRange) -> float | None:
    """The rate of the test from which on the loss was clearly below its first value, down to its least; None: never."""
    enough = found.losses[0] - FALL * abs(found.losses[0])
    finite = [loss if math.isfinite(loss) else math.inf for loss in found.losses]
    place = finite.index(min(finite))
    if finite[place] >= enough:
        return None
    while place and finite[place - 1] < enough:
        place -= 1
    return found.lrs[place]


def first_update(bench: Sandbox) -> float:
    """How far one update at the peak rate moves the weights: norm of the change over norm of the weights."""
    job, clip = bench.job, bench.job.recipe.optimizer.clip
    advance = make_step(job.parts.loss, precision=job.precision, clip=make_clip(clip.by, clip.at))
    with bench.fresh() as state:
        trained = [p for group in state.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in trained]
        advance(state, bench.kept[0])
        moved = float(get_total_norm([p.detach() - was for p, was in zip(trained, before, strict=True)]))
        size = float(get_total_norm(before))
    return moved / size if size else 0.0


def learning_rate(found: LrRange | None, lr: float, num_steps: float, moved: float) -> Verdict:
    """The peak rate of the recipe against the test and the first update.

    Where updates are small they add up: if the rates of all steps of the run come to less than the one rate at which
    the loss began to fall, the run ends before that.
    """
    if moved > MOVES:
        told = f"{lr:.3g}: the first update changes the weights by {moved:,.3g} times their size"
        return Verdict("fail", "learning rate", told, "begin with a thousandth of it", "opt.lr_too_high")
    if found is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; a step takes too long for a range test here")
    good, start = found.suggestion, falls_from(found)
    if good is None or start is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; the loss falls at no rate of the range test")
    end = f"it explodes at {found.stopped_at:.1g}" if found.stopped_at else "it never explodes"
    said = f"{lr:.3g}; in a range test the loss falls from {start:.1g} on, {end}"
    remedy = f"try optimizer.lr between {min(start, good):.1g} and {good:.1g} (trainwright lr-range draws the curve)"
    if found.stopped_at is not None and lr > TOO_HIGH * found.stopped_at:
        return Verdict("fail", "learning rate", said, remedy, "opt.lr_too_high")
    if lr > 2 * (found.stopped_at or math.inf):
        return Verdict("warn", "learning rate", said, remedy, "opt.lr_too_high")
    if lr * num_steps < start:
        told = f"{said}: nothing would move in {num_steps:,.0f} steps"
        return Verdict("fail", "learning rate", told, remedy, "opt.lr_too_low")
    if lr * num_steps < SLOWLY * start:
        return Verdict("warn", "learning rate", f"{said}: it would learn slowly", remedy, "opt.lr_too_low")
    return Verdict("ok", "learning rate", said)


def plausible(found: LrRange | None, lr: float) -> list[float]:
    """Rates to learn a batch by heart with: first the recipe's own, unless the test speaks against it."""
    if found is None or found.suggestion is None or (start := falls_from(found)) is None:
        return [lr]
    middle = math.sqrt(start * 10 * found.suggestion)
    ours = start / 30 <= lr <= 3 * (found.stopped_at or math.inf)
    return [lr, middle] if ours else [middle, lr]


@dataclass
class Heart:
    """What came of learning a few samples by heart. ``constant``: all predictions are equal afterwards.

    ``dead`` are layers all of whose units are 0, ``zero_grads`` parameters whose gradient was 0 in each step that was
    looked at, ``zeros`` those of them that were 0 and so stay.
    """

    first: float = math.nan
    best: float = math.nan
    steps: int = 0
    lr: float = 0.0
    constant: bool = False
    dead: tuple[str, ...] = ()
    zero_grads: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()

    @property
    def fell(self) -> float:
        """By which share of its first value the loss fell."""
        return (self.first - self.best) / max(abs(self.first), 1e-12)


def learn_by_heart(bench: Sandbox, *, lr: float, budget_s: float) -> Heart:
    """Trains on a few samples of the first micro-batch at a constant rate, dropout off."""
    told, micro = Heart(lr=lr), fewer(bench.kept[0].micro[0], BY_HEART)
    batch = StepBatch((micro,))
    clip = bench.job.recipe.optimizer.clip
    advance = make_step(bench.job.parts.loss, precision=bench.job.precision, clip=make_clip(clip.by, clip.at))
    ever: set[str] = set()
    with bench.fresh() as state:
        without_dropout(state.model)
        scale_lr(state, lr)
        for result in steps(state, within(_same(batch), budget_s), advance, until=for_steps(HEART_STEPS)):
            loss = float(result.loss)
            told.steps += 1
            told.first = loss if told.steps == 1 else told.first
            told.best = loss if not told.best <= loss else told.best
            if told.steps <= 8 or told.steps % 16 == 0:
                ever |= {
                    name for name, p in state.model.named_parameters() if p.grad is not None and bool(p.grad.any())
                }
            if not math.isfinite(loss) or told.fell > 0.9:
                break
        trained = [name for name, p in state.model.named_parameters() if p.requires_grad and p.grad is not None]
        told.zero_grads = tuple(name for name in trained if name not in ever)
        named = dict(state.model.named_parameters())
        told.zeros = tuple(name for name in told.zero_grads if named[name].dim() > 1 and not bool(named[name].any()))
        told.constant, told.dead = _looked_at(bench, state.model, micro)
    return told


def _same(batch: StepBatch) -> Iterator[StepBatch]:
    while True:
        yield batch


def without_dropout(model: nn.Module) -> None:
    """Sets layers of dropout to evaluation; the rest trains."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()


def scale_lr(state: TrainState, lr: float) -> None:
    """Makes ``lr`` the rate of the first group; the others keep their ratio to it."""
    groups = state.optimizer.param_groups
    factor = lr / groups[0]["lr"]
    for group in groups:
        group["lr"] = group["initial_lr"] = group["lr"] * factor


def fewer(micro: MicroBatch, count: int) -> MicroBatch:
    """The first samples, where every tensor has one row for each; else all."""
    size = micro.size
    if size <= count or not _by_rows(micro.data, size):
        return micro
    return MicroBatch(_cut(micro.data, count), micro.ids[:count])


def _by_rows(data: Any, size: int) -> bool:
    if isinstance(data, Tensor):
        return data.dim() > 0 and data.shape[0] == size
    if isinstance(data, Mapping):
        return all(_by_rows(value, size) for value in data.values())
    return isinstance(data, tuple | list) and all(_by_rows(value, size) for value in data)


def _cut(data: Any, count: int) -> Any:
    if isinstance(data, Tensor):
        return data[:count]
    if isinstance(data, Mapping):
        return {key: _cut(value, count) for key, value in data.items()}
    parts = [_cut(value, count) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def _looked_at(bench: Sandbox, model: nn.Module, micro: MicroBatch) -> tuple[bool, tuple[str, ...]]:
    """(every prediction is the same, names of layers of ReLU all of whose units are 0 for every sample)."""
    tap, dead = Tap(), list[str]()

    def heard(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.numel() and not bool(output.any()):
                dead.append(name)

        return hook

    relus = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
    handles = [module.register_forward_hook(heard(name)) for name, module in relus]
    try:
        with evaluating(model, bench.job.parts.loss), tap, bench.job.precision.autocast():
            as_loss_fn(bench.job.parts.loss)(model, micro.data)
    except Exception:  # a model may be unable to evaluate: the validation says so
        return False, tuple(dead)
    finally:
        for handle in handles:
            handle.remove()
    if len(tap.heard) != 1:
        return False, tuple(dead)
    rows = tap.heard[0].rows().float()
    spread = float((rows - rows[:1]).abs().max()) if len(rows) > 1 else math.inf
    return spread <= 1e-6 * max(1e-3, float(rows.abs().max())), tuple(dead)


def by_heart(told: Heart, *, inputs_vary: bool, chance: float | None) -> Iterator[Verdict]:
    """Whether a few samples can be learned; if not, what stands out."""
    yield from _stands_out(told, inputs_vary)
    said = f"loss {told.first:.4g} -> {told.best:.4g} in {told.steps} steps at lr {told.lr:.2g}"
    if told.fell >= LEARNED or (chance is not None and told.best < 0.1 * chance):
        yield Verdict("ok", "one batch", f"learned by heart: {said}")
    elif told.steps < LEAST_STEPS:
        yield Verdict("cannot tell", "one batch", f"too few steps in the time: {said}")
    elif told.fell < NOT_AT_ALL:
        remedy = "mend this first: what cannot learn 16 samples learns nothing (loss, gradients, initial weights)"
        yield Verdict("fail", "one batch", f"cannot be learned by heart: {said}", remedy)
    elif told.steps < HEART_STEPS:
        yield Verdict("cannot tell", "one batch", f"half learned in the time: {said}")
    else:
        remedy = "look whether the loss can be 0, and equal inputs have equal targets; a larger model may be needed"
        yield Verdict("warn", "one batch", f"half learned: {said}", remedy)


def _stands_out(told: Heart, inputs_vary: bool) -> Iterator[Verdict]:
    """What was seen of the model while it learned."""
    if told.zeros:
        said = f"{_some(told.zeros)} are 0 and stay 0: no gradient passes them"
        remedy = "random weights, nn.init.kaiming_uniform_ or xavier_uniform_; only biases and last layers may be 0"
        yield Verdict("fail", "weights", said, remedy, "init.symmetric")
    elif told.dead:
        remedy = "weights of Kaiming's size, biases 0 (He et al. 2015), or LeakyReLU"
        yield Verdict("fail", "activations", f"every unit of {told.dead[0]} is 0", remedy, "model.dead_relu")
    elif told.constant and inputs_vary:
        remedy = "follow the input through forward(): it is overwritten, zeroed, or nothing of it arrives"
        yield Verdict("fail", "output", "the prediction is the same for every sample, whatever goes in", remedy)
    elif told.zero_grads and told.steps >= 8:
        said = f"exactly 0 in each step for {_some(told.zero_grads)}"
        yield Verdict("warn", "gradients", said, "nothing reaches them: look for weights of 0 and dead units")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
