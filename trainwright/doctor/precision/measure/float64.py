"""Runs a step again in float64 and compares its gradients, and where they are far away every function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.precision.facts import Float64Facts, HighFacts, OpFacts
from trainwright.recorder.plain_tensors import is_plain
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import InputHandler, function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MOST_ELEMENTS = 1 << 26
"""Weights of a model that is run in float64."""
MICRO_BATCHES = 2
"""Of a step that are run; the whole program where it has no more backward passes than that."""
LARGE = 0.02
"""Of the gradient: an error below it costs nothing that a smaller batch would not."""
KEPT_BYTES = 256 * 2**20
"""Of results that are kept to be compared with those in float64."""
RngStates: TypeAlias = tuple[Tensor, Tensor | None]
"""Of the CPU's default generator and of the GPU's."""
Grads = Mapping[str, Tensor | None]


@experiment(Float64Facts.experiment, when="requested", memory=7.0, by_samples=True, steps=10.0)
def in_float64(session: ReplaySession) -> Facts:
    """Raises NotReplayable where random numbers are drawn in eval mode too, or a part of the model refuses float64."""
    if sum(p.numel() for p in session.parameters.values()) > MOST_ELEMENTS:
        raise NotReplayable("the model is too large to be run in float64")
    mode: Literal["eval"] | None = "eval" if _draws(session, None) else None
    if mode == "eval" and _draws(session, mode):
        raise NotReplayable("the step draws random numbers, and those of float64 are others")
    dtype = _coarsest(session)
    functions = _Functions(session)
    following, micro = functions.modules.following, _first(session)
    ours = _run(session, Intervention(mode=mode, micro=micro, ops=functions.keep, model=following))
    exact = _run(session, Intervention(mode=mode, micro=micro, dtype="fp64"))
    moved = _run(session, Intervention(mode=mode, micro=micro, inputs=_nudged(session, dtype)))
    error, noise = _distance(ours.grads, exact.grads), _distance(moved.grads, ours.grads)
    if error > LARGE:
        _run(session, Intervention(mode=mode, micro=micro, dtype="fp64", ops=functions.compare, model=following))
    facts = Float64Facts(
        dtype=str(dtype).removeprefix("torch."),
        mode=mode or "train",
        loss=ours.loss,
        loss_in_float64=exact.loss,
        error=error,
        noise=noise,
        worst=functions.worst,
        high=functions.high,
    )
    values: Facts = strict(vars(facts))
    return values


def _first(session: ReplaySession) -> range | None:
    """The first micro-batches, where there are more than are compared; several updates have gradients of their own."""
    recorded = session.recorded_step
    return range(MICRO_BATCHES) if len(recorded.losses) > MICRO_BATCHES and len(recorded.updates) < 2 else None


def _run(session: ReplaySession, intervention: Intervention) -> ReplayResult:
    """The step without the gradients that earlier ones have left."""
    step = session.recorded_step
    step = replace(step, values={key: value for key, value in step.values.items() if key != "carried"})
    with session.live():
        result = session.replayer.run(step, intervention, upto="backward")
    if result.error is not None:
        raise result.error
    return result


def _draws(session: ReplaySession, mode: Literal["eval"] | None) -> bool:
    """Whether a forward pass draws random numbers, or what the loop makes of one: between two calls too."""
    calls = session.recorded_step.calls
    if not calls:
        raise NotReplayable("no forward call of the model was recorded")
    draws = _Draws(calls[0].rng[1] is not None)
    with session.live():
        session.replayer.run(session.recorded_step, Intervention(mode=mode, ops=draws.call), upto="forward")
        return draws.are_there or draws.differ(draws.state(), calls[-1].rng)


class _Draws:
    """Whether a function of a replay has drawn random numbers."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.are_there = False

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if self.are_there:
            return function(*args, **kwargs)
        before = self.state()
        result = function(*args, **kwargs)
        self.are_there |= self.differ(before, self.state())
        return result

    def state(self) -> RngStates:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if self._on_gpu else None

    def differ(self, one: RngStates, other: RngStates) -> bool:
        return any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(one, other))


def _coarsest(session: ReplaySession) -> torch.dtype:
    """The dtype with the fewest digits that the step computes with."""
    kinds = {p.dtype for p in session.parameters.values() if p.is_floating_point()}
    kinds |= {call.autocast[1] for call in session.recorded_step.calls if call.autocast[0]}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def _nudged(session: ReplaySession, dtype: torch.dtype) -> InputHandler:
    """Moves every weight by half of its last digit, up or down."""
    generator = torch.Generator().manual_seed(session.step)
    eps = torch.finfo(dtype).eps

    def nudge(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        for p in session.parameters.values() if number == 0 else ():
            if p.is_floating_point():
                signs = (
                    torch.randint(0, 2, p.shape, generator=generator, device="cpu").to(p.device, torch.float64) * 2 - 1
                )
                p.data.mul_((1 + eps * signs).to(p.dtype))
        return args, kwargs

    return nudge


def _distance(one: Grads, other: Grads) -> float:
    """The relative distance of all gradients taken together. Raises NotReplayable where one is not finite."""
    error = size = 0.0
    for name, true in other.items():
        grad = one.get(name)
        if true is not None and grad is not None:
            exact, found = true.to_dense().double(), grad.to_dense().double()
            error += float((found - exact).square().sum())
            size += float(exact.square().sum())
    if not math.isfinite(error + size):
        raise NotReplayable("a gradient of the step is not finite")
    return math.sqrt(error / size) if size > 0 else 0.0


class _Functions:
    """The results of the functions of a step, and how far those in float64 are from them."""

    def __init__(self, session: ReplaySession) -> None:
        self.modules = ModuleStack(session.modules)
        self.worst: OpFacts | None = None
        self.high: HighFacts | None = None
        self._kept: list[tuple[str, Tensor | None]] = []
        self._num_bytes = self._index = 0
        self._errors: dict[int, float] = {}
        self._alive: list[Tensor] = []

    def keep(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        is_number = isinstance(result, Tensor) and result.is_floating_point() and is_plain(result)
        is_number = is_number and self._num_bytes < KEPT_BYTES
        self._kept.append((function_name(function), result.detach().clone() if is_number else None))
        if is_number and isinstance(result, Tensor):
            self._num_bytes += result.nbytes
            self._note_high(function_name(function), result)
        return result

    def _note_high(self, name: str, result: Tensor) -> None:
        """Only the highest value: the lowest ones are those of masks."""
        if result.dtype != torch.float16 or not result.numel():
            return
        value, most = float(result.detach().max()), torch.finfo(result.dtype).max
        if math.isfinite(value) and (self.high is None or value > self.high.value):
            self.high = HighFacts(name, self.modules.innermost, "float16", value, most)

    def compare(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        name = function_name(function)
        kept_name, kept = self._kept[self._index] if self._index < len(self._kept) else ("", None)
        self._index += 1
        if kept_name == name and kept is not None and isinstance(result, Tensor) and result.shape == kept.shape:
            self._note(name, tensors_of([args, kwargs], 3), result, kept)
        return result

    def _note(self, name: str, inputs: list[Tensor], result: Tensor, kept: Tensor) -> None:
        exact = result.detach().double()
        size = float(exact.norm())
        error = float((kept.double() - exact).norm()) / size if size > 0 else 0.0
        before = max((self._errors.get(id(t), 0.0) for t in inputs), default=0.0)
        self._errors[id(result)] = error
        self._alive.append(result)
        before = max(before, torch.finfo(kept.dtype).eps)
        if math.isfinite(error) and (self.worst is None or error / before > self.worst.error_out / self.worst.error_in):
            dtype = str(kept.dtype).removeprefix("torch.")
            self.worst = OpFacts(name, self.modules.innermost, dtype, before, error)
