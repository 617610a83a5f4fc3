"""Records every ATen op of one replayed step: its module, its source line, the ranges of its inputs and outputs.

``Tracing`` works below autograd, so it also records the ops of the backward pass, of custom Functions, of activation
checkpointing and of the optimizer. The module ``suspects`` finds the op that made the step non-finite.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.names import plain_name
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.mechanism import Range, in_fp32, pooled
from trainwright.replay.modules import ModuleStack
from trainwright.replay.storages import is_float
from trainwright.replay.suspects import Bad, Op, SuspectOp, Suspects

__all__ = ["Bad", "Op", "Range", "Tracing"]

# Private names of torch. Without them every op is "forward", and no backward op has a known forward op.
_current_node: Callable[[], Node | None] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_ENGINE = "_engine_run_backward"
_REPLAY = "trainwright.replay.replayer"
_ACCUMULATES = "AccumulateGrad"

_SKIPPED_PACKAGES = {"contextlib", "functools", "torch", "trainwright"}
_IGNORED_NAMESPACES = {"prim", "profiler", "c10d", "_c10d_functional"}
_OVERWRITES = {"uniform", "normal", "zero", "fill", "copy", "bernoulli", "random", "exponential", "geometric", "cauchy"}
_FIRST_ONLY = ("ctc_loss", "scaled_dot_product", "batch_norm")
"""Ops whose outputs after the first one are only for their backward pass, and may be infinite."""
_WRITES_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Ops that write running statistics, which their schemas do not declare."""


@dataclass(frozen=True)
class _Place:
    """The origin of an op. ``op`` is the index in ``Tracing.ops`` of the forward op that a backward op belongs to."""

    op: int | None
    module: str | None
    source: str | None


_NOWHERE = _Place(None, None, None)


@dataclass(frozen=True)
class _Traits:
    """Properties of an op from its schema. ``written`` and ``unread`` are positions or names of arguments.

    ``returns_extras``: only its first output is a result.
    """

    name: str
    is_view: bool
    is_empty: bool
    is_random: bool
    returns_extras: bool
    written: tuple[int | str, ...]
    unread: tuple[int | str, ...]


@cache
def _traits(func: OpOverload) -> _Traits:
    schema, base = func._schema, func._schema.name.split("::")[1]
    written: list[int | str] = []
    unread: list[int | str] = []
    for index, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            written.append(arg.name if arg.kwarg_only else index)
            if arg.kwarg_only or base.rstrip("_") in _OVERWRITES:
                unread.append(written[-1])
    if base in _WRITES_STATISTICS:
        written += [3, 4]
    is_view = not written and any(arg.alias_info is not None for arg in schema.arguments)
    return _Traits(
        name=base.strip("_"),
        is_view=is_view or base == "_unsafe_view",
        is_empty="empty" in base,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        returns_extras=any(part in base for part in _FIRST_ONLY) and not base.endswith("backward"),
        written=tuple(written),
        unread=tuple(unread),
    )


class Tracing(TorchDispatchMode):
    """A dispatch mode that records every op. ``roots`` are the modules of the step, by name.

    Modules and weights are named by their dotted path; with several roots, the root's name comes first.
    ``first_bad`` is the op whose non-finite values were the first to reach the loss, a gradient, a weight or a buffer.
    Costs one pass over every floating-point tensor and a host sync for each op, so it is for replays only.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._roots = roots
        self._suspects = Suspects()
        self._storages = self._suspects.storages
        self._modules = ModuleStack(dict(self._paths()))
        self._hooks = ExitStack()
        self._sequences: list[int] = []
        self._places: list[_Place] = []
        self._thread = threading.get_ident()
        self._has_backward = False
        self._micro_batch = 0
        self._call = -1
        self._function: str | None = None
        self._last: Tensor | None = None

    @property
    def first_bad(self) -> Bad | None:
        return self._suspects.first_bad

    def within(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Calls a torch function and records its name with the ops that it calls. For ``Intervention.ops``."""
        self._function = getattr(function, "__name__", None)
        try:
            return function(*args, **kwargs)
        finally:
            self._function = None

    # Entering and leaving

    def _paths(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, root in self._prefixed_roots():
            for path, module in root.named_modules():
                yield plain_name(f"{prefix}{path}".rstrip(".")), module

    def _prefixed_roots(self) -> Iterator[tuple[str, nn.Module]]:
        for name, root in self._roots.items():
            yield "" if len(self._roots) == 1 or not name else f"{name}.", root

    def __enter__(self) -> Tracing:
        self._hooks.enter_context(self._modules.following(self._enter))
        for prefix, root in self._prefixed_roots():
            for path, buffer in root.named_buffers():
                self._storages.name(buffer, "buffer", plain_name(f"{prefix}{path}"))
            for path, parameter in root.named_parameters():
                self._storages.name(parameter, "weight", plain_name(f"{prefix}{path}"))
                if parameter.grad is not None:
                    self._storages.name(parameter.grad, "gradient", plain_name(f"{prefix}{path}"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()
        parameters = [x for root in self._roots.values() for x in root.parameters()]
        self._suspects.reach("gradient", [x.grad for x in parameters if x.grad is not None])
        if not self._has_backward and self._last is not None:
            self._suspects.reach("end", [self._last])

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if len(self._modules.paths) > 1 or _current_node() is not None:
            return
        self._micro_batch += self._has_backward
        self._has_backward = False
        self._call += 1
        self._name_inputs(args, kwargs)

    def _name_inputs(self, args: Args, kwargs: Kwargs) -> None:
        named = [*_tensors(args, "input"), *_tensors(kwargs, "")]
        self._suspects.batch_size = next((x.shape[0] for _, x in named if x.dim()), None)
        for name, tensor in named:
            self._storages.name(tensor, "input", name)
            self._suspects.enter(tensor)

    # One op

    def __torch_dispatch__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace in _IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        traits, node = _traits(func), _current_node()
        frame = sys._getframe(1)
        source, is_python = replayed_line(frame), frame.f_code.co_name != _ENGINE  # False: autograd called
        is_forward = node is None or (is_python and torch.is_grad_enabled())  # the latter is activation checkpointing
        if node is None or is_forward:
            self._number(args, traits, source)
            if node is None and traits.name == "ones_like" and args[0].numel() == 1 and torch.is_grad_enabled():
                self._suspects.reach("loss", [args[0]])  # with ones_like, backward() makes its first gradient
        elif _ACCUMULATES in node.name():
            self._suspects.reach("gradient", list(_tensors_in(args)))
        if traits.is_view or traits.is_empty:
            return func(*args, **kwargs)
        self._has_backward |= node is not None
        place = self._place_of(node)
        if not is_forward:
            return self._run(func, args, kwargs, "backward", replace(place, source=source or place.source))
        module = self._modules.innermost
        is_update = self._has_backward and node is None and not torch.is_grad_enabled() and module is None
        place = _Place(None, place.module if module is None else module, source or place.source)
        return self._run(func, args, kwargs, "update" if is_update else "forward", place)

    def _run(self, func: OpOverload, args: Args, kwargs: Kwargs, phase: str, place: _Place) -> object:
        traits = _traits(func)
        arguments: dict[int | str, object] = dict(enumerate(args))
        arguments.update(kwargs.items())
        read = list(_tensors_in(value for key, value in arguments.items() if key not in traits.unread))
        before = [(x, self._storages.range(x)) for x in read if is_float(x)]
        ranges = self._ranges(args)
        is_half = bool(traits.written) and any(x.dtype == torch.float16 for x, _ in before)
        spare = tree_map_only(Tensor, Tensor.clone, args) if is_half else args  # an in-place op overwrites its input
        result = func(*args, **kwargs)
        written = list(_tensors_in(arguments[key] for key in traits.written if key in arguments))
        for tensor in written:
            self._storages.forget(tensor)
        outputs = [x for x in _tensors_in([result]) if is_float(x)] or [x for x in written if is_float(x)]
        if not outputs:
            return result
        outputs = outputs[:1] if traits.returns_extras else outputs
        op = Op(
            index=len(self.ops),
            phase=phase,
            name=traits.name,
            module=place.module,
            source=place.source,
            dtype=(before[0][1] if before else self._storages.range(outputs[0])).dtype,
            shapes=tuple(tuple(x.shape) for x in read),
            inputs=tuple(each for _, each in before),
            output=pooled([self._storages.range(x) for x in outputs]),
            forward_op=place.op,
            micro_batch=self._micro_batch,
            call=max(0, self._call),
            function=self._function,
        )
        self.ops.append(op)
        exact = partial(lambda: None) if traits.is_random else partial(in_fp32, func, spare, kwargs)
        self._suspects.follow(SuspectOp(op, ranges, before, outputs, written, exact))
        if phase == "forward" and outputs[0].numel() == 1 and not self._has_backward:
            self._last = outputs[0]
        return result

    def _ranges(self, args: Sequence[object]) -> list[object]:
        """Returns the arguments with ranges instead of floating-point tensors, which the op may overwrite later."""
        return [
            self._storages.range(x)
            if isinstance(x, Tensor) and is_float(x)
            else self._ranges(x)
            if isinstance(x, list | tuple)
            else x
            for x in args
        ]

    # The places of ops

    def _number(self, args: Args, traits: _Traits, source: str | None) -> None:
        """Records the op that the next node of the graph belongs to, by torch's sequence numbers of nodes."""
        sequence = _next_sequence()
        if threading.get_ident() != self._thread or (self._sequences and sequence <= self._sequences[-1]):
            return
        if torch.is_grad_enabled() and not any(x.requires_grad for x in _tensors_in(args)):
            return  # the op makes no node; the number belongs to an earlier op
        op = None if traits.is_view or traits.is_empty else len(self.ops)
        self._sequences.append(sequence)
        outer = self._place_of(_current_node())
        module = self._modules.innermost
        self._places.append(_Place(op, outer.module if module is None else module, source or outer.source))

    def _place_of(self, node: Node | None) -> _Place:
        """Returns the place of the forward op of a node of the backward pass."""
        if node is None or _ACCUMULATES in node.name():
            return _NOWHERE
        at = bisect_right(self._sequences, node._sequence_nr() + 1) - 1
        return self._places[at] if at >= 0 else _NOWHERE


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of an op, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in nested arguments with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")


def replayed_line(frame: FrameType | None) -> str | None:
    """Returns the innermost line of the user's code that a replay runs, from ``frame`` outwards; None without one."""
    while frame is not None and frame.f_code.co_name != _ENGINE:
        name = frame.f_globals.get("__name__", "")
        if name == _REPLAY and frame.f_code.co_name != "__torch_function__":  # outer frames are not the step's
            return None
        if name.startswith("trainwright.models") or name.split(".")[0] not in _SKIPPED_PACKAGES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
