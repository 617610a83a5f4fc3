"""Verdicts of short trainings on the first batches: the range of learning rates, and one batch learned by heart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.commands.check.first_batch import LossRecorder
from trainwright.commands.check.sandbox import Sandbox, within
from trainwright.commands.check.verdict import Verdict, first_of
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loop import steps
from trainwright.engine.loss import as_loss_fn
from trainwright.engine.lr_range import LrRange, lr_range
from trainwright.engine.step import make_step
from trainwright.engine.until import for_steps
from trainwright.training.custom_objects import build_clip

LOWEST, HIGHEST = 1e-6, 10.0
RANGE_STEPS, LEAST_STEPS = 60, 24
BY_HEART, HEART_STEPS, ENOUGH_STEPS = 16, 200, 100
"""Samples to learn by heart, the most updates for it, and how many show that nothing is learned: a slow or busy machine
takes fewer in the time, and then nothing is said."""
LEARNED, NOT_AT_ALL = 0.5, 0.05
"""The fall of the loss, as a share of its first value, that is success; below the second, nothing was learned."""
DIVERGED = 2.0
"""Loss over its first value, from which on a training on one batch diverges."""
FALL = 0.05
"""Fall of the loss in a range test, as a fraction of its first value, that is clear."""


def range_test(sandbox: Sandbox, *, budget_s: float, step_s: float) -> LrRange | None:
    """Smith's range test on the first batches; None where there is no time for it.

    It always has as many steps, or none: with fewer the loss falls, and explodes, at other rates.
    """
    if RANGE_STEPS * step_s > budget_s or not sandbox.kept:
        return None
    with sandbox.fresh() as state:
        found = lr_range(
            state,
            within(sandbox.again(), 3 * budget_s),
            sandbox.job.parts.loss,
            lowest=LOWEST,
            highest=HIGHEST,
            num_steps=RANGE_STEPS,
            precision=sandbox.job.precision,
            clip=build_clip(sandbox.job.recipe, state),
        )
    return found if found.stopped_at is not None or len(found.lrs) == RANGE_STEPS else None


def falls_from(found: LrRange) -> float | None:
    """The rate from which on the loss stays clearly below its first value until its minimum; None: never."""
    enough = found.losses[0] - FALL * abs(found.losses[0])
    finite = [loss if math.isfinite(loss) else math.inf for loss in found.losses]
    place = finite.index(min(finite))
    if finite[place] >= enough:
        return None
    while place and finite[place - 1] < enough:
        place -= 1
    return found.lrs[place]


def first_update(sandbox: Sandbox) -> float:
    """How far one update at the peak rate moves the weights: norm of the change over norm of the weights."""
    job = sandbox.job
    with sandbox.fresh() as state:
        advance = make_step(job.parts.loss, precision=job.precision, clip=build_clip(job.recipe, state))
        trained = [p for group in state.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in trained]
        advance(state, sandbox.kept[0])
        moved = float(get_total_norm([p.detach() - was for p, was in zip(trained, before, strict=True)]))
        size = float(get_total_norm(before))
    return moved / size if size else 0.0


def plausible(found: LrRange | None, lr: float) -> list[float]:
    """Learning rates for one batch: the recipe's own first, unless the range test contradicts it.

    Where there was no time for a range test, tenfold and a tenth are tried after it.
    """
    if found is None:
        return [lr, 10 * lr, lr / 10]
    if found.suggestion is None or (start := falls_from(found)) is None:
        return [lr]
    middle = math.sqrt(start * 10 * found.suggestion)
    own_is_plausible = start / 30 <= lr <= 3 * (found.stopped_at or math.inf)
    return [lr, middle] if own_is_plausible else [middle, lr]


@dataclass
class BatchFit:
    """The result of learning a few samples by heart. ``constant``: all predictions are equal afterwards.

    ``best`` is the lowest finite loss and ``last`` the last one.

    ``dead`` are layers whose units are all 0, ``zero_grads`` parameters whose gradient was 0 in each step that was
    checked, ``zeros`` those of them that are 0 and so stay 0.
    """

    first: float = math.nan
    best: float = math.nan
    last: float = math.nan
    steps: int = 0
    lr: float = 0.0
    constant: bool = False
    dead: tuple[str, ...] = ()
    zero_grads: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()

    @property
    def fell(self) -> float:
        """The fall of the loss as a fraction of its first value; 0 where no loss was finite."""
        fall = (self.first - self.best) / max(abs(self.first), 1e-12)
        return fall if math.isfinite(fall) else 0.0

    @property
    def diverged(self) -> bool:
        """Whether the loss ended far above its first value, or was not finite."""
        return bool(self.steps) and not self.last <= self.first + (DIVERGED - 1) * abs(self.first)

    @property
    def took_all_steps(self) -> bool:
        """Whether no lack of time ended it."""
        return self.steps >= HEART_STEPS


def learn_by_heart(sandbox: Sandbox, *, lr: float, budget_s: float) -> BatchFit:
    """Trains on a few samples of the first micro-batch at a constant rate, without dropout."""
    fit, micro = BatchFit(lr=lr), fewer(sandbox.kept[0].micro[0], BY_HEART)
    batch = StepBatch((micro,))
    job, ever = sandbox.job, set[str]()
    with sandbox.fresh() as state:
        advance = make_step(job.parts.loss, precision=job.precision, clip=build_clip(job.recipe, state))
        without_dropout(state.model)
        scale_lr(state, lr)
        for result in steps(state, within(_same(batch), budget_s), advance, until=for_steps(HEART_STEPS)):
            loss = float(result.loss)
            fit.steps += 1
            fit.first = loss if fit.steps == 1 else fit.first
            fit.last = loss
            if math.isfinite(loss) and not fit.best <= loss:
                fit.best = loss
            if fit.steps <= 8 or fit.steps % 16 == 0:
                ever |= {
                    name for name, p in state.model.named_parameters() if p.grad is not None and bool(p.grad.any())
                }
            if not math.isfinite(loss) or fit.fell > 0.9:
                break
        trained = [name for name, p in state.model.named_parameters() if p.requires_grad and p.grad is not None]
        fit.zero_grads = tuple(name for name in trained if name not in ever)
        named = dict(state.model.named_parameters())
        fit.zeros = tuple(name for name in fit.zero_grads if named[name].dim() > 1 and not bool(named[name].any()))
        fit.constant, fit.dead = _inspect(sandbox, state.model, micro)
    return fit


def _same(batch: StepBatch) -> Iterator[StepBatch]:
    while True:
        yield batch


def without_dropout(model: nn.Module) -> None:
    """Sets dropout layers to evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()


def scale_lr(state: TrainState, lr: float) -> None:
    """Sets ``lr`` as the rate of the first group; the other groups keep their ratio to it."""
    groups = state.optimizer.param_groups
    factor = lr / groups[0]["lr"]
    for group in groups:
        group["lr"] = group["initial_lr"] = group["lr"] * factor


def fewer(micro: MicroBatch, count: int) -> MicroBatch:
    """The first ``count`` samples, where every tensor has one row for each; else all."""
    size = micro.size
    if size <= count or not _by_rows(micro.data, size):
        return micro
    return MicroBatch(_cut(micro.data, count), micro.ids[:count])


def _by_rows(data: object, size: int) -> bool:
    """Whether the first dimension of every tensor counts samples."""
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


def _inspect(sandbox: Sandbox, model: nn.Module, micro: MicroBatch) -> tuple[bool, tuple[str, ...]]:
    """Whether all predictions are equal, and the names of ReLU layers whose units are 0 for every sample."""
    recorder, dead = LossRecorder(), list[str]()

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and output.numel() and not bool(output.any()):
                dead.append(name)

        return hook

    relus = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
    handles = [module.register_forward_hook(hook_for(name)) for name, module in relus]
    try:
        with evaluating(model, sandbox.job.parts.loss), recorder, sandbox.job.precision.autocast():
            as_loss_fn(sandbox.job.parts.loss)(model, micro.data)
    except Exception:  # a model may be unable to evaluate: the verdict on evaluation says so
        return False, tuple(dead)
    finally:
        for handle in handles:
            handle.remove()
    if len(recorder.calls) != 1:
        return False, tuple(dead)
    rows = recorder.calls[0].rows().float()
    spread = float((rows - rows[:1]).abs().max()) if len(rows) > 1 else math.inf
    return spread <= 1e-6 * max(1e-3, float(rows.abs().max())), tuple(dead)


def by_heart(fits: Sequence[BatchFit], lr: float, *, inputs_vary: bool, chance: float | None) -> Iterator[Verdict]:
    """The verdict on learning a few samples by heart, and on what was seen meanwhile.

    ``fits`` are trainings at several rates, of which the best counts; ``lr`` is the recipe's rate.
    """
    fit = best_of(fits)
    yield from _symptoms(fit, inputs_vary)
    message = f"loss {fit.first:.4g} -> {fit.best:.4g} in {fit.steps} steps at lr {fit.lr:.2g}"
    for other in fits:
        if other.lr == lr != fit.lr:
            message += f", not in {other.steps} steps at the recipe's lr {lr:.2g}"
    if fit.fell >= LEARNED or (chance is not None and fit.best < 0.1 * chance):
        yield Verdict("ok", "one batch", f"learned by heart: {message}")
    elif fit.fell < NOT_AT_ALL and fit.diverged:
        remedy = "take a hundredth of optimizer.lr; if it diverges at that, look for a loss that is not bounded below"
        yield Verdict("fail", "one batch", f"the loss diverges to {fit.last:.4g}: {message}", remedy)
    elif fit.steps < LEAST_STEPS:
        yield Verdict("cannot tell", "one batch", f"too few steps in the time: {message}")
    elif fit.fell < NOT_AT_ALL and fit.steps >= ENOUGH_STEPS:
        remedy = (
            "fix this first: a model that cannot learn 16 samples learns nothing (loss, gradients, initial weights)"
        )
        yield Verdict("fail", "one batch", f"cannot be learned by heart: {message}", remedy)
    elif not fit.took_all_steps:
        yield Verdict("cannot tell", "one batch", f"not learned in the time: {message}")
    else:
        remedy = "check that the loss can reach 0 and equal inputs have equal targets; a larger model may be needed"
        yield Verdict("warn", "one batch", f"half learned: {message}", remedy)


def best_of(fits: Sequence[BatchFit]) -> BatchFit:
    """The training in which the loss fell most."""
    return max(fits, key=lambda each: each.fell)


def _symptoms(fit: BatchFit, inputs_vary: bool) -> Iterator[Verdict]:
    """Verdicts on the weights, activations, output and gradients that were seen."""
    if fit.zeros:
        message = f"{first_of(fit.zeros)} are 0 and stay 0: no gradient passes through them"
        remedy = "random weights, nn.init.kaiming_uniform_ or xavier_uniform_; only biases and last layers may be 0"
        yield Verdict("fail", "weights", message, remedy, "model.init_symmetric")
    elif fit.dead:
        remedy = "weights of Kaiming's size, biases 0 (He et al. 2015), or LeakyReLU"
        yield Verdict("fail", "activations", f"every unit of {fit.dead[0]} is 0", remedy, "model.dead_relu")
    elif fit.constant and inputs_vary:
        remedy = "follow the input through forward(): it is overwritten, set to zero, or never used"
        yield Verdict("fail", "output", "the prediction is the same for every sample, whatever goes in", remedy)
    elif fit.zero_grads and fit.steps >= 8:
        message = f"exactly 0 in each step for {first_of(fit.zero_grads)}"
        yield Verdict("warn", "gradients", message, "no gradient reaches them: look for weights of 0 and dead units")
