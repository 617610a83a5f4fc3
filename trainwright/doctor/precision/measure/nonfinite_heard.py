"""What was non-finite in a step: inputs, gradients before a clip spread them, running statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainwright.recorder.numbers import Numbers
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import Constant, RecordedStep, mapped
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import TorchFunction
from trainwright.runlog.json_values import Facts
from trainwright.state.names import named_modules, named_parameters

LIMIT = 64
"""Names that are reported."""


@probe
class NonFinite(Probe):
    """Reads tensors only after a norm or a loss was not finite.

    A forward pass in training mode that no backward pass follows moves the running statistics of BatchNorm unseen:
    after such a step these are looked at too, and at every checkup. A step with anything bad is marked "nonfinite".
    """

    name = "nonfinite"
    closes_late = hears_last = True

    def __init__(self, watched: WatchedObjects) -> None:
        subject = watched.subject
        self._parameters = {id(p): p for p in subject.parameters}
        self._names = {id(p): name for name, p in named_parameters(subject.roots)}
        self._paths = {module: path for path, module in named_modules(subject.roots)}
        self._statistics = [(m, n) for m, n in subject.buffers() if n.startswith("running_")]
        self._before_clip: list[str] | None = None
        self._newest = 0
        self._poisoned: set[str] = set()
        self._facts: Facts | None = None

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        if norm is None or not norm.is_cpu:  # a GPU would be waited for
            return
        if self._before_clip is None and not math.isfinite(norm):
            self._before_clip = self._bad_gradients()

    def on_closed(self, step: RecordedStep) -> None:
        self._newest = step.step

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        before_clip, self._before_clip = self._before_clip, None
        vetoed = step.values.get("vetoed") in ("gradients", "update")
        is_bad = before_clip is not None or vetoed or not numbers.are_finite
        if is_bad:
            gradients = self._bad_gradients() if step.step == self._newest else []  # else they are of another step
            self._facts = {
                "step": step.step,
                "inputs": _bad_inputs(step),
                "gradients": (gradients if before_clip is None else before_clip)[:LIMIT],
                "num_gradients": len(gradients if before_clip is None else before_clip),
                "num_after_clip": None if before_clip is None else len(gradients),
                "dtype": self._dtype_of(gradients if before_clip is None else before_clip),
                "of": sum(p.grad is not None for p in self._parameters.values()),
                "weights": self._named(p for p in self._parameters.values())[:LIMIT],
            }
        if (is_bad or self._has_loose_forward(step)) and (poisoned := self._newly_poisoned()):
            self._facts = {**(self._facts or {"step": step.step}), "poisoned": poisoned}
        if self._facts is not None:
            step.values["nonfinite"] = True

    def values(self) -> Facts | None:
        facts, self._facts = self._facts, None
        if facts is None and (poisoned := self._newly_poisoned()):
            return {"poisoned": poisoned}
        return facts

    def _has_loose_forward(self, step: RecordedStep) -> bool:
        if not self._statistics or step.kinds.count("forward") <= step.kinds.count("backward"):
            return False
        trained = sum([kind == "forward" and value[1] for kind, value in step.events])
        return bool(trained > sum([kind == "backward" for kind, _ in step.events]))

    def _newly_poisoned(self) -> list[str]:
        """Paths of modules whose running statistics are non-finite and were not reported yet."""
        held = [(m, b) for m, n in self._statistics if (b := m._buffers[n]) is not None and b.is_floating_point()]
        if not held or bool(torch.isfinite(torch.stack(torch._foreach_norm([b for _, b in held]))).all()):
            self._poisoned.clear()
            return []
        bad: list[nn.Module] = [m for m, b in held if not bool(b.isfinite().all())]
        names = list(dict.fromkeys(self._paths[m] for m in bad))
        new = [name for name in names if name not in self._poisoned]
        self._poisoned.update(new)
        return new

    def _bad_gradients(self) -> list[str]:
        return self._named(p.grad for p in self._parameters.values())

    def _dtype_of(self, names: list[str]) -> str | None:
        first = next((p for key, p in self._parameters.items() if names and self._names.get(key) == names[0]), None)
        return None if first is None else str(first.dtype).removeprefix("torch.")

    def _named(self, tensors: Iterable[Tensor | None]) -> list[str]:
        """The names of parameters whose tensor is not finite; one tensor, or None, for each parameter."""
        pairs = list(zip(self._parameters, tensors))
        return [self._names.get(key, "?") for key, t in pairs if t is not None and not _is_finite(t.detach())]


def _is_finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else own_part(tensor)
    return bool(values.isfinite().all())


def _bad_inputs(step: RecordedStep) -> list[Facts]:
    """Of each argument of a model that is not finite: the call, and the samples in it."""
    found: list[Facts] = []

    def look(leaf: object) -> None:
        if not isinstance(leaf, Constant) or not leaf.tensor.is_floating_point() or not leaf.is_unchanged:
            return
        tensor = leaf.tensor.detach()
        if tensor.dim() and not _is_finite(tensor):
            bad = ~tensor.isfinite()
            rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
            ids = step.ids[call.batch] if 0 <= call.batch < len(step.ids) else None
            which = rows.nonzero().flatten().tolist()
            found.append(
                {
                    "call": number,
                    "rows": which[:LIMIT],
                    "ids": [ids[r] for r in which[:LIMIT]] if ids is not None and len(ids) == len(rows) else [],
                    "nan": int(tensor.isnan().sum()),
                    "inf": int(tensor.isinf().sum()),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                }
            )

    for number, call in enumerate(step.calls):  # noqa: B007  look() reads both
        mapped((call.args, call.kwargs), look)
    return found
