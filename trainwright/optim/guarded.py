"""Base class of Trainwright's optimizers: a step can be skipped on the device, without a host sync."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainwright.checkpoint.shards import locals_of
from trainwright.errors import UsageError
from trainwright.optim.groups import Group

State = dict[str, Tensor]
BUCKET_BYTES = 2**28
"""Size of the parameters that are updated together; limits the temporaries, and the copy of a guarded step."""


class GuardedOptimizer(Optimizer):
    """Follows the contract of torch's fused optimizers with ``GradScaler``.

    ``found_inf`` (0-d float tensor) and ``grad_scale`` may be set before ``step()``. Gradients are divided by
    ``grad_scale``; ``.grad`` stays unchanged. If ``found_inf`` is not 0, parameters and state keep their bits, whatever
    the gradients contain. A guarded step costs one copy of a bucket and its state.

    ``_tensors`` names the tensors of the state. ``step`` counts the applied updates: a 0-d float32 tensor on the device
    of the parameter.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        # "capturable" makes torch's load_state_dict put the step counters on the parameter's device
        super().__init__(params, {**defaults, "capturable": True})

    @abstractmethod
    def _tensors(self, group: Group) -> Sequence[str]:
        """Return the names of the state tensors: "step", and others shaped like the parameter. All start at zero."""

    @abstractmethod
    def _update(self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Update one bucket and its state in place."""

    def _kind(self, _group: Group, parameter: Tensor) -> Hashable:
        """Return a key; parameters with equal keys may share a bucket."""
        return parameter.device, parameter.dtype

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(parameter.is_complex() for parameter in group["params"]):
            raise UsageError(
                f"{type(self).__name__} has no complex parameters", remedy="use adamw, or torch.view_as_real"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the value of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in self._buckets(group):
                self._guarded_update(group, parameters)
        return loss

    def _init_group(self, group: Group) -> None:
        """Create the state of a group before its first update; torch's optimizers have a method of this name."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._state_of(parameter, group)

    def _buckets(self, group: Group) -> Iterator[list[Tensor]]:
        kinds: dict[Hashable, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds.setdefault(self._kind(group, parameter), []).append(parameter)
        for members in kinds.values():
            bucket: list[Tensor] = []
            num_bytes = 0
            for parameter in members:
                if bucket and num_bytes + parameter.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(parameter)
                num_bytes += parameter.nbytes
            yield bucket

    def _guarded_update(self, group: Group, parameters: list[Tensor]) -> None:
        grads = [self._dense_grad(parameter) for parameter in parameters]
        if self.grad_scale is not None:
            scale = self.grad_scale
            grads = [grad / scale.to(grad.device) for grad in grads]
        states = [self._state_of(parameter, group) for parameter in parameters]
        guarded: list[Tensor] = []
        if self.found_inf is not None:
            guarded = locals_of([*parameters, *(tensor for state in states for tensor in state.values())])
        before = [tensor.clone() for tensor in guarded]
        self._update(group, parameters, grads, states)
        for tensor, old in zip(guarded, before):
            assert self.found_inf is not None
            tensor.copy_(torch.where(self.found_inf.to(tensor.device) == 0, tensor, old))

    def _dense_grad(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise UsageError(
                f"{type(self).__name__} has no sparse gradients", remedy="build the embedding with sparse=False"
            )
        return parameter.grad

    def _state_of(self, parameter: Tensor, group: Group) -> State:
        state: State = self.state[parameter]
        if not state:
            for name in self._tensors(group):
                if name == "step":
                    state[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                else:
                    state[name] = torch.zeros_like(parameter)
        return state


def require_rates(**rates: float) -> None:
    """Raise UsageError unless every value is a number >= 0."""
    for name, value in rates.items():
        if not isinstance(value, int | float) or not value >= 0:
            raise UsageError(f"{name} must be a number >= 0; got {value!r}", remedy=f"try {name}=0.001")


def require_fractions(**fractions: float) -> None:
    """Raise UsageError unless every value is in [0, 1)."""
    for name, value in fractions.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise UsageError(f"{name} must lie in [0, 1); got {value!r}", remedy=f"try {name}=0.9")


def require_betas(name: str, betas: Sequence[float]) -> None:
    """Raise UsageError unless these are two numbers in [0, 1)."""
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise UsageError(f"{name} must be two numbers; got {betas!r}", remedy=f"try {name}=[0.9, 0.999]")
    require_fractions(**{f"{name}[0]": betas[0], f"{name}[1]": betas[1]})
