"""Every tensor operation of one replayed step: which module and which line it came from, and what it read and made.

``Tracing`` sees the ops below autograd, so also those of the backward pass, of a custom Function, of a recomputation
under checkpointing and of the optimizer. Which of them broke the numbers is told by ``suspects``.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainwright.replay.mechanism import Range, in_fp32, pooled
from trainwright.replay.suspects import Bad, Op, SuspectOp, Suspects, is_judged

__all__ = ["Bad", "Op", "Range", "Tracing"]

# Private names of torch, in one place. Without them every op is "forward", and no backward op knows its forward op.
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_ENGINE = "_engine_run_backward"
_REPLAY = "trainwright.replay.replayer"
_ACCUMULATES = "AccumulateGrad"

_PASSED_BY = {"contextlib", "functools", "torch", "trainwright"}
_UNSEEN = {"prim", "profiler", "c10d", "_c10d_functional"}
_OVERWRITES = {"uniform", "normal", "zero", "fill", "copy", "bernoulli", "random", "exponential", "geometric", "cauchy"}
_FIRST_ONLY = ("ctc_loss", "scaled_dot_product", "batch_norm")
"""What else these return is for their backward pass, and may be infinite."""
_WRITES_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Their schemas do not say so."""


@dataclass(frozen=True)
class _Place:
    op: int | None
    module: str | None
    source: str | None


_NOWHERE = _Place(None, None, None)


@dataclass(frozen=True)
class _Traits:
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
    """Sees every op while it is entered. ``roots`` are the modules of the step, by name.

    Modules and weights are named by their dotted path; with several roots, the root's name comes first.
    ``suspects`` are all ops that made something non-finite; ``first_bad`` is the one that did harm, if any.
    Costs one pass over every floating tensor and a host sync for each: for a replay, never for a live step.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._roots = roots
        self._ledger = Suspects()
        self._stack: list[str] = []
        self._hooks: list[Any] = []
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
        return self._ledger.first_bad

    @property
    def suspects(self) -> list[Bad]:
        return self._ledger.found

    def within(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a torch function: the ops that it is made of are known by its name. For ``Edit(ops=...)``."""
        self._function = getattr(function, "__name__", None)
        try:
            return function(*args, **kwargs)
        finally:
            self._function = None

    # Entering and leaving

    def __enter__(self) -> Tracing:
        for key, root in self._roots.items():
            prefix = "" if len(self._roots) == 1 else f"{key}."
            for path, module in root.named_modules():
                self._hook(module, f"{prefix}{path}".rstrip("."))
            for path, buffer in root.named_buffers():
                self._ledger.call(buffer, "buffer", f"{prefix}{path}")
            for path, parameter in root.named_parameters():
                self._ledger.call(parameter, "weight", f"{prefix}{path}")
                if parameter.grad is not None:
                    self._ledger.call(parameter.grad, "gradient", f"{prefix}{path}")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        parameters = [x for root in self._roots.values() for x in root.parameters()]
        self._ledger.reach("gradient", [x.grad for x in parameters if x.grad is not None])
        if not self._has_backward and self._last is not None:
            self._ledger.reach("end", [self._last])

    def _hook(self, module: nn.Module, name: str) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._stack and _current_node() is None:
                self._micro_batch += self._has_backward
                self._has_backward = False
                self._call += 1
                self._name_inputs(args, kwargs)
            self._stack.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while name in self._stack and self._stack.pop() != name:
                pass

        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        # Also when the forward is left by an exception: a checkpoint's recomputation stops early by one.
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _name_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [*_tensors(args, "input"), *_tensors(kwargs, "")]
        self._ledger.batch_size = next((x.shape[0] for _, x in named if x.dim()), None)
        for name, tensor in named:
            self._ledger.call(tensor, "input", name)
            self._ledger.enter(tensor)

    # One op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace in _UNSEEN:
            return func(*args, **kwargs)
        traits, node = _traits(func), _current_node()
        source, is_python = _caller()
        is_forward = node is None or (is_python and torch.is_grad_enabled())  # or a recomputation
        if is_forward:
            self._number(args, traits, source)
            if node is None and traits.name == "ones_like" and args[0].numel() == 1 and torch.is_grad_enabled():
                self._ledger.reach("loss", [args[0]])  # how backward() makes its first gradient
        elif _ACCUMULATES in node.name():
            self._ledger.reach("gradient", list(_plain(args)))
        if traits.is_view or traits.is_empty:
            return func(*args, **kwargs)
        self._has_backward |= node is not None
        place = self._place_of(node)
        if not is_forward:
            return self._run(func, args, kwargs, "backward", replace(place, source=source or place.source))
        module = self._stack[-1] if self._stack else place.module
        is_update = self._has_backward and node is None and not torch.is_grad_enabled() and not self._stack
        place = _Place(None, module, source or place.source)
        return self._run(func, args, kwargs, "update" if is_update else "forward", place)

    def _run(self, func: OpOverload, args: Any, kwargs: dict[str, Any], phase: str, place: _Place) -> Any:
        """Runs the op, and writes down what it read and what it made."""
        traits = _traits(func)
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs.items())
        read = list(_plain(value for key, value in arguments.items() if key not in traits.unread))
        before = [(x, self._ledger.look(x)) for x in read if is_judged(x)]
        as_read = self._as_read(args)
        is_half = bool(traits.written) and any(x.dtype == torch.float16 for x, _ in before)
        spare = tree_map_only(Tensor, Tensor.clone, args) if is_half else args  # an op in place loses its input
        result = func(*args, **kwargs)
        written = list(_plain(arguments[key] for key in traits.written if key in arguments))
        for tensor in written:
            self._ledger.forget(tensor)
        outputs = [x for x in _plain([result]) if is_judged(x)] or [x for x in written if is_judged(x)]
        if not outputs:
            return result
        outputs = outputs[:1] if traits.returns_extras else outputs
        op = Op(
            index=len(self.ops),
            phase=phase,
            name=traits.name,
            module=place.module,
            source=place.source,
            dtype=(before[0][1] if before else self._ledger.look(outputs[0])).dtype,
            shapes=tuple(tuple(x.shape) for x in read),
            inputs=tuple(held for _, held in before),
            output=pooled([self._ledger.look(x) for x in outputs]),
            forward_op=place.op,
            micro_batch=self._micro_batch,
            call=max(0, self._call),
            function=self._function,
        )
        self.ops.append(op)
        exact = partial(lambda: None) if traits.is_random else partial(in_fp32, func, spare, kwargs)
        self._ledger.follow(SuspectOp(op, as_read, before, outputs, written, exact))
        if phase == "forward" and outputs[0].numel() == 1 and not self._has_backward:
            self._last = outputs[0]
        return result

    def _as_read(self, args: Any) -> list[Any]:
        """The arguments, with what the floating tensors hold now: an op in place is about to change them."""
        return [
            self._ledger.look(x)
            if isinstance(x, Tensor) and is_judged(x)
            else self._as_read(x)
            if isinstance(x, list | tuple)
            else x
            for x in args
        ]

    # Where one is

    def _number(self, args: Any, traits: _Traits, source: str | None) -> None:
        """Remembers which op a node of the graph belongs to: nodes are numbered, and the next number is known."""
        sequence = _next_sequence()
        if threading.get_ident() != self._thread or (self._sequences and sequence <= self._sequences[-1]):
            return
        if torch.is_grad_enabled() and not any(x.requires_grad for x in _plain(args)):
            return  # makes no node: the number belongs to an op before it
        op = None if traits.is_view or traits.is_empty else len(self.ops)
        self._sequences.append(sequence)
        within = self._place_of(_current_node())
        module = self._stack[-1] if self._stack else within.module
        self._places.append(_Place(op, module, source or within.source))

    def _place_of(self, node: Any) -> _Place:
        """The forward op of a node of the backward pass."""
        if node is None or _ACCUMULATES in node.name():
            return _NOWHERE
        at = bisect_right(self._sequences, node._sequence_nr() + 1) - 1
        return self._places[at] if at >= 0 else _NOWHERE


def _plain(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an op: they stand there or in a list."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _plain(value)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested arguments, with where it stands."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")


def _caller() -> tuple[str | None, bool]:
    """The innermost line of the user's code, and whether it is Python, and not the engine of autograd, that calls."""
    frame: FrameType | None = sys._getframe(2)
    is_python = frame is not None and frame.f_code.co_name != _ENGINE
    while frame is not None and frame.f_code.co_name != _ENGINE:
        name = frame.f_globals.get("__name__", "")
        if name == _REPLAY and frame.f_code.co_name != "__torch_function__":  # above stands whoever made the replay
            break
        if name.startswith("trainwright.models") or name.split(".")[0] not in _PASSED_BY:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", is_python
        frame = frame.f_back
    return None, is_python
