"""Verdicts of short trainings on the first batches: the learning rate range test, and overfitting one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.commands.check.first_batch import LossRecorder
from trainwright.commands.check.sandbox import Sandbox, within
from trainwright.commands.check.smoke import SmokeRun
from trainwright.commands.check.verdict import Verdict, Word, first_of
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loop import for_steps, steps
from trainwright.engine.loss import as_loss_fn
from trainwright.engine.lr_range import LrRange, lr_range
from trainwright.engine.step import make_step
from trainwright.errors import UsageError

LOWEST_LR = 1e-6
HIGHEST_LR = 10.0
RANGE_STEPS = 60
MIN_RANGE_STEPS = 24
ONE_BATCH_SAMPLES = 16
ONE_BATCH_MAX_STEPS = 200
ONE_BATCH_MIN_STEPS = 100
"""Updates after which an unchanged loss is evidence. If a slow machine takes fewer updates, there is no verdict."""
LEARNED_LOSS_FALL = 0.5
"""Relative fall of the loss above which a batch counts as learned."""
MIN_LOSS_FALL = 0.05
"""Relative fall of the loss below which nothing was learned."""
DIVERGED_LOSS_RATIO = 2.0
"""Last loss / first loss above which a training on one batch has diverged."""
RANGE_LOSS_FALL = 0.05
"""Relative fall of the loss in a range test that counts as clear."""


def range_test(sandbox: Sandbox, *, budget_s: float, step_s: float) -> LrRange | None:
    """Run Smith's range test on the first batches; None if there is no time for it.

    The number of steps is fixed, because fewer steps would move the rates at which the loss falls and explodes.
    """
    if RANGE_STEPS * step_s > budget_s or not sandbox.kept:
        return None
    with sandbox.built() as live:
        found = lr_range(
            live.state,
            within(cycle(sandbox.kept), 3 * budget_s),
            sandbox.job.parts.loss,
            lowest=LOWEST_LR,
            highest=HIGHEST_LR,
            num_steps=RANGE_STEPS,
            precision=sandbox.job.precision,
            clip=sandbox.job.built.clip,
        )
    return found if found.stopped_at is not None or len(found.lrs) == RANGE_STEPS else None


def falls_from(found: LrRange) -> float | None:
    """Return the rate from which the loss stays clearly below its first value until its minimum; None if it never
    falls clearly.
    """
    enough = found.losses[0] - RANGE_LOSS_FALL * abs(found.losses[0])
    finite = [loss if math.isfinite(loss) else math.inf for loss in found.losses]
    place = finite.index(min(finite))
    if finite[place] >= enough:
        return None
    while place and finite[place - 1] < enough:
        place -= 1
    return found.lrs[place]


def first_update(sandbox: Sandbox) -> float:
    """Return the norm of the first update at the peak rate / norm of the weights."""
    job = sandbox.job
    with sandbox.built() as live:
        advance = make_step(job.parts.loss, precision=job.precision, clip=job.built.clip)
        trained = [p for group in live.state.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in trained]
        advance(live.state, sandbox.kept[0])
        moved = float(get_total_norm([p.detach() - was for p, was in zip(trained, before, strict=True)]))
        size = float(get_total_norm(before))
    return moved / size if size else 0.0


def plausible(found: LrRange | None, lr: float) -> list[float]:
    """Return learning rates for one batch: the recipe's first, unless the range test contradicts it.

    Without a range test, ten times and a tenth of that rate follow.
    """
    if found is None:
        return [lr, 10 * lr, lr / 10]
    if found.suggestion is None or (start := falls_from(found)) is None:
        return [lr]
    middle = math.sqrt(start * 10 * found.suggestion)
    is_plausible = start / 30 <= lr <= 3 * (found.stopped_at or math.inf)
    return [lr, middle] if is_plausible else [middle, lr]


@dataclass
class BatchFit:
    """The result of overfitting a few samples: the first, lowest finite and last loss, after ``steps`` updates.

    ``constant`` is True if all predictions are equal afterwards. ``dead`` are layers whose units are all 0,
    ``zero_grads`` parameters whose gradient was 0 in each examined step, and ``zeros`` those of them whose values are
    all 0, so that they stay 0.
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
        """The relative fall of the loss; 0 if no loss was finite."""
        fall = (self.first - self.best) / max(abs(self.first), 1e-12)
        return fall if math.isfinite(fall) else 0.0

    @property
    def diverged(self) -> bool:
        """True if the loss ended far above its first value, or was not finite."""
        return bool(self.steps) and not self.last <= self.first + (DIVERGED_LOSS_RATIO - 1) * abs(self.first)

    @property
    def took_all_steps(self) -> bool:
        return self.steps >= ONE_BATCH_MAX_STEPS


def learn_by_heart(sandbox: Sandbox, *, lr: float, budget_s: float) -> BatchFit:
    """Train on a few samples of the first micro-batch at a constant rate, without dropout."""
    fit, micro = BatchFit(lr=lr), _first_samples(sandbox.kept[0].micro[0], ONE_BATCH_SAMPLES)
    batch = StepBatch((micro,))
    job, ever = sandbox.job, set[str]()
    with sandbox.built() as live:
        state = live.state
        advance = make_step(job.parts.loss, precision=job.precision, clip=job.built.clip)
        _without_dropout(state.model)
        _set_lr(state, lr)
        for result in steps(state, within(repeat(batch), budget_s), advance, until=for_steps(ONE_BATCH_MAX_STEPS)):
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


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()


def _set_lr(state: TrainState, lr: float) -> None:
    """Set ``lr`` as the learning rate of the first group. Other groups keep their ratio to it."""
    groups = state.optimizer.param_groups
    factor = lr / groups[0]["lr"]
    for group in groups:
        group["lr"] = group["initial_lr"] = group["lr"] * factor


def _first_samples(micro: MicroBatch, count: int) -> MicroBatch:
    """Return the first ``count`` samples, or all of them if the batch cannot be cut."""
    try:
        return cut_micro(micro, count)[0]
    except UsageError:
        return micro


def _inspect(sandbox: Sandbox, model: nn.Module, micro: MicroBatch) -> tuple[bool, tuple[str, ...]]:
    """Return True if all predictions are equal, and the names of ReLU layers whose units are 0 for every sample."""
    recorder, dead = LossRecorder(), list[str]()

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if isinstance(output, Tensor) and output.numel() and not bool(output.any()):
                dead.append(name)

        return hook

    relus = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
    handles = [module.register_forward_hook(hook_for(name)) for name, module in relus]
    try:
        with evaluating(model, sandbox.job.parts.loss), recorder, sandbox.job.precision.autocast():
            as_loss_fn(sandbox.job.parts.loss)(model, micro.data)
    except Exception:  # a model that cannot evaluate gets a verdict on evaluation
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
    """Yield the verdict on overfitting a few samples, and on symptoms that appeared. The best of ``fits`` counts.

    ``lr`` is the learning rate of the recipe. ``chance`` is the loss of a guess; None if it is unknown.
    """
    fit = best_of(fits)
    yield from _symptoms(fit, inputs_vary)
    message = f"loss {fit.first:.4g} -> {fit.best:.4g} in {fit.steps} steps at lr {fit.lr:.2g}"
    for other in fits:
        if other.lr == lr != fit.lr:
            message += f", not in {other.steps} steps at the recipe's lr {lr:.2g}"
    if fit.fell >= LEARNED_LOSS_FALL or (chance is not None and fit.best < 0.1 * chance):
        yield Verdict("ok", "one batch", f"memorized: {message}")
    elif fit.fell < MIN_LOSS_FALL and fit.diverged:
        remedy = "take a hundredth of optimizer.lr; if it still diverges, check if the loss is bounded below"
        yield Verdict("fail", "one batch", f"the loss diverges to {fit.last:.4g}: {message}", remedy)
    elif fit.steps < MIN_RANGE_STEPS:
        yield Verdict("cannot tell", "one batch", f"too few steps in the time: {message}")
    elif fit.fell < MIN_LOSS_FALL and fit.steps >= ONE_BATCH_MIN_STEPS:
        remedy = (
            "fix this first: a model that cannot learn 16 samples learns nothing (loss, gradients, initial weights)"
        )
        yield Verdict("fail", "one batch", f"cannot be memorized: {message}", remedy)
    elif not fit.took_all_steps:
        yield Verdict("cannot tell", "one batch", f"not memorized within the time budget: {message}")
    else:
        remedy = "check that the loss can reach 0 and equal inputs have equal targets; a larger model may be needed"
        yield Verdict("warn", "one batch", f"partly memorized: {message}", remedy)


def best_of(fits: Sequence[BatchFit]) -> BatchFit:
    """Return the training with the largest relative fall of the loss."""
    return max(fits, key=lambda each: each.fell)


def _symptoms(fit: BatchFit, inputs_vary: bool) -> Iterator[Verdict]:
    if fit.zeros:
        message = f"{first_of(fit.zeros)} are 0 and stay 0: no gradient passes through them"
        remedy = "random weights, nn.init.kaiming_uniform_ or xavier_uniform_; only biases and last layers may be 0"
        yield Verdict("fail", "weights", message, remedy, "model.init_symmetric")
    elif fit.dead:
        remedy = "weights of Kaiming's size, biases 0 (He et al. 2015), or LeakyReLU"
        yield Verdict("fail", "activations", f"every unit of {fit.dead[0]} is 0", remedy, "model.dead_relu")
    elif fit.constant and inputs_vary:
        remedy = "follow the input through forward(): it is overwritten, set to zero, or never used"
        yield Verdict("fail", "output", "the prediction is the same for every sample", remedy)
    elif fit.zero_grads and fit.steps >= 8:
        message = f"exactly 0 in each step for {first_of(fit.zero_grads)}"
        yield Verdict("warn", "gradients", message, "no gradient reaches them: check for weights of 0 and dead units")


MAX_FIRST_UPDATE = 10.0
"""Norm of the first update / norm of the weights, above which the update destroys the initial weights."""
MIN_TOTAL_RATE_RATIO = 5.0
"""Peak learning rate x steps / rate at which the loss begins to fall, below which the run learns slowly."""
CODE_HIGH = "optim.lr_too_high"
CODE_LOW = "optim.lr_too_low"


@dataclass(frozen=True)
class RateEvidence:
    """Measurements about the peak learning rate ``lr`` of a recipe whose run has ``num_steps`` steps.

    ``moved`` is the norm of the first update / norm of the weights. ``found`` is the range test; None if there was no
    time for it. ``fits`` are trainings on one batch, at the recipe's rate and at others.
    """

    lr: float
    num_steps: float
    moved: float
    found: LrRange | None
    fits: Sequence[BatchFit]
    smoke: SmokeRun

    @property
    def learned_at_peak(self) -> bool:
        """True if the smoke run reached the peak rate and learned."""
        return self.smoke.learned is True and self.smoke.peak_lr >= 0.5 * self.lr

    @property
    def explodes_below(self) -> bool:
        """True if the loss of the range test explodes below the recipe's learning rate."""
        return self.found is not None and self.found.stopped_at is not None and self.lr > self.found.stopped_at

    @property
    def learns_only_below(self) -> BatchFit | None:
        """A training that memorized one batch at a lower rate, if the recipe's rate did not."""
        if any(fit.fell >= LEARNED_LOSS_FALL for fit in self.fits if fit.lr >= self.lr):
            return None
        tried = any(fit.lr == self.lr and (fit.diverged or fit.took_all_steps) for fit in self.fits)
        below = [fit for fit in self.fits if fit.fell >= LEARNED_LOSS_FALL and fit.lr < self.lr]
        return below[0] if tried and below else None

    def too_high(self) -> list[str]:
        """Return the signs that the rate is too high, as text."""
        signs = []
        if self.explodes_below:
            assert self.found is not None
            signs.append(f"the range test explodes at {self.found.stopped_at:.2g}")
        if (lower := self.learns_only_below) is not None:
            signs.append(f"one batch is learned at {lower.lr:.2g} and not at this rate")
        if self.smoke.is_worse_than_a_guess and self.smoke.peak_lr >= 0.5 * self.lr:
            signs.append(
                f"the smoke run ends at a loss of {self.smoke.ends[1]:.4g}, that of a guess is {self.smoke.guess:.4g}"
            )
        if self.smoke.diverges:
            signs.append("the smoke run diverges")
        return signs


def learning_rate(seen: RateEvidence) -> Verdict:
    """Judge the peak rate of the recipe by all measurements.

    A smoke run that did not reach half of the peak rate, as in a warm-up, does not show that the rate is good. Small
    updates add up: if the rate times the number of steps is less than the rate at which the loss began to fall, the run
    ends before the loss falls.
    """
    lr, found = seen.lr, seen.found
    if seen.moved > MAX_FIRST_UPDATE:
        message = f"{lr:.3g}: the first update changes the weights by {seen.moved:,.3g} times their size"
        word: Word = "warn" if seen.learned_at_peak else "fail"
        return Verdict(word, "learning rate", message, "try optimizer.lr at a thousandth of it", CODE_HIGH)
    message = f"{lr:.3g}{_in_words(found)}"
    if signs := seen.too_high():
        certain = not seen.learned_at_peak and (seen.explodes_below or len(signs) > 1)
        claim = f"{lr:.3g} is too high" if certain else f"{lr:.3g} may be too high"
        if seen.learned_at_peak:
            signs.append(f"yet the first {len(seen.smoke.losses)} steps learn")
        text = f"{claim}: {', '.join(signs)}"
        return Verdict("fail" if certain else "warn", "learning rate", text, _lower_rate(seen), CODE_HIGH)
    if found is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; a step takes too long for a range test here")
    start = falls_from(found)
    if found.suggestion is None or start is None:
        return Verdict("cannot tell", "learning rate", f"{lr:.3g}; the loss falls at no rate of the range test")
    if seen.learned_at_peak or lr * seen.num_steps >= MIN_TOTAL_RATE_RATIO * start:
        if lr < start and not seen.learned_at_peak:
            message += f"; below that it learns more slowly, which {seen.num_steps:,.0f} steps make up for"
        return Verdict("ok", "learning rate", message)
    if lr * seen.num_steps < start and seen.smoke.learned is not True:
        message = f"{message}: nothing would move in {seen.num_steps:,.0f} steps"
        return Verdict("fail", "learning rate", message, _higher_rate(found, lr), CODE_LOW)
    return Verdict("warn", "learning rate", f"{message}: it would learn slowly", _higher_rate(found, lr), CODE_LOW)


def _in_words(found: LrRange | None) -> str:
    start = falls_from(found) if found is not None else None
    if found is None or start is None:
        return ""
    end = f"it explodes at {found.stopped_at:.2g}" if found.stopped_at else "it never explodes"
    return f"; in a range test the loss falls from {start:.2g} on, {end}"


def _lower_rate(seen: RateEvidence) -> str:
    if (good := _recommended(seen.found)) and good[0] < seen.lr:
        return _try(good[0], min(good[1], seen.lr / 2))
    lower = seen.learns_only_below
    return _try(lower.lr, lower.lr) if lower is not None else _try(seen.lr / 10, seen.lr / 10)


def _higher_rate(found: LrRange, lr: float) -> str:
    good = _recommended(found)
    if good is None or good[1] <= 1.5 * lr:
        return "train for more steps (until): the rate itself is as high as the range test allows"
    return _try(max(good[0], 1.5 * lr), good[1])


def _recommended(found: LrRange | None) -> tuple[float, float] | None:
    """Return an interval that ends at the suggestion of the range test, and begins where the loss begins to fall."""
    if found is None or found.suggestion is None or (start := falls_from(found)) is None:
        return None
    return min(start, found.suggestion), found.suggestion


def _try(low: float, high: float) -> str:
    """Return a remedy with an interval of rates, or with one rate if both ends are nearly equal."""
    between = f"between {low:.1g} and {high:.1g}" if high >= 2 * low else f"near {high:.1g}"
    return f"try optimizer.lr {between} (trainwright lr-range draws the curve)"
