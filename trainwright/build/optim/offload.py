"""Optimizer offload: moments and update in the host's memory, so that the device holds weights and gradients only.

The same maths as without (J. Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840). A step takes 4 bytes a trained fp32
weight down to the host and 4 up, one after the other with the update. Not tested on a GPU so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.errors import UsageError

MASTER = "master"
"""In the state of a 16-bit parameter: its weight in float32, which is what is updated."""
PIECE_BYTES = 2**30
_ALIGNED = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
Group = dict[str, Any]


def offloaded(factory: Callable[..., Optimizer]) -> type[Offloaded]:
    """An optimizer class that does what ``factory`` does, in the host's memory.

    Its instances bear the class name of what they wrap: checkpoints know an optimizer by it, so a run may go on with
    or without.
    """
    return type(getattr(factory, "__name__", "Offloaded"), (Offloaded,), {"factory": staticmethod(factory)})


class Offloaded(Optimizer):
    """Steps another optimizer over copies of the parameters on the CPU; made by ``offloaded``.

    ``param_groups`` hold the real parameters. ``state`` is by real parameter, too, and lies on the CPU; the wrapped
    optimizer keeps nothing between two steps. Copies are in float32, or wider where the parameter is.

    A weight that was written to since the last step goes to its copy first. Writes are known by the tensor's version
    and address, and by the sum of its bits for those past autograd (``p.data.clamp_()``). A 16-bit weight is written
    only where its master would not round to it.
    """

    factory: ClassVar[Callable[..., Optimizer]]

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        self._hosts: dict[Tensor, _Host] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}
        groups = _as_groups(params)
        copies = [self._host_copies(group["params"]) for group in groups]
        with torch.device("cpu"):
            inner = type(self).factory([{**group, "params": each} for group, each in zip(groups, copies)], **options)
        made = inner.param_groups
        type(self).__name__ = type(inner).__name__
        if [list(map(id, group["params"])) for group in made] != [list(map(id, each)) for each in copies]:
            raise UsageError(
                f"{type(inner).__name__} makes other groups than it is given, so it cannot be offloaded",
                remedy="set optimizer.offload to false",
            )
        self._inner: Optimizer | None = None
        super().__init__([{**mine, "params": group["params"]} for mine, group in zip(made, groups)], inner.defaults)
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
        """One update of every parameter that has a gradient; returns what ``closure`` returned. Waits for the device.

        ``.grad`` stays as it is.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        due = self._gradients_down()
        self._lend()
        for _, host in due:
            host.version = -1  # an update that fails half-way leaves copies that are not what the device holds
        _unhooked_step(self._inner)
        self._take_back()
        self._weights_up(due)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but nothing goes through the device's memory. Does not call hooks for loading."""
        assert self._inner is not None
        self._inner.load_state_dict(state_dict)
        inside = self._inner.param_groups
        self.param_groups = [{**new, "params": old["params"]} for old, new in zip(self.param_groups, inside)]
        self._take_back()
        for host in self._hosts.values():
            host.version = -1  # a master was loaded, too

    def __getstate__(self) -> dict[str, Any]:
        own = {"_inner": self._inner, "_hosts": self._hosts, "_arrived": {}}
        return {**super().__getstate__(), **own}

    def _host_copies(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        """Makes them where there are none yet."""
        new = [parameter for parameter in parameters if parameter not in self._hosts]
        pieces = {on_gpu: _Pieces(new, pinned=on_gpu) for on_gpu in {p.device.type == "cuda" for p in new}}
        for parameter in new:
            self._hosts[parameter] = _Host.of(parameter, pieces[parameter.device.type == "cuda"])
        return [self._hosts[parameter].weight for parameter in parameters]

    def _gradients_down(self) -> list[tuple[Tensor, _Host]]:
        """Copies gradients, and weights that were written to. Returns what is to be updated."""
        for event in self._arrived.values():
            event.synchronize()  # the copies that the last step sent are about to be written to
        due = []
        for group in self.param_groups:
            for parameter in group["params"]:
                host = self._hosts[parameter]
                host.weight.grad = None
                if parameter.grad is not None:
                    host.fetch_grad(parameter.grad)
                    due.append((parameter, host))
        stale = _written(due)
        for parameter, host in stale:
            host.fetch_weight(parameter)
        for device in _gpus(due):
            torch.cuda.current_stream(device).synchronize()
        for parameter, host in stale:
            host.take_weight(self.state.get(parameter, {}).get(MASTER))
        for _, host in due:
            host.take_grad()
        return due

    def _weights_up(self, due: list[tuple[Tensor, _Host]]) -> None:
        for parameter, host in due:
            host.send_weight(parameter)
        for device in _gpus(due):
            self._arrived[device] = torch.cuda.current_stream(device).record_event()

    def _lend(self) -> None:
        """Options and state to the wrapped optimizer, as they are by now: schedules and loading change them here."""
        assert self._inner is not None
        for mine, inside in zip(self.param_groups, self._inner.param_groups, strict=True):
            inside.update({key: value for key, value in mine.items() if key != "params"})
        self._inner.state = defaultdict(dict)
        for key, own in self.state.items():
            host = self._hosts.get(key)
            if host is None:
                self._inner.state[key] = own
            else:
                self._inner.state[host.weight] = own if host.landing is None else _widened(own, host.weight)

    def _take_back(self) -> None:
        assert self._inner is not None
        for mine, inside in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({key: value for key, value in inside.items() if key != "params"})
        own = {key: each for key, each in self._inner.state.items() if not isinstance(key, Tensor)}
        for parameter, host in self._hosts.items():
            kept = self._inner.state.get(host.weight, {})
            if host.landing is not None:
                own[parameter] = {MASTER: host.weight.detach(), **kept}
            elif host.weight in self._inner.state:
                own[parameter] = kept
        self.state.clear()
        self.state.update(own)
        self._inner.state = defaultdict(dict)


@dataclass(eq=False)
class _Host:
    """The copy of one parameter. ``landing`` is where the weight of a 16-bit one is copied to and from.

    ``version``, ``pointer`` and ``bits`` (0-d, on the device) are those of the parameter when both were last the same.
    """

    weight: nn.Parameter
    landing: Tensor | None
    pieces: _Pieces
    grad: Tensor | None = None
    version: int = -1
    pointer: int = 0
    bits: Tensor = field(default_factory=lambda: torch.zeros(()))

    @classmethod
    def of(cls, parameter: Tensor, pieces: _Pieces) -> _Host:
        wide = _WIDER.get(parameter.dtype)
        copy = pieces.like(parameter).copy_(parameter.detach())
        weight = nn.Parameter(copy if wide is None else copy.to(wide))
        made = cls(weight, None if wide is None else copy, pieces)
        made._note(parameter)
        return made

    def fetch_grad(self, grad: Tensor) -> None:
        """Begins to copy."""
        if grad.layout != torch.strided:
            self.grad = grad.to("cpu")
            return
        if self.grad is None or self.grad.layout != torch.strided or _layout(self.grad) != _layout(grad):
            self.grad = self.pieces.like(grad)
        self.grad.copy_(grad, non_blocking=True)

    def take_grad(self) -> None:
        """When it is there."""
        assert self.grad is not None
        self.weight.grad = self.grad.to(self.weight.dtype)

    def fetch_weight(self, parameter: Tensor) -> None:
        """Begins to copy."""
        (self.weight if self.landing is None else self.landing).copy_(parameter, non_blocking=True)

    def take_weight(self, master: Tensor | None) -> None:
        """When it is there. ``master`` is kept where it rounds to the weight."""
        if self.landing is not None:
            known = self.weight if master is None else master
            self.weight.copy_(torch.where(known.to(self.landing.dtype) == self.landing, known, self.landing))

    def send_weight(self, parameter: Tensor) -> None:
        """Begins to copy."""
        if self.landing is not None:
            self.landing.copy_(self.weight)
        parameter.copy_(self.weight if self.landing is None else self.landing, non_blocking=True)
        self._note(parameter)

    def was_moved(self, parameter: Tensor) -> bool:
        """Whether the parameter was written to or is other memory, as far as torch counts it."""
        return (parameter._version, parameter.data_ptr()) != (self.version, self.pointer)

    def _note(self, parameter: Tensor) -> None:
        self.version, self.pointer, self.bits = parameter._version, parameter.data_ptr(), _bits(parameter)


class _Pieces:
    """Host memory for the copies of parameters and of their gradients, cut from large pieces.

    torch rounds each page-locked allocation up to a power of two.
    """

    def __init__(self, parameters: Sequence[Tensor], *, pinned: bool) -> None:
        self._pinned = pinned
        self._planned = 2 * sum(_aligned(parameter.nbytes) for parameter in parameters)
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensor: Tensor) -> Tensor:
        """Memory that lies as the tensor's does: fused kernels read it so."""
        shape = torch.empty_like(tensor, device="meta")
        size = _aligned(shape.nbytes)
        if size > len(self._rest):
            piece = max(size, min(PIECE_BYTES, self._planned))
            self._planned = max(0, self._planned - piece)
            self._rest = torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        taken, self._rest = self._rest[: shape.nbytes], self._rest[size:]
        return taken.view(shape.dtype).as_strided(shape.shape, shape.stride())


def _as_groups(params: Iterable[Any]) -> list[Group]:
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    listed = [{**group, "params": group["params"]} for group in groups]
    for group in listed:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not all(isinstance(each, Tensor) for each in group["params"]):
            raise UsageError(
                "an offloaded optimizer takes no names", remedy="give model.parameters(), or groups of them"
            )
    return listed


def _written(due: list[tuple[Tensor, _Host]]) -> list[tuple[Tensor, _Host]]:
    """What is not as the last step left it. Waits for the devices."""
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
    """0-d sum of the bits as integers: the same in any order, so what is only exchanged is not seen."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _widened(own: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    """State of a 16-bit parameter for its copy: without the master, and in float32 what was kept in 16 bits."""
    return {
        key: each.to(weight.dtype) if isinstance(each, Tensor) and each.dtype in _WIDER else each
        for key, each in own.items()
        if key != MASTER
    }


def _unhooked_step(optimizer: Optimizer) -> None:
    """Its step without torch's hooks, which would tell whoever listens of an optimizer that nobody knows."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    with torch.device("cpu"):  # whatever the default is: counters are made here
        step(optimizer)


def _gpus(due: list[tuple[Tensor, _Host]]) -> set[torch.device]:
    return {parameter.device for parameter, _ in due if parameter.device.type == "cuda"}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
