"""Measures a game of several models: what each is pushed to say of what another makes, and how that reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import torch
from torch import Tensor, nn

from trainwright.doctor.loss.facts import PlayersFacts, Rivalry
from trainwright.doctor.loss.measure.scores import SAMPLES
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Constant,
    Multiply,
    Operation,
    OptimizerStep,
    Slot,
    constants_of,
    mapped,
    tensors_of,
)
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

SAME = frozenset({"detach", "clone", "contiguous", "requires_grad", "requires_grad_"})
"""Functions that leave values as they are."""
ROUNDING = 1e-2
"""Of the size of what is passed on: a cast to bfloat16 and back leaves 0.004."""


@dataclass(frozen=True)
class BackwardPass:
    """A backward pass: the slot of its loss, and the optimizers that use its gradients alone."""

    slot: int
    players: frozenset[int]


@dataclass(frozen=True)
class Transfer:
    """What is done to the output in ``slot`` of a call before it is given to another, in order."""

    call: int
    slot: int
    operations: tuple[Operation, ...]


class GameProgram:
    """Reads the program of a step in which several models learn in turn."""

    def __init__(self, session: ReplaySession) -> None:
        self._program = session.recorded_step.program
        self.calls = session.recorded_step.calls
        self._made_by: dict[int, int | Operation] = {}
        number = 0
        for each in self._program:
            if isinstance(each, Call):
                self._made_by.update(dict.fromkeys(each.outputs, number))
                number += 1
            elif isinstance(each, Operation):
                self._made_by.update(dict.fromkeys(each.outputs, each))
        held = [{id(p) for group in each.param_groups for p in group["params"]} for each in session.optimizers]
        self.owners = [
            frozenset(n for n, of in enumerate(held) if of.intersection(map(id, each.parameters())))
            for each in session.roots
        ]

    def passes(self) -> list[BackwardPass | None]:
        """Of each backward pass; None where its loss, or who uses its gradients, is not known."""
        found: list[BackwardPass | None] = []
        for at, each in enumerate(self._program):
            if isinstance(each, Backward):
                players = self._steps_after(at)
                found.append(None if each.slot is None or not players else BackwardPass(each.slot, players))
        return found

    @property
    def takes_turns(self) -> bool:
        """Whether there are passes whose gradients are used by different optimizers."""
        known = [each.players for each in self.passes() if each is not None]
        return any(not one & two for one, two in combinations(known, 2))

    def _steps_after(self, at: int) -> frozenset[int]:
        """The optimizers of the next updates, which follow each other."""
        players: set[int] = set()
        for each in self._program[at:]:
            if isinstance(each, OptimizerStep):
                players.add(each.optimizer)
            elif players and not isinstance(each, Multiply | ClipGradients):
                break
        return frozenset(players)

    def is_own(self, of: BackwardPass) -> bool:
        """Whether all models whose outputs the loss is computed of are trained by it."""
        owners = [self.owners[self.calls[each].root] for each in self.nearest(of.slot)]
        return any(owners) and all(each <= of.players for each in owners)

    def nearest(self, slot: int) -> list[int]:
        """The calls, by number, from which a value is made by functions other than derivatives."""
        found, waiting, seen = set[int](), [slot], set[int]()
        while waiting:
            slot = waiting.pop()
            made = self._made_by.get(slot)
            if slot in seen or made is None:
                continue
            seen.add(slot)
            if isinstance(made, int):
                found.add(made)
            elif made.name != "grad":
                waiting += _slots((made.args, made.kwargs))
        return sorted(found)

    def transfer_to(self, call: int) -> Transfer | None:
        """From which other call the input comes, and what is done to it; None where it is made of several things, or
        of random numbers.
        """
        slots = _slots((self.calls[call].args, self.calls[call].kwargs))
        done: list[Operation] = []
        while len(slots) == 1:
            made = self._made_by.get(slots[0])
            if made is None or isinstance(made, int):
                return None if made is None else Transfer(made, slots[0], tuple(done[::-1]))
            is_plain = made.name not in SAMPLES and all(c.tensor.numel() == 1 for c in constants_of(made.args))
            if not is_plain:
                return None
            done += [] if made.name in SAME else [made]
            slots = _slots((made.args, made.kwargs))
        return None

    def is_of_data(self, call: int) -> bool:
        """Whether it is given nothing that a model has made."""
        return not _slots((self.calls[call].args, self.calls[call].kwargs))


def _slots(value: object) -> list[int]:
    found: dict[int, None] = {}
    mapped(value, lambda leaf: found.setdefault(leaf.number) if isinstance(leaf, Slot) else None)
    return list(found)


@dataclass
class _Heard:
    """The outputs of calls, and the last gradients at them, by number."""

    outputs: dict[int, Tensor]
    pushes: dict[int, float]
    number: int = 0

    def begin(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.number = number
        return args, kwargs

    def listen(self, module: nn.Module, args: object, output: object) -> None:
        tensors = tensors_of(output)
        if tensors and tensors[0].is_floating_point():
            self.outputs[self.number] = tensors[0].detach()
            if tensors[0].requires_grad:
                tensors[0].register_hook(partial(self._push, self.number))  # type: ignore[no-untyped-call]

    def _push(self, number: int, gradient: Tensor) -> None:
        """By 1 upwards where every element of the output is pushed up, by -1 where all are pushed down."""
        size = float(gradient.detach().abs().sum())
        self.pushes[number] = -float(gradient.detach().sum()) / size if size else 0.0


@experiment(PlayersFacts.experiment, when="first", steps=4.0)
def players(session: ReplaySession) -> Facts:
    """For each model that judges what another makes: where it is pushed by both, and what reaches it."""
    game = GameProgram(session)
    known = [each for each in game.passes() if each is not None]
    pairs = [(a, b) for a, b in product(known, known) if not a.players & b.players]
    if not pairs:
        raise NotReplayable("no two optimizers that take turns")
    heard = _heard(session)
    found = [each for a, b in pairs for each in _rivalries(game, a, b, heard)]
    return dict(strict(vars(PlayersFacts(tuple(found)))))


def _heard(session: ReplaySession) -> _Heard:
    heard = _Heard({}, {})

    @contextmanager
    def listening() -> Iterator[None]:
        handles = [root.register_forward_hook(heard.listen) for root in session.roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    result = session.run(Intervention(model=listening, inputs=heard.begin))
    if result.error is not None:
        raise result.error
    return heard


def _rivalries(game: GameProgram, judging: BackwardPass, making: BackwardPass, heard: _Heard) -> Iterator[Rivalry]:
    """Where the loss of one pass is of a model's outputs for data, and for what a model of the other pass makes."""
    own, others = game.nearest(judging.slot), game.nearest(making.slot)
    for judge in sorted({game.calls[each].root for each in own}):
        if not game.owners[judge] or not game.owners[judge] <= judging.players:
            continue
        made, asked = (list(_transfers(game, calls, judge, making)) for calls in (own, others))
        data = [each for each in own if game.calls[each].root == judge and game.is_of_data(each)]
        if not made or not asked:
            continue
        (call, way), (again, other) = made[0], asked[0]
        if game.calls[way.call].root == game.calls[other.call].root:
            yield Rivalry(
                judge=judge,
                maker=game.calls[way.call].root,
                of_data=_mean([heard.pushes.get(each, 0.0) for each in data]),
                of_made=heard.pushes.get(call, 0.0),
                by_maker=heard.pushes.get(again, 0.0),
                apart=_apart(way, other, heard.outputs.get(other.call)),
                done=tuple(each.name.strip("_") for each in way.operations),
                done_by_maker=tuple(each.name.strip("_") for each in other.operations),
            )


def _transfers(
    game: GameProgram, calls: Sequence[int], judge: int, making: BackwardPass
) -> Iterator[tuple[int, Transfer]]:
    """The calls of the judge that are given what a model of the other player has made."""
    for call in calls:
        way = game.transfer_to(call) if game.calls[call].root == judge else None
        if way is not None and (owners := game.owners[game.calls[way.call].root]) and owners <= making.players:
            yield call, way


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@torch.no_grad()
def _apart(one: Transfer, other: Transfer, output: Tensor | None) -> float:
    """How far what reaches the judge in both passes is apart for the same output, over its size."""
    if output is None:
        return 0.0
    a, b = (_passed(each, output) for each in (one, other))
    if a.shape != b.shape:
        return 1.0
    size = max(float(a.double().abs().max()), float(b.double().abs().max()), 1e-30)
    distance = float((a.double() - b.double()).abs().max()) / size
    return distance if distance > ROUNDING else 0.0


def _passed(way: Transfer, output: Tensor) -> Tensor:
    """The output as it reaches the other model."""

    def value_of(leaf: object) -> object:
        return output if isinstance(leaf, Slot) else leaf.tensor if isinstance(leaf, Constant) else leaf

    for each in way.operations:
        args, kwargs = mapped(each.args, value_of), mapped(each.kwargs, value_of)
        made = each.function(*args, **kwargs)
        assert isinstance(made, Tensor)
        output = made
    return output
