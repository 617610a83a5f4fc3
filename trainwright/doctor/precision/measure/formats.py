"""What a step loses by 16-bit dtypes: it is compared with the same step in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import is_plain
from trainwright.recorder.program import mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import error_text, function_name
from trainwright.replay.mechanism import HALF_DTYPES
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

CASTS = frozenset({"half", "bfloat16", "to", "type", "type_as"})
KEPT_BYTES = 256 * 2**20
COMPARED, SUMMED = 4, 64
"""The most micro-batches of a step that are compared with float32, and that are summed."""
NO_MASTER_WEIGHTS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "step",
        "mu",
        "eta",
        "ax",
    }
)
"""Keys of optimizer state that is neither a float32 copy of the weights nor their rounding error."""


@experiment("formats", when="first", steps=0.5)
def formats(session: ReplaySession) -> Facts:
    """The 16-bit dtypes of the parameters, and of the results of the functions in models and loss."""
    dtypes: set[torch.dtype] = set()

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        dtypes.update(t.dtype for t in _results(result))
        return result

    session.run(Intervention(ops=collect), upto="forward")
    weights = {p.dtype for o in session.optimizers for g in o.param_groups for p in g["params"]}
    return {
        "values": sorted(_name(dtype) for dtype in dtypes.intersection(HALF_DTYPES)),
        "weights": sorted(_name(dtype) for dtype in weights.intersection(HALF_DTYPES)),
        "scaled": any(getattr(each, "scale", 1.0) != 1.0 for each in session.recorded_step.program),
        "backwards": len(session.recorded_step.losses),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_half_parameters(session: ReplaySession) -> bool:
    """Whether a parameter has a 16-bit dtype."""
    return any(p.dtype in HALF_DTYPES for p in session.replayer.subject.parameters)


def _results(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, list | tuple) else []


def _first_micro_batches(session: ReplaySession, most: int) -> range | None:
    """The first ``most`` micro-batches; None if there are no more than that."""
    return range(most) if len(session.recorded_step.losses) > most else None


def in_fp32(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Calls a torch function in float32, whatever dtypes it was given."""
    device = next((t.device.type for t in tensors_of(args)), "cpu")
    with torch.autocast(device, enabled=False):
        if function_name(function) in CASTS:
            result = function(*args, **kwargs)
            is_cast = isinstance(result, Tensor) and result.dtype in HALF_DTYPES and args[0].is_floating_point()
            return args[0].float() if is_cast else result
        if "dtype" in kwargs:
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in kwargs.items()}
        return function(*mapped(args, _widen), **mapped(kwargs, _widen))


def _widen(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


@experiment("fp32_shadow", when="requested", memory=3.0, steps=7.0)
def fp32_shadow(session: ReplaySession) -> Facts:
    """Compares the gradients of the step with those in float32, and with those with only the loss in float32."""
    operations, micro = _Operations(session), _first_micro_batches(session, COMPARED)
    following = operations.modules.following
    low = session.run(Intervention(ops=operations.keep, model=following, micro=micro))
    exact = session.run(Intervention(dtype="fp32", ops=operations.compare, model=following, micro=micro))
    modules = ModuleStack(session.modules)

    def loss_in_fp32(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        return function(*args, **kwargs) if modules.innermost is not None else in_fp32(function, args, kwargs)

    loss_only = session.run(Intervention(ops=loss_in_fp32, model=modules.following, micro=micro))
    return {
        "error": next((text for each in (low, exact, loss_only) if (text := error_text(each.error)) is not None), None),
        "loss": low.loss,
        "loss_fp32": exact.loss,
        "loss_in_fp32": loss_only.loss,
        **_lost(low, exact),
        "gradient_error": _distance(low, exact),
        "by_loss": _distance(low, loss_only),
        "scaled": _scaled(session, exact),
        "loss_ops": sorted(set(operations.outside)),
        "emptied": operations.emptied[:8],
    }


def _scaled(session: ReplaySession, exact: ReplayResult) -> Facts:
    """The same with the largest of three loss scales for which the gradients are finite; empty if there is none."""
    for power in (16, 12, 8):
        scale = 2.0**power
        scaled = session.run(Intervention(loss_scale=scale, micro=_first_micro_batches(session, COMPARED)))
        for name, grad in scaled.grads.items():
            scaled.grads[name] = None if grad is None else grad.float() / scale
        if (error := _distance(scaled, exact)) is not None:
            return {"scale": scale, "gradient_error": error, **_lost(scaled, exact)}
    return {}


def _lost(low: ReplayResult, exact: ReplayResult) -> dict[str, float]:
    """The share of the gradient elements that are 0 in 16 bits, of those that are not 0 in float32."""
    lost = total = 0
    for name, true in exact.grads.items():
        grad = low.grads.get(name)
        if true is None or grad is None or true.is_sparse or grad.is_sparse:
            continue
        lost, total = lost + int(((true != 0) & (grad == 0)).sum()), total + int((true != 0).sum())
    return {"lost": lost / max(1, total)}


def _distance(one: ReplayResult, other: ReplayResult) -> float | None:
    """The relative error of one gradient against another; None where one of them is not finite or there is none."""
    error = norm = 0.0  # squared
    for name, true in other.grads.items():
        grad = one.grads.get(name)
        if true is None or grad is None or true.is_sparse:
            continue
        error += float((grad.double() - true.double()).square().sum())
        norm += float(true.double().square().sum())
    return (error / norm) ** 0.5 if norm > 0 and math.isfinite(error) and math.isfinite(norm) else None


class _Operations:
    """Keeps the results of 16-bit operations, and compares them with the results in float32."""

    def __init__(self, session: ReplaySession) -> None:
        self.modules = ModuleStack(session.modules)
        self._kept: list[tuple[str, Tensor | None]] = []
        self._num_bytes = self._index = 0
        self._aligned = True
        self.emptied: list[Facts] = []
        self.outside: list[str] = []

    def keep(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        name = function_name(function)
        is_low = isinstance(result, Tensor) and result.dtype in HALF_DTYPES and is_plain(result)
        is_low = is_low and self._num_bytes < KEPT_BYTES
        self._kept.append((name, result.detach().clone() if is_low else None))
        self._num_bytes += result.nbytes if is_low else 0
        if (
            self.modules.innermost is None
            and isinstance(result, Tensor)
            and any(t.dtype in HALF_DTYPES for t in tensors_of(args))
        ):
            self.outside.append(name)
        return result

    def compare(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = in_fp32(function, args, kwargs)
        name = function_name(function)
        kept_name, kept = self._kept[self._index] if self._index < len(self._kept) else ("", None)
        self._index += 1
        self._aligned = self._aligned and kept_name == name
        if self._aligned and kept is not None and isinstance(result, Tensor) and _is_emptied(kept, result):
            facts: Facts = {"op": name, "module": self.modules.innermost, "dtype": _name(kept.dtype)}
            self.emptied.append({**facts, "largest": float(result.detach().abs().max())})
        return result


def _is_emptied(kept: Tensor, true: Tensor) -> bool:
    """Whether all elements are 0 although not all should be."""
    return kept.shape == true.shape and bool((true != 0).any()) and not bool((kept != 0).any())


@experiment("updates_kept", when="requested")
def updates_kept(session: ReplaySession) -> Facts:
    """The share of 16-bit weights with a gradient that an update leaves unchanged, and whether something else keeps
    what is lost: a float32 copy, the rounding error in the optimizer state, or stochastic rounding.
    """
    if "vetoed" in session.recorded_step.values:  # there was no update
        return {"still": 0.0, "elements": 0, "kept_elsewhere": False}
    generators: list[Tensor] = []

    def before(step: int, group: Facts) -> Facts:
        generators[:] = _generators(session)
        return {}

    with session.live():
        result = session.replayer.run(session.recorded_step, Intervention(group=before), upto="step")
        is_stochastic = any(not torch.equal(a, b) for a, b in zip(generators, _generators(session)))
    owned = {id(p) for o in session.optimizers for g in o.param_groups for p in g["params"]}
    moved = unchanged = 0
    for name, p in session.parameters.items():
        grad = result.grads.get(name)
        if grad is not None and not grad.is_sparse and p.dtype in HALF_DTYPES and id(p) in owned:
            same = (result.after[name] == result.before[name])[grad != 0]
            unchanged, moved = unchanged + int(same.sum()), moved + int((~same).sum())
    elements = unchanged + moved
    elsewhere = is_stochastic or _other_state(session)
    return {"still": unchanged / max(1, elements), "elements": elements, "kept_elsewhere": elsewhere}


def _generators(session: ReplaySession) -> list[Tensor]:
    device = next((p.device for p in session.replayer.subject.parameters), torch.device("cpu"))
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _other_state(session: ReplaySession) -> bool:
    """Whether the optimizers keep state in the shape of their parameters that may be master weights; ours keep none."""
    return any(
        isinstance(value, Tensor) and value.shape == p.shape and p.dim() > 0 and key not in NO_MASTER_WEIGHTS
        for o in session.optimizers
        if not type(o).__module__.startswith("trainwright.")
        for p, own in o.state.items()
        for key, value in own.items()
    )


@experiment("summed_in_16_bit", when="requested")
def summed_in_16_bit(session: ReplaySession) -> Facts:
    """Compares the gradients of the micro-batches summed in 16 bits with their sum in float32, rounded once."""
    sums: dict[str, Tensor] = {}
    named = session.parameters

    @contextmanager
    def summing() -> Iterator[None]:
        handles = [
            p.register_post_accumulate_grad_hook(_adder(name, sums))  # type: ignore[no-untyped-call]
            for name, p in named.items()
            if p.requires_grad and p.dtype in HALF_DTYPES
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    micro = _first_micro_batches(session, SUMMED)
    session.run(Intervention(model=summing, micro=micro))
    error = rounding = norm = 0.0  # squared
    for name, grad in session.run(Intervention(micro=micro)).grads.items():
        true = sums.get(name)
        if true is not None and grad is not None:
            error += float((grad.double() - true.double()).square().sum())
            rounding += float((true.to(grad.dtype).double() - true.double()).square().sum())
            norm += float(true.double().square().sum())
    facts: Facts = {"micro_batches": min(SUMMED, len(session.recorded_step.losses)), "off": None, "rounded_once": None}
    return facts | {"off": (error / norm) ** 0.5, "rounded_once": (rounding / norm) ** 0.5} if norm else facts


def _adder(name: str, sums: dict[str, Tensor]) -> Callable[[Tensor], None]:
    """A hook that adds the gradient of a parameter to its sum in float32, and drops it."""

    def hook(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and not grad.is_sparse:
            sums[name] = sums[name] + grad.float() if name in sums else grad.float()

    return hook


@experiment("stale_weights", when="requested")
def stale_weights(session: ReplaySession) -> Facts:
    """Whether the recorded loss is that of older weights: those before an earlier step."""
    recorded = [float(each) for each in session.recorded_step.losses]
    now = [float(each) for each in session.run(upto="forward").losses]
    facts: Facts = {"then": recorded, "now": now, "weights_of_step": None}
    if recorded == now:
        return facts
    for snapshot in session.earlier:
        with session.replayer.stage(snapshot):
            old = session.replayer.run(session.recorded_step, upto="forward")
        if [float(each) for each in old.losses] == recorded:
            return facts | {"weights_of_step": snapshot.step}
    return facts
