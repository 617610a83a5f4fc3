"""Measures how what was drawn is weighed by a return and by what was expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.doctor.loss.facts import BaselineFacts
from trainwright.recorder.program import Constant, Operation, RecordedStep, Slot, mapped
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

CHOICE = "gather"
"""The function that takes the logarithm of the probability of what was drawn."""
SHARE = 0.1
"""Of the deviation of the targets, by which they and predictions are changed."""


@dataclass(frozen=True)
class Expected:
    """An output of a call, by its place, and the constant that it meets: what is expected, and what came."""

    call: int
    place: int
    target: Tensor


@experiment(BaselineFacts.experiment, when="first", steps=4.0)
def baselines(session: ReplaySession) -> Facts:
    """How the weight of what was drawn changes with targets and predictions that are changed at random."""
    recorded = session.recorded_step
    chosen = [each for each in recorded.program if isinstance(each, Operation) and each.name == CHOICE]
    pair = _expected(recorded) if chosen else None
    if pair is None:
        raise NotReplayable("nothing that was drawn is weighed by what was expected")
    draws = torch.Generator().manual_seed(0)
    signs = (2 * torch.randint(2, pair.target.shape, generator=draws, device="cpu") - 1).to(pair.target)
    step = SHARE * float(pair.target.double().std()) * signs
    before, by_target, by_prediction = (
        _weights(session, pair, *of) for of in ((0 * step, 0 * step), (step, 0 * step), (0 * step, step))
    )
    changes = [_along(after - before, signs) for after in (by_target, by_prediction)]
    return dict(strict(vars(BaselineFacts(*changes))))


def _expected(recorded: RecordedStep) -> Expected | None:
    """The output and the constant of its shape that meet in most functions, such as a loss and an advantage."""
    places = {slot: (n, place) for n, call in enumerate(recorded.calls) for place, slot in enumerate(call.outputs)}
    met: Counter[int] = Counter()
    found: dict[int, Expected] = {}
    for each in recorded.program:
        pair = each.args[:2] if isinstance(each, Operation) else ()
        slots = [leaf.number for leaf in pair if isinstance(leaf, Slot) and leaf.number in places]
        constants = [leaf.tensor for leaf in pair if isinstance(leaf, Constant) and leaf.tensor.is_floating_point()]
        if len(slots) == len(constants) == 1 and constants[0].numel() > 1 and constants[0].std() > 0:
            met[slots[0]] += 1
            found.setdefault(slots[0], Expected(*places[slots[0]], constants[0]))
    return found[met.most_common(1)[0][0]] if met else None


def _weights(session: ReplaySession, pair: Expected, of_target: Tensor, of_prediction: Tensor) -> Tensor:
    """The gradient of the loss at the logarithms of what was drawn, flat."""
    found: list[Tensor] = []
    modules, calls = ModuleStack(session.modules), _Calls()

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        is_choice = function_name(function) == CHOICE and modules.innermost is None
        if is_choice and isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda gradient: found.append(gradient.detach().flatten()))  # type: ignore[no-untyped-call]
        return result

    def shifted(tensor: Tensor) -> Tensor:
        return tensor + of_target if tensor is pair.target else tensor

    def change(number: int, place: int, tensor: Tensor) -> Tensor:
        is_it = (number, place) == (pair.call, pair.place) and tensor.shape == of_prediction.shape
        return tensor + of_prediction.to(tensor) if is_it else tensor

    @contextmanager
    def around() -> Iterator[None]:
        handles = [root.register_forward_hook(calls.changing(change)) for root in session.roots]
        try:
            with modules.following():
                yield
        finally:
            for handle in handles:
                handle.remove()

    result = session.run(Intervention(ops=call, constants=shifted, inputs=calls.begin, model=around))
    if result.error is not None:
        raise result.error
    if not found or found[-1].numel() != pair.target.numel():
        raise NotReplayable("not each target belongs to one draw")
    return found[-1]


@dataclass
class _Calls:
    """Counts the calls of the models, and changes what they return."""

    number: int = 0

    def begin(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.number = number
        return args, kwargs

    def changing(self, change: Callable[[int, int, Tensor], Tensor]) -> Callable[[nn.Module, Args, object], object]:
        def hook(module: nn.Module, args: Args, output: object) -> object:
            place = -1

            def changed(leaf: object) -> object:
                nonlocal place
                if not isinstance(leaf, Tensor):
                    return leaf
                place += 1
                return change(self.number, place, leaf)

            return mapped(output, changed)

        return hook


def _along(change: Tensor, signs: Tensor) -> float:
    """1 where every element goes the way of its sign, -1 where all go the other way, 0 where none changes."""
    size = float(change.abs().sum())
    return float((change * signs.flatten().to(change)).sum()) / size if size > 0 else 0.0
