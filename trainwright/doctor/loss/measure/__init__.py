"""Measures what a loss compares, on a replay: with other predictions and targets in place of those of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.loss.facts import (
    ComparedFacts,
    ComparisonsFacts,
    Learned,
    LearnedFacts,
    TowardsFacts,
    TowardsPass,
)
from trainwright.doctor.loss.measure import at_targets as _at_targets  # noqa: F401
from trainwright.doctor.loss.measure import baselines as _baselines  # noqa: F401  registers its experiment
from trainwright.doctor.loss.measure import bounds as _bounds  # noqa: F401
from trainwright.doctor.loss.measure import counted as _counted  # noqa: F401
from trainwright.doctor.loss.measure import cut as _cut  # noqa: F401
from trainwright.doctor.loss.measure import divergence as _divergence  # noqa: F401
from trainwright.doctor.loss.measure import pairs as _pairs  # noqa: F401
from trainwright.doctor.loss.measure import room as _room  # noqa: F401
from trainwright.doctor.loss.measure import slopes as _slopes  # noqa: F401
from trainwright.doctor.loss.measure import terms as _terms  # noqa: F401
from trainwright.doctor.loss.measure.added import added_to_targets
from trainwright.doctor.loss.measure.bounds import weights_in
from trainwright.doctor.loss.measure.comparing import CLASSES, DISTANCES, RESIDUALS, ComparedLoss, compared
from trainwright.doctor.loss.measure.followed import FollowedDifferences, SummedSquares
from trainwright.doctor.loss.measure.implied import implied
from trainwright.doctor.loss.measure.made import other_outputs, other_weights, others_among
from trainwright.doctor.loss.measure.players import GameProgram
from trainwright.doctor.loss.measure.reductions import added_to_rows, divided_among_means, summed_among_means
from trainwright.doctor.loss.measure.scores import SAMPLES, is_of_probabilities, made_by
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import change_leaves, function_name
from trainwright.replay.inspector import custom_functions_of
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, ReplayResult, Upto
from trainwright.replay.scaled import scaled_outputs
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import made_of, terms_of
from trainwright.runlog.json_values import Facts, strict

MAX_CALLS = 4
"""Calls of loss functions in a step that are looked at."""
MAX_STEPS, MIN_STEPS = 8, 3
"""Recorded steps in which the newest weights are tried, and the fewest that tell."""
Mode: TypeAlias = Literal["train", "eval"] | None
Weights: TypeAlias = Callable[[], AbstractContextManager[object]]
MAX_ELEMENTS = 2**22
"""Of a prediction that is looked at."""
NUDGE = 0.01
"""The share of the way to its target that a prediction is moved."""
BOUNDS = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("relu", 0.0, math.inf),
    "SoftplusBackward0": ("softplus", 0.0, math.inf),
}
"""Functions with bounded values, by the name of their node in the graph."""
OF_LOGITS = {"cross_entropy", "binary_cross_entropy_with_logits"}
"""Losses whose predictions have no bounds."""
ORDERED = CLASSES | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
"""Losses whose arguments cannot be swapped."""


def probes(watched: WatchedObjects) -> list[Probe]:
    """None: a replay shows all that the laws need."""
    return []


@experiment(ComparisonsFacts.experiment, when="requested")
def comparisons(session: ReplaySession) -> Facts:
    """Each call of a loss function: its value, and its values of predictions that tell nothing."""
    recorded = session.recorded_step
    calls = _calls(session, recorded)
    made = _made(session, recorded, [call for call, _ in calls])
    blank = _of_blank_outputs(session, recorded, [call for call, _ in calls])
    found = [
        replace(facts, made=n in made, blank=max(facts.blank, blank[n]))
        for n, facts in enumerate(_looked_at(call, module) for call, module in calls)
    ]
    reduced = summed_among_means(recorded), added_to_targets(recorded), divided_among_means(recorded)
    return dict(strict(vars(ComparisonsFacts(tuple(found), *reduced, added_to_rows(session), implied(session)))))


def _made(session: ReplaySession, recorded: RecordedStep, calls: list[ComparedLoss]) -> set[int]:
    """The numbers of the calls whose targets are others with other weights."""
    if not calls:
        return set()
    again = _calls(session, recorded, weights=partial(other_weights, session), constants=other_outputs(recorded))
    return others_among([call.target.detach() for call in calls], [call.target.detach() for call, _ in again])


def _of_blank_outputs(session: ReplaySession, recorded: RecordedStep, calls: list[ComparedLoss]) -> list[float]:
    """What the losses over classes are where the models say 0: a margin is a part of the scores that the loop makes of
    outputs. 0 for other losses, and where that cannot be computed.
    """
    if not any(call.name in CLASSES for call in calls):
        return [0.0] * len(calls)
    again = _calls(session, recorded, weights=partial(scaled_outputs, session, 0.0))
    if [call.name for call, _ in again] != [call.name for call in calls]:
        return [0.0] * len(calls)
    values = [call.value(call.x.detach(), call.target.detach()) for call, _ in again]
    return [value if call.name in CLASSES and math.isfinite(value) else 0.0 for value, call in zip(values, calls)]


def _calls(
    session: ReplaySession,
    recorded: RecordedStep,
    names: set[str] | None = None,
    mode: Mode = None,
    upto: Upto = "forward",
    hear: Callable[[ComparedLoss, Tensor], object] | None = None,
    weights: Weights = nullcontext,
    constants: Callable[[Tensor], Tensor] | None = None,
) -> list[tuple[ComparedLoss, str | None]]:
    """The calls in a step, each with the module that makes it. ``names`` gets those of all functions.

    ``hear`` gets the gradient of the prediction of each call. ``weights`` is a context around the step, ``constants``
    changes what comes from outside. A difference that is no distance is left out.
    """
    modules, differences, squares = ModuleStack(session.modules), FollowedDifferences(), SummedSquares()
    found: list[tuple[ComparedLoss, str | None]] = []

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if names is not None:
            names.add(function_name(function))
        if len(found) < MAX_CALLS:
            call = compared(function, args, kwargs, outside=modules.innermost is None)
            if call is not None and call.x.numel() <= MAX_ELEMENTS:
                call = replace(call, of_distances=squares.is_one(call.x))
                if hear is not None and call.x.requires_grad:
                    call.x.register_hook(partial(hear, call))  # type: ignore[no-untyped-call]
                found.append((call, modules.innermost))
                return differences.begin(call, differences.followed(function, args, kwargs))
        result = differences.followed(function, args, kwargs)
        squares.follow(function, args, kwargs, result)
        return result

    with session.live():
        change = Intervention(ops=collect, model=_both(modules, weights), constants=constants, mode=mode)
        session.replayer.run(recorded, change, upto=upto)
    return [(call, module) for call, module in found if differences.is_distance(call)]


def _calls_of_what_counts(session: ReplaySession, recorded: RecordedStep) -> list[tuple[ComparedLoss, str | None]]:
    """The same in eval mode, each with the targets alone for whose predictions the loss has a gradient: a loop may
    multiply by a mask."""
    counts: dict[int, Tensor] = {}

    def hear(call: ComparedLoss, gradient: Tensor) -> None:
        counts[id(call)] = gradient.detach() != 0

    calls = _calls(session, recorded, mode="eval", upto="backward", hear=hear)
    return [(call.of_those(counts[id(call)]) if id(call) in counts else call, module) for call, module in calls]


@torch.no_grad()
def _looked_at(call: ComparedLoss, module: str | None) -> ComparedFacts:
    x, target = call.x.detach(), call.target.detach()
    bound, outside = _out_of_reach(call)
    return ComparedFacts(
        op=call.name,
        module=module,
        value=call.value(x, target),
        blank=call.value(call.blank(), target),
        constant=call.of_constant(),
        smoothed=call.of_smoothed(),
        targets=len(call.valid()),
        bound=bound,
        outside=outside,
        bounded=_bounded(call),
        mass=call.mass() if call.name == "nll_loss" else -1.0,
        weighed=call.name == "nll_loss" and is_of_probabilities(call.x),
        of_distances=call.of_distances,
        swapped=call.name in ORDERED and call.target.requires_grad and not call.x.requires_grad,
        itself=x.shape == target.shape and x.numel() > 1 and torch.equal(x.double(), target.double()),
    )


@experiment(LearnedFacts.experiment, when="requested")
def learned(session: ReplaySession) -> Facts:
    """The losses of the last recorded steps, with the weights before the newest, against what tells nothing."""
    names: set[str] = set()
    rows: dict[tuple[int, str, str | None], list[tuple[float, float, float]]] = {}
    sizes: dict[tuple[int, str, str | None], tuple[int, int, bool]] = {}
    chosen = [each for each in session.recorded_steps if each.blind is None][-MAX_STEPS:]
    for recorded in chosen:
        found = _calls(session, recorded, names, "eval")
        if any(call.is_weighted_by_the_loop for call, _ in found):
            found = _calls_of_what_counts(session, recorded)
        for number, (call, module) in enumerate(found):
            if call.varies and not (call.target.requires_grad and not call.x.requires_grad):
                row = call.value(call.x.detach(), call.target.detach()), call.of_constant(), call.of_shuffled()
                rows.setdefault((number, call.name, module), []).append(row)
                own_way = bool(custom_functions_of([call.x]))
                sizes[number, call.name, module] = len(call.valid()), call.classes if call.is_hard else 0, own_way
    calls = [_learned(key[1], key[2], each, *sizes[key]) for key, each in rows.items() if len(each) >= MIN_STEPS]
    drawn = not SAMPLES.isdisjoint(names) or any(map(_is_of_draws, chosen[-1:]))
    facts = LearnedFacts(len(chosen), tuple(each for each in calls if each is not None), drawn)
    return dict(strict(vars(facts)))


def _is_of_draws(recorded: RecordedStep) -> bool:
    """Whether numbers of either sign weigh what the model says, as advantages weigh what was drawn: returns of draws
    are no values that inputs tell.
    """
    weights = weights_in([each for term in terms_of(recorded) for each in made_of(recorded, term.slot)])
    return any(bool((each < 0).any() and (each > 0).any()) for each in weights)


def _learned(
    op: str, module: str | None, rows: list[tuple[float, float, float]], targets: int, classes: int, own_way: bool
) -> Learned | None:
    if not all(map(math.isfinite, (number for row in rows for number in row))):
        return None
    value, constant, shuffled = (fmean(column) for column in zip(*rows))
    if constant <= 1e-12:
        return None
    gained = [(best - own) / constant for own, best, _ in rows]
    told = [(other - own) / constant for own, _, other in rows]
    errors = stdev(gained) / math.sqrt(len(rows)), stdev(told) / math.sqrt(len(rows))
    means = fmean(gained), fmean(told)
    return Learned(op, module, value, constant, shuffled, *means, max(errors), errors[1], targets, classes, own_way)


def _out_of_reach(call: ComparedLoss) -> tuple[str, float]:
    """The function that bounds the prediction, and the share of targets beyond its bounds by more than 1 %."""
    made = made_by(call.x, tuple(BOUNDS))
    if made is None or call.name not in DISTANCES | RESIDUALS | OF_LOGITS:
        return "", 0.0
    name, low, high = BOUNDS[type(made).__name__]
    if call.name in OF_LOGITS:
        return name, 0.0
    target = call.target.detach().double()
    room = 0.01 * (high - low if math.isfinite(high) else float(target.abs().max()))
    return name, float(((target < low - room) | (target > high + room)).double().mean())


def _bounded(call: ComparedLoss) -> tuple[float, float]:
    """The loss of the best logits within the bounds of the function that they end in, and that of logits of 0."""
    made = made_by(call.x, tuple(BOUNDS))
    if made is None or call.name not in OF_LOGITS:
        return 0.0, 0.0
    _, low, high = BOUNDS[type(made).__name__]
    return call.of_best_within(low, high), call.value(call.blank(), call.target.detach())


@experiment(TowardsFacts.experiment, when="first")
def towards_targets(session: ReplaySession) -> Facts:
    """The loss, and the loss when each prediction is moved a little towards the target that it is compared with."""
    moved: list[str] = []
    gradients = _gradients_of_comparisons(session)
    no_targets = gradients.not_to_become_small | _no_distances(session)

    def losses_after(step: float) -> ReplayResult:
        modules, number = ModuleStack(session.modules), count()

        def nearer(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            call = _differentiable(function, args, kwargs, modules)
            if call is None or next(number) in no_targets:
                return function(*args, **kwargs)
            moved.append(call.name)
            change = change_leaves(lambda leaf: call.nearer(step) if leaf is call.x else leaf)
            args, kwargs = change(0, args, kwargs)
            return function(*args, **kwargs)

        result = session.run(Intervention(ops=nearer, model=modules.following), upto="forward")
        if result.error is not None:
            raise result.error
        return result

    before, after = losses_after(0.0), losses_after(NUDGE)
    rivals = len(session.roots) > 1 or len(session.optimizers) > 1
    own = _own_passes(session, before.losses, after.losses) if rivals else ()
    facts = TowardsFacts(
        before.loss,
        after.loss,
        tuple(dict.fromkeys(moved)),
        rivals,
        own,
        reached=bool(gradients.reached - no_targets),
        maximises=all(bool(group.get("maximize")) for each in session.optimizers for group in each.param_groups),
    )
    return dict(strict(vars(facts)))


def _own_passes(session: ReplaySession, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[TowardsPass, ...]:
    """Of a game the losses that train all models whose outputs they are computed of: those of its judges."""
    game = GameProgram(session)
    passes = game.passes()
    if not game.takes_turns or not len(passes) == len(before) == len(after):
        return ()
    own = [each is not None and game.is_own(each) for each in passes]
    return tuple(TowardsPass(float(a), float(b)) for a, b, is_own in zip(before, after, own) if is_own)


def _differentiable(function: TorchFunction, args: Args, kwargs: Kwargs, modules: ModuleStack) -> ComparedLoss | None:
    """The comparison that a call makes; None where it makes none, or has no gradient, or is large."""
    call = compared(function, args, kwargs, outside=modules.innermost is None)
    return None if call is None or not call.x.requires_grad or call.x.numel() > MAX_ELEMENTS else call


@dataclass(frozen=True)
class _Gradients:
    """What backward gives to the results of comparisons, by their numbers. ``reached`` have a gradient other than 0.

    ``not_to_become_small`` are those of which some samples are to become small and others large, as the log-probability
    of what was drawn does, which is weighed by how good it was; and those that have a part in the loss by their
    derivative alone, as what is matched to a gradient, or the loss of an inner loop.
    """

    reached: set[int]
    not_to_become_small: set[int]


def _gradients_of_comparisons(session: ReplaySession) -> _Gradients:
    both_ways, direct, derived, reached = set[int](), set[int](), set[int](), set[int]()
    modules, number, inside = ModuleStack(session.modules), count(), list[bool]()

    def hear(which: int, weighs: bool, gradient: Tensor) -> None:
        (derived if inside else direct).add(which)
        reached.update({which} if bool(gradient.any()) else ())
        if weighs and bool((gradient > 0).any()) and bool((gradient < 0).any()):
            both_ways.add(which)

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        call = _differentiable(function, args, kwargs, modules)
        if function is torch.autograd.grad:
            inside.append(True)
        try:
            result = function(*args, **kwargs)
        finally:
            inside.clear()
        if call is not None:
            which = next(number)
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(partial(hear, which, call.name not in RESIDUALS))  # type: ignore[no-untyped-call]
        return result

    session.run(Intervention(ops=collect, model=modules.following), upto="backward")
    return _Gradients(reached, both_ways | (derived - direct))


def _no_distances(session: ReplaySession) -> set[int]:
    """The numbers of the differences that are none of a prediction and its target: there is nothing that makes a
    distance of them, or what is taken off was made of what the model says, as a sampler's gradient or the value of a
    surrogate is.
    """
    differences = FollowedDifferences()

    def targets(
        weights: Weights, constants: Callable[[Tensor], Tensor] | None = None
    ) -> list[tuple[ComparedLoss, Tensor]]:
        modules, found = ModuleStack(session.modules), list[tuple[ComparedLoss, Tensor]]()

        def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            result = differences.followed(function, args, kwargs)
            if (call := _differentiable(function, args, kwargs, modules)) is not None:
                found.append((call, call.target.detach().clone()))
                differences.begin(call, result)
            return result

        session.run(Intervention(ops=collect, model=_both(modules, weights), constants=constants), upto="forward")
        return found

    first = targets(nullcontext)
    if RESIDUALS.isdisjoint(call.name for call, _ in first):
        return set()
    again = targets(partial(other_weights, session), other_outputs(session.recorded_step))
    made = others_among([target for _, target in first], [target for _, target in again])
    return {n for n, (call, _) in enumerate(first) if not differences.is_distance(call)} | {
        n for n in made if first[n][0].name in RESIDUALS
    }


def _both(modules: ModuleStack, weights: Weights) -> Weights:
    """A context in which modules are followed, and weights are others."""

    @contextmanager
    def both() -> Iterator[None]:
        with weights(), modules.following():
            yield

    return both
