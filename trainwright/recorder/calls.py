"""Hooks on the forward calls of a module. Copies and pickles of the module do not contain them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn

from trainwright.recorder.user_types import Args, Kwargs

CallBegins: TypeAlias = Callable[[nn.Module, Args, Kwargs], None]
CallEnds: TypeAlias = Callable[[nn.Module, Args, object], None]
_Observed: TypeAlias = tuple[nn.Module, CallBegins, CallEnds]


class Hook:
    """A hook on one module. It does nothing during compilation, because the graph must not contain it."""

    is_recorders = True  # not a hook of the user's loop

    def __init__(self, root: nn.Module, call: Callable[..., None]) -> None:
        self._root, self._call = root, call

    def __call__(self, module: nn.Module, *arguments: object) -> None:
        # replicas of DataParallel have this hook, too, but are not the user's module
        if not torch.compiler.is_compiling() and module is self._root:
            self._call(module, *arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Replaces the hook in copies and pickles by a builtin that takes any arguments and does nothing.

        Only for classes with custom copying; ``leave_out_of_pickles`` covers all others.
        """
        return getattr, (nullcontext(), "__exit__")


def leave_out_of_pickles() -> Callable[[], None]:
    """Removes the recorder's hooks from pickles and copies of modules. Returns a function that ends this."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _without_hooks(super(nn.Module, self).__reduce_ex__(protocol))

    if "__reduce_ex__" in vars(nn.Module):  # defined by the user
        return lambda: None
    nn.Module.__reduce_ex__ = reduce_ex  # type: ignore[method-assign, assignment]

    def undo() -> None:
        if vars(nn.Module).get("__reduce_ex__") is reduce_ex:
            del nn.Module.__reduce_ex__

    return undo


def _without_hooks(reduced: Any) -> Any:
    """Returns the result of ``__reduce_ex__`` of a module without the recorder's hooks.

    Its state is a dict of attributes, or a tuple of this dict and the slots.
    """
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    attributes = state[0] if isinstance(state, tuple) and state else state
    if not isinstance(attributes, dict):
        return reduced
    hooks = {name: value for name, value in attributes.items() if name.endswith("_hooks") and _recorders(value)}
    if not hooks:
        return reduced
    attributes = dict(attributes)
    for name, of_module in hooks.items():
        ours = _recorders(of_module)
        for each in (name, f"{name}_with_kwargs", f"{name}_always_called"):
            if each in attributes:
                attributes[each] = type(of_module)((k, v) for k, v in attributes[each].items() if k not in ours)
    return *reduced[:2], (attributes, *state[1:]) if isinstance(state, tuple) else attributes, *reduced[3:]


def _recorders(hooks: Any) -> set[int]:
    """Returns the keys of the recorder's hooks."""
    if not isinstance(hooks, dict):
        return set()
    return {key for key, hook in hooks.items() if getattr(hook, "is_recorders", False)}


class HookPair:
    """The two hooks of a module. ``pause`` removes them from its dicts of hooks, in 1 us, until ``resume``."""

    def __init__(self, root: nn.Module, first: int, last: int) -> None:
        self._before, self._after = root._forward_pre_hooks, root._forward_hooks
        self._keys = first, last
        self._taken: tuple[Any, Any] | None = None

    def pause(self) -> None:
        first, last = self._keys
        self._taken = self._before.pop(first, None), self._after.pop(last, None)

    def resume(self) -> None:
        if self._taken is None:
            return
        (first, last), (before, after), self._taken = self._keys, self._taken, None
        if before is not None and after is not None:
            self._before[first], self._after[last] = before, after
            if len(self._before) > 1:
                self._before.move_to_end(first, last=False)  # type: ignore[attr-defined]


@contextmanager
def call_hooks(root: nn.Module, before: CallBegins, after: CallEnds) -> Iterator[HookPair | None]:
    """Context that calls ``before(root, args, kwargs)`` and ``after(root, args, output)`` around every forward call.

    If a call raises, ``output`` is None. Yields the hooks; None if there are none, because the call is wrapped.
    """
    if root._compiled_call_impl is not None:  # after module.compile() a hook would become part of the graph
        with _around_compiled(root, before, after):
            yield None
        return
    if _has_own_call(root):  # such classes, as in keras, run no hooks of torch
        with _OWN_CALLS.observed(root, before, after):
            yield None
        return
    last = root.register_forward_hook(Hook(root, after), always_call=True)

    def begin(root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        root._forward_hooks.move_to_end(last.id)  # type: ignore[attr-defined]  # hooks that the user added later belong to the call, so they run before this one
        before(root, args, kwargs)

    first = root.register_forward_pre_hook(Hook(root, begin), with_kwargs=True, prepend=True)
    pair = HookPair(root, first.id, last.id)
    try:
        yield pair
    finally:
        pair.resume()
        first.remove()
        last.remove()


def is_compiled(module: nn.Module) -> bool:
    """Returns True if the module was compiled by ``torch.compile(module)`` or ``module.compile()``."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


@contextmanager
def _around_compiled(root: nn.Module, before: CallBegins, after: CallEnds) -> Iterator[None]:
    compiled = root._compiled_call_impl
    assert compiled is not None

    def call(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        before(root, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            after(root, args, output)
        return output

    root._compiled_call_impl = call
    try:
        yield
    finally:
        if root._compiled_call_impl is call:
            root._compiled_call_impl = compiled


def _has_own_call(root: nn.Module) -> bool:
    """Returns True if the class of a module replaces ``__call__``, and so torch's code around ``forward``."""
    call = type(root).__call__
    return call is not nn.Module.__call__ and not str(getattr(call, "__module__", "torch")).startswith("torch.")


class _OwnCalls:
    """Wraps ``__call__`` of classes while calls of one of their modules are observed."""

    def __init__(self) -> None:
        self._observed: dict[type[nn.Module], list[_Observed]] = {}
        self._own: dict[type[nn.Module], object] = {}  # the original ``__call__`` of classes that define it

    @contextmanager
    def observed(self, root: nn.Module, before: CallBegins, after: CallEnds) -> Iterator[None]:
        kind, mine = type(root), (root, before, after)
        if kind not in self._observed:
            self._wrap(kind)
        self._observed[kind].append(mine)
        try:
            yield
        finally:
            self._observed[kind].remove(mine)
            if not self._observed[kind]:
                self._unwrap(kind)

    def _wrap(self, kind: type[nn.Module]) -> None:
        original, observed = kind.__call__, self._observed.setdefault(kind, [])
        if "__call__" in vars(kind):
            self._own[kind] = original

        def call(module: nn.Module, *args: object, **kwargs: object) -> object:
            mine = [each for each in observed if each[0] is module and not torch.compiler.is_compiling()]
            for _, before, _ in mine:
                before(module, args, kwargs)
            output = None
            try:
                output = original(module, *args, **kwargs)
            finally:
                for _, _, after in mine:
                    after(module, args, output)
            return output

        kind.__call__ = call  # type: ignore[method-assign]

    def _unwrap(self, kind: type[nn.Module]) -> None:
        del self._observed[kind], kind.__call__
        if kind in self._own:
            kind.__call__ = self._own.pop(kind)  # type: ignore[method-assign, assignment]


_OWN_CALLS = _OwnCalls()


def parts_of(root: nn.Module) -> list[nn.Module]:
    """Returns the children of ``root`` that have parameters. A ModuleList or ModuleDict is replaced by its children."""
    found = []
    for child in root.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += parts_of(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found
