"""What 16-bit numbers lose in a step: beside it runs its shadow in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import mapped, tensors_of
from trainwright.replay.experiments import experiment
from trainwright.replay.experiments.modes import Modules
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession

LOW = (torch.float16, torch.bfloat16)
CASTS = frozenset({"half", "bfloat16", "to", "type", "type_as"})
KEPT_BYTES = 256 * 2**20
SHADOWED, SUMMED = 4, 64
"""Micro-batches of a step that are enough to see it in."""
MASTERLESS = frozenset(
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
"""State of optimizers that is neither a copy of the weights nor what their rounding left over."""


@experiment("formats", when="first")
def formats(bench: ReplaySession) -> dict[str, Any]:
    """Which 16-bit formats the weights have, and what the functions of models and loss give."""
    seen: set[torch.dtype] = set()

    def around(function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        seen.update(t.dtype for t in _results(result))
        return result

    bench.run(Intervention(ops=around), upto="forward")
    weights = {p.dtype for o in bench.optimizers for g in o.param_groups for p in g["params"]}
    return {
        "values": sorted(_name(dtype) for dtype in seen.intersection(LOW)),
        "weights": sorted(_name(dtype) for dtype in weights.intersection(LOW)),
        "scaled": any(getattr(each, "scale", 1.0) != 1.0 for each in bench.segment.program),
        "backwards": len(bench.segment.losses),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _results(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, list | tuple) else []


def _some(bench: ReplaySession, most: int) -> range | None:
    """The first micro-batches of a step of many; None for all."""
    return range(most) if len(bench.segment.losses) > most else None


def in_fp32(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a torch function with everything in float32, whatever it was told."""
    device = next((t.device.type for t in tensors_of(args)), "cpu")
    with torch.autocast(device, enabled=False):
        if getattr(function, "__name__", "?") in CASTS:
            result = function(*args, **kwargs)
            is_cast = isinstance(result, Tensor) and result.dtype in LOW and args[0].is_floating_point()
            return args[0].float() if is_cast else result
        given = {k: torch.float32 if v in LOW else v for k, v in kwargs.items()} if "dtype" in kwargs else kwargs
        return function(*mapped(args, _up), **mapped(given, _up))


def _up(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


@experiment("fp32_shadow", when="asked")
def fp32_shadow(bench: ReplaySession) -> dict[str, Any]:
    """The gradients of the step, of the same step in float32, and of one with only its loss in float32."""
    operations, micro = _Operations(bench), _some(bench, SHADOWED)
    following = operations.modules.following
    low = bench.run(Intervention(ops=operations.keep, model=following, micro=micro))
    exact = bench.run(Intervention(dtype="fp32", ops=operations.compare, model=following, micro=micro))
    modules = Modules(bench)

    def only_outside(function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs) if modules.now is not None else in_fp32(function, args, kwargs)

    loss_only = bench.run(Intervention(ops=only_outside, model=modules.following, micro=micro))
    failed = next((p.error for p in (low, exact, loss_only) if p.error is not None), None)
    return {
        "error": None if failed is None else f"{type(failed).__name__}: {failed}",
        "loss": low.loss,
        "loss_fp32": exact.loss,
        "loss_in_fp32": loss_only.loss,
        **_lost(low, exact),
        "gradient_error": _distance(low, exact),
        "by_loss": _distance(low, loss_only),
        "scaled": _scaled(bench, exact),
        "loss_ops": sorted(set(operations.outside)),
        "emptied": operations.emptied[:8],
    }


def _scaled(bench: ReplaySession, exact: ReplayResult) -> dict[str, Any]:
    """The same with the loss times the largest of a few powers of two for which the gradients are still finite."""
    for power in (16, 12, 8):
        scale = 2.0**power
        scaled = bench.run(Intervention(loss_scale=scale, micro=_some(bench, SHADOWED)))
        for name, grad in scaled.grads.items():
            scaled.grads[name] = None if grad is None else grad.float() / scale
        if (error := _distance(scaled, exact)) is not None:
            return {"scale": scale, "gradient_error": error, **_lost(scaled, exact)}
    return {}


def _lost(low: ReplayResult, exact: ReplayResult) -> dict[str, float]:
    """Of the gradient elements that are not 0 in float32: the share that is exactly 0; and of their norm."""
    lost = total = 0
    weight = whole = 0.0
    for name, true in exact.grads.items():
        seen = low.grads.get(name)
        if true is None or seen is None or true.is_sparse or seen.is_sparse:
            continue
        gone = (true != 0) & (seen == 0)
        lost, total = lost + int(gone.sum()), total + int((true != 0).sum())
        weight, whole = weight + float(true[gone].double().square().sum()), whole + float(true.double().square().sum())
    return {"lost": lost / max(1, total), "lost_norm": (weight / whole) ** 0.5 if whole else 0.0}


def _distance(one: ReplayResult, other: ReplayResult) -> float | None:
    """Between two gradients, as a share of the second; None where one is not finite or there is none."""
    apart = whole = 0.0
    for name, true in other.grads.items():
        seen = one.grads.get(name)
        if true is None or seen is None or true.is_sparse:
            continue
        apart += float((seen.double() - true.double()).square().sum())
        whole += float(true.double().square().sum())
    finite = whole > 0 and apart == apart and apart != float("inf") and whole != float("inf")
    return (apart / whole) ** 0.5 if finite else None


class _Operations:
    """Keeps what 16-bit operations gave, and compares it with what they give in float32."""

    def __init__(self, bench: ReplaySession) -> None:
        self.modules = Modules(bench)
        self._kept: list[tuple[str, Tensor | None]] = []
        self._num_bytes = self._index = 0
        self._aligned = True
        self.emptied: list[dict[str, Any]] = []
        self.outside: list[str] = []

    def keep(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "?")
        is_low = isinstance(result, Tensor) and result.dtype in LOW and self._num_bytes < KEPT_BYTES
        self._kept.append((name, result.detach().clone() if is_low else None))
        self._num_bytes += result.nbytes if is_low else 0
        if self.modules.now is None and isinstance(result, Tensor) and any(t.dtype in LOW for t in tensors_of(args)):
            self.outside.append(name)
        return result

    def compare(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = in_fp32(function, args, kwargs)
        name = getattr(function, "__name__", "?")
        then, kept = self._kept[self._index] if self._index < len(self._kept) else ("", None)
        self._index += 1
        self._aligned = self._aligned and then == name
        if self._aligned and kept is not None and isinstance(result, Tensor) and _is_emptied(kept, result):
            told = {"op": name, "module": self.modules.now, "dtype": _name(kept.dtype)}
            self.emptied.append({**told, "largest": float(result.detach().abs().max())})
        return result


def _is_emptied(kept: Tensor, true: Tensor) -> bool:
    """Everything came out as 0 and nothing should have."""
    return kept.shape == true.shape and bool((true != 0).any()) and not bool((kept != 0).any())


@experiment("updates_kept", when="asked")
def updates_kept(bench: ReplaySession) -> dict[str, Any]:
    """Of 16-bit weights with a gradient: the share that an update leaves as they were, and whether something else
    keeps what was lost: a copy in float32, the rest of the rounding, chance."""
    if "vetoed" in bench.segment.values:  # there was no update
        return {"still": 0.0, "elements": 0, "kept_elsewhere": False}
    generators: list[Tensor] = []

    def before(step: int, group: dict[str, Any]) -> dict[str, Any]:
        generators[:] = _generators(bench)
        return {}

    with bench.live():
        played = bench.player.play(bench.segment, Intervention(group=before), upto="step")
        drawn = any(not torch.equal(a, b) for a, b in zip(generators, _generators(bench)))
    owned = {id(p) for o in bench.optimizers for g in o.param_groups for p in g["params"]}
    moved = still = 0
    for name, p in zip(bench.player.names, bench.player.subject.parameters):
        grad = played.grads.get(name)
        if grad is not None and not grad.is_sparse and p.dtype in LOW and id(p) in owned:
            same = (played.after[name] == played.before[name])[grad != 0]
            still, moved = still + int(same.sum()), moved + int((~same).sum())
    elsewhere = drawn or _other_state(bench)
    return {"still": still / max(1, still + moved), "elements": still + moved, "kept_elsewhere": elsewhere}


def _generators(bench: ReplaySession) -> list[Tensor]:
    device = next((p.device for p in bench.player.subject.parameters), torch.device("cpu"))
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _other_state(bench: ReplaySession) -> bool:
    return any(
        isinstance(value, Tensor) and value.shape == p.shape and p.dim() > 0 and key not in MASTERLESS
        for o in bench.optimizers
        for p, own in o.state.items()
        for key, value in own.items()
    )


@experiment("summed_in_16_bit", when="asked")
def summed_in_16_bit(bench: ReplaySession) -> dict[str, Any]:
    """The gradients of the micro-batches as they add up in 16 bit, against their sum in float32 rounded once."""
    sums: dict[str, Tensor] = {}
    named = dict(zip(bench.player.names, bench.player.subject.parameters))

    @contextmanager
    def summing() -> Iterator[None]:
        handles = [
            p.register_post_accumulate_grad_hook(_adds(name, sums))  # type: ignore[no-untyped-call]
            for name, p in named.items()
            if p.requires_grad and p.dtype in LOW
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    micro = _some(bench, SUMMED)
    bench.run(Intervention(model=summing, micro=micro))
    apart = once = whole = 0.0
    for name, seen in bench.run(Intervention(micro=micro)).grads.items():
        true = sums.get(name)
        if true is not None and seen is not None:
            apart += float((seen.double() - true.double()).square().sum())
            once += float((true.to(seen.dtype).double() - true.double()).square().sum())
            whole += float(true.double().square().sum())
    told = {"micro_batches": min(SUMMED, len(bench.segment.losses)), "off": None, "rounded_once": None}
    return told | {"off": (apart / whole) ** 0.5, "rounded_once": (once / whole) ** 0.5} if whole else told


def _adds(name: str, sums: dict[str, Tensor]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and not grad.is_sparse:
            sums[name] = sums[name] + grad.float() if name in sums else grad.float()

    return hook


@experiment("stale_weights", when="asked")
def stale_weights(bench: ReplaySession) -> dict[str, Any]:
    """Whether the live loss is that of older weights: of the state before an earlier step, and not of this one's."""
    then = [float(each) for each in bench.segment.losses]
    now = [float(each) for each in bench.run(upto="forward").losses]
    told: dict[str, Any] = {"then": then, "now": now, "weights_of_step": None}
    if then == now:
        return told
    for snapshot in bench.earlier:
        with bench.player.stage(snapshot):
            old = bench.player.play(bench.segment, upto="forward")
        if [float(each) for each in old.losses] == then:
            return told | {"weights_of_step": snapshot.step}
    return told
