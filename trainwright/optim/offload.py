"""Optimizer offload: optimizer state and update are on the host; the device holds only weights and gradients.

The optimizer's update is unchanged (J. Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840). A step copies 4 bytes per
trained fp32 weight to the host, updates, and copies 4 bytes back, in sequence. Not tested on a GPU so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainwright.errors import UsageError
from trainwright.optim.groups import Group

MASTER = "master"
"""State key for the float32 master weight of a 16-bit parameter. The update is applied to the master weight."""
PIECE_BYTES = 2**30  # size of an allocation of host memory, unless one tensor is larger, see ``_Pieces``
_ALIGNMENT_BYTES = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def offloaded(factory: Callable[..., Optimizer]) -> type[Offloaded]:
    """Return an optimizer class that does what ``factory`` does, in host memory.

    Its name is the class name of the wrapped optimizer. Checkpoints identify optimizers by this name, so a run may be
    continued with or without offload.
    """
    return type(getattr(factory, "__name__", "Offloaded"), (Offloaded,), {"factory": staticmethod(factory)})


class Offloaded(Optimizer):
    """Steps another optimizer over copies of the parameters on the CPU; made by ``offloaded``.

    ``param_groups`` and ``state`` are keyed by the parameters of the model; the state is on the CPU, and the wrapped
    optimizer has none between two steps. Copies are in float32, or in float64 for float64 parameters.

    A weight that was written to since the last step is copied first. Writes are detected by the version and address of
    the tensor, and by the sum of its bits if autograd does not see them (``p.data.clamp_()``). The master of a 16-bit
    weight is replaced only if it does not round to the weight.
    """

    factory: ClassVar[Callable[..., Optimizer]]

    def __init__(self, params: ParamsT, **options: object) -> None:
        self._hosts: dict[Tensor, _Host] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}
        groups = _as_groups(params)
        copies = [self._host_copies(group["params"]) for group in groups]
        with torch.device("cpu"):
            on_host = [{**group, "params": each} for group, each in zip(groups, copies)]
            inner = type(self).factory(on_host, **options)
        inner_groups = inner.param_groups
        type(self).__name__ = type(inner).__name__
        if [list(map(id, group["params"])) for group in inner_groups] != [list(map(id, each)) for each in copies]:
            raise UsageError(
                f"{type(inner).__name__} makes other groups than those that it gets, so it cannot be offloaded",
                remedy="set optimizer.offload to false",
            )
        self._inner: Optimizer | None = None
        own_groups = [{**made, "params": group["params"]} for made, group in zip(inner_groups, groups)]
        super().__init__(own_groups, inner.defaults)
        self._inner = inner
        self._take_back()

    def add_param_group(self, param_group: Group) -> None:
        if self._inner is not None:
            [group] = _as_groups([param_group])
            self._inner.add_param_group({**group, "params": self._host_copies(group["params"])})
            param_group = {**self._inner.param_groups[-1], "params": group["params"]}
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the value of ``closure``. Synchronizes with the device.

        ``.grad`` is not changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        updated = self._copy_to_host()
        self._lend_state()
        for _, host in updated:
            host.version = -1  # an update that fails midway leaves copies that differ from the device
        _unhooked_step(self._inner)
        self._take_back()
        self._copy_to_device(updated)
        return loss

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a state dict without using device memory. Does not call the hooks for loading."""
        assert self._inner is not None
        self._inner.load_state_dict(state_dict)
        loaded = self._inner.param_groups
        self.param_groups = [{**new, "params": old["params"]} for old, new in zip(self.param_groups, loaded)]
        self._take_back()
        for host in self._hosts.values():
            host.version = -1  # masters were loaded, too

    def __getstate__(self) -> dict[str, object]:
        more = {"_inner": self._inner, "_hosts": self._hosts, "_arrived": {}}
        return {**super().__getstate__(), **more}

    def _host_copies(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return the copies of the parameters; create missing copies."""
        new = [parameter for parameter in parameters if parameter not in self._hosts]
        pieces = {on_gpu: _Pieces(new, pinned=on_gpu) for on_gpu in {p.device.type == "cuda" for p in new}}
        for parameter in new:
            self._hosts[parameter] = _Host.of(parameter, pieces[parameter.device.type == "cuda"])
        return [self._hosts[parameter].weight for parameter in parameters]

    def _copy_to_host(self) -> list[tuple[Tensor, _Host]]:
        """Copy gradients, and weights that were written to. Return the parameters to update."""
        for event in self._arrived.values():
            event.synchronize()  # the device may still read the copies, which are overwritten now
        due = []
        for group in self.param_groups:
            for parameter in group["params"]:
                host = self._hosts[parameter]
                host.weight.grad = None
                if parameter.grad is not None:
                    host.fetch_grad(parameter.grad)
                    due.append((parameter, host))
        stale = _changed_weights(due)
        for parameter, host in stale:
            host.fetch_weight(parameter)
        for device in _gpus(due):
            torch.cuda.current_stream(device).synchronize()
        for parameter, host in stale:
            host.take_weight(self.state.get(parameter, {}).get(MASTER))
        for _, host in due:
            host.take_grad()
        return due

    def _copy_to_device(self, due: list[tuple[Tensor, _Host]]) -> None:
        for parameter, host in due:
            host.send_weight(parameter)
        for device in _gpus(due):
            self._arrived[device] = torch.cuda.current_stream(device).record_event()

    def _lend_state(self) -> None:
        """Pass options and state to the wrapped optimizer, because schedules and loading change only this object."""
        assert self._inner is not None
        for mine, inside in zip(self.param_groups, self._inner.param_groups, strict=True):
            inside.update({key: value for key, value in mine.items() if key != "params"})
        self._inner.state = defaultdict(dict)
        for key, state in self.state.items():
            host = self._hosts.get(key)
            if host is None:
                self._inner.state[key] = state
            else:
                self._inner.state[host.weight] = state if host.landing is None else _widened(state, host.weight)

    def _take_back(self) -> None:
        assert self._inner is not None
        for mine, inside in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({key: value for key, value in inside.items() if key != "params"})
        states = {key: each for key, each in self._inner.state.items() if not isinstance(key, Tensor)}
        for parameter, host in self._hosts.items():
            kept = self._inner.state.get(host.weight, {})
            if host.landing is not None:
                states[parameter] = {MASTER: host.weight.detach(), **kept}
            elif host.weight in self._inner.state:
                states[parameter] = kept
        self.state.clear()
        self.state.update(states)
        self._inner.state = defaultdict(dict)


@dataclass(eq=False)
class _Host:
    """The copy of one parameter. ``landing`` is the buffer through which a 16-bit weight is copied.

    ``version``, ``pointer`` and ``bits`` (0-d, on the device) describe the parameter when it last equalled the copy.
    """

    weight: nn.Parameter
    landing: Tensor | None
    pieces: _Pieces
    grad: Tensor | None = None
    version: int = -1
    pointer: int = 0
    bits: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu"))

    @classmethod
    def of(cls, parameter: Tensor, pieces: _Pieces) -> _Host:
        wide = _WIDE_DTYPES.get(parameter.dtype)
        copy = pieces.like(parameter).copy_(parameter.detach())
        weight = nn.Parameter(copy if wide is None else copy.to(wide))
        made = cls(weight, None if wide is None else copy, pieces)
        made._record(parameter)
        return made

    def fetch_grad(self, grad: Tensor) -> None:
        """Start copying the gradient."""
        if grad.layout != torch.strided:
            self.grad = grad.to("cpu")
            return
        if self.grad is None or self.grad.layout != torch.strided or _layout(self.grad) != _layout(grad):
            self.grad = self.pieces.like(grad)
        self.grad.copy_(grad, non_blocking=True)

    def take_grad(self) -> None:
        """Set the gradient of the copy; the transfer must be complete."""
        assert self.grad is not None
        self.weight.grad = self.grad.to(self.weight.dtype)

    def fetch_weight(self, parameter: Tensor) -> None:
        """Start copying the weight."""
        (self.weight if self.landing is None else self.landing).copy_(parameter, non_blocking=True)

    def take_weight(self, master: Tensor | None) -> None:
        """Copy a 16-bit weight to its master, where the master does not round to it; the transfer must be complete."""
        if self.landing is not None:
            known = self.weight if master is None else master
            self.weight.copy_(torch.where(known.to(self.landing.dtype) == self.landing, known, self.landing))

    def send_weight(self, parameter: Tensor) -> None:
        """Start copying the updated weight to the device."""
        if self.landing is not None:
            self.landing.copy_(self.weight)
        parameter.copy_(self.weight if self.landing is None else self.landing, non_blocking=True)
        self._record(parameter)

    def was_moved(self, parameter: Tensor) -> bool:
        """Return True if the parameter was written to through autograd, or has other memory."""
        return (parameter._version, parameter.data_ptr()) != (self.version, self.pointer)

    def _record(self, parameter: Tensor) -> None:
        self.version = parameter._version
        self.pointer = parameter.data_ptr()
        self.bits = _bits(parameter)


class _Pieces:
    """Allocates host memory for the copies of parameters and gradients from large pieces.

    torch rounds each page-locked allocation up to a power of two, so one allocation per tensor would waste memory.
    """

    def __init__(self, parameters: Sequence[Tensor], *, pinned: bool) -> None:
        self._pinned = pinned
        self._planned = 2 * sum(_aligned(parameter.nbytes) for parameter in parameters)
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor of the shape and strides of ``tensor``, as fused kernels need it."""
        shape = torch.empty_like(tensor, device="meta")
        size = _aligned(shape.nbytes)
        if size > len(self._rest):
            piece = max(size, min(PIECE_BYTES, self._planned))
            self._planned = max(0, self._planned - piece)
            self._rest = torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        taken, self._rest = self._rest[: shape.nbytes], self._rest[size:]
        return taken.view(shape.dtype).as_strided(shape.shape, shape.stride())


def _as_groups(params: ParamsT) -> list[Group]:
    entries: list[object] = list(params)
    groups = [each for each in entries if isinstance(each, dict)] or [{"params": entries}]
    listed = [{**group, "params": group["params"]} for group in groups]
    for group in listed:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not all(isinstance(each, Tensor) for each in group["params"]):
            raise UsageError(
                "an offloaded optimizer takes no names", remedy="give model.parameters(), or groups of them"
            )
    return listed


def _changed_weights(due: list[tuple[Tensor, _Host]]) -> list[tuple[Tensor, _Host]]:
    """Return the parameters that were written to since the last step. Synchronizes with the devices."""
    found = [(parameter, host) for parameter, host in due if host.was_moved(parameter)]
    rest: dict[torch.device, list[tuple[Tensor, _Host]]] = {}
    for parameter, host in due:
        if not host.was_moved(parameter):
            rest.setdefault(parameter.device, []).append((parameter, host))
    for same in rest.values():
        now, then = ([_bits(p) for p, _ in same], [host.bits for _, host in same])
        flags = (torch.stack(now) != torch.stack(then)).tolist()
        found += [each for each, flag in zip(same, flags, strict=True) if flag]
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Return the 0-d sum of the bits as integers. It is independent of the order, so a permutation is not detected."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _widened(state: dict[str, object], weight: Tensor) -> dict[str, object]:
    """Return the state of a 16-bit parameter for its float32 copy: without the master, and in float32."""
    return {
        key: each.to(weight.dtype) if isinstance(each, Tensor) and each.dtype in _WIDE_DTYPES else each
        for key, each in state.items()
        if key != MASTER
    }


def _unhooked_step(optimizer: Optimizer) -> None:
    """Call the step without torch's hooks: a hook must not be called for steps of the wrapped optimizer."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    with torch.device("cpu"):  # the step counters are created here, whatever the default device
        step(optimizer)


def _gpus(due: list[tuple[Tensor, _Host]]) -> set[torch.device]:
    return {parameter.device for parameter, _ in due if parameter.device.type == "cuda"}


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
