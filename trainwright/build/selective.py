"""A forward pass that runs twice, the second time in the backward pass: the same bits, and no trace of it.

The recomputation starts from the random generators and the buffers (BatchNorm's statistics, spectral norm's vectors)
that the first run started from, and leaves neither changed. Outputs that were kept are given back instead of being
computed. An operator that draws random numbers is never kept: to skip it would shift the draws of those behind it.

torch's own ``create_selective_checkpoint_contexts`` gives outputs back too, but fails when a kept output is changed in
place later in the block, and when a weight is used twice under autocast (it counts the casts, of which there is one);
it also costs half as much time again for each operator of the forward pass. Only torch.compile needs it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.errors import UsageError

FAMILIES: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm"),
    "convolution": ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
}
"""ATen operators by family. Any other operator is a family of its own: ``"gelu"``, ``"native_layer_norm"``."""
_FAMILY_OF = {f"aten::{op}": family for family, ops in FAMILIES.items() for op in ops}
_CASTS = ("_to_copy", "clone", "detach")
"""What comes more or less often in the recomputation: autocast keeps the casts of weights."""


@cache
def family_of(op: Any) -> str | None:
    """The family of an operator (``torch._ops.OpOverload``); None if its output cannot be kept."""
    name: str = op._schema.name
    if op._schema.is_mutable or name.removeprefix("aten::") in _CASTS:
        return None
    return _FAMILY_OF.get(name, name.removeprefix("aten::"))


def draws_random_numbers(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call advances a random generator. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


class KeepRule:
    """Says for each call of one run by which name its output is kept, if it is."""

    def __init__(self, keep: Sequence[str]) -> None:
        self._keep = frozenset(keep)
        self._families = {site.partition(":")[0] for site in keep}
        self._calls: Counter[str] = Counter()

    def site(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Its place among the calls of its family, ``"matmul:3"``; None: it is not kept."""
        family = family_of(op)
        if family not in self._families:
            return None
        site = f"{family}:{self._calls[family]}"
        self._calls[family] += 1
        if not (family in self._keep or site in self._keep) or draws_random_numbers(op, args, kwargs):
            return None
        return site


class _Kept(NamedTuple):
    """An output, and the version of each tensor of it."""

    value: Any
    versions: list[int]


class _Keeping(TorchDispatchMode):
    """The first run: puts what is kept into ``kept``."""

    def __init__(self, keep: Sequence[str], kept: dict[str, _Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._kept = KeepRule(keep), kept
        self._places: dict[int, str] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            if self._places:
                self._protect(written(func, args))
            return func(*args, **kwargs)
        site = self._rule.site(func, args, kwargs)
        out = func(*args, **kwargs)
        if site is not None:
            self._kept[site] = _kept(out, _alias)
            self._places.update({_storage(tensor): site for tensor in _tensors(out)})
        return out

    def _protect(self, changed: Sequence[Tensor]) -> None:
        """What is about to be changed in place is copied first."""
        for tensor in changed:
            site = self._places.pop(_storage(tensor), None)
            if site is not None:
                self._kept[site] = _kept(self._kept[site].value, torch.clone)


class _Giving(TorchDispatchMode):
    """The second run: gives what was kept, once; a third run computes it."""

    def __init__(self, keep: Sequence[str], kept: dict[str, _Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._kept = KeepRule(keep), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site = self._rule.site(func, args, kwargs)
        kept = self._kept.pop(site, None) if site is not None else None
        if kept is None:
            return func(*args, **kwargs)
        if [tensor._version for tensor in _tensors(kept.value)] != kept.versions:
            raise UsageError(
                f"activation checkpointing kept the output of {func._schema.name}, and it was changed in place after "
                "its block",
                remedy="write the model without that in-place operation, or use model.activation_checkpointing: block",
            )
        return kept.value


class RecomputedForward:
    """``forward`` for ``torch.utils.checkpoint``: its first call is the forward pass, the others recompute it.

    ``keep`` are the sites whose outputs are kept, ``buffers`` those that the pass may change. torch's own generators
    are kept by ``checkpoint``; Python's and NumPy's, by which some models drop whole layers, are kept here.
    """

    def __init__(
        self, forward: Callable[..., Any], keep: Sequence[str], buffers: Sequence[tuple[nn.Module, str]]
    ) -> None:
        self._forward, self._keep = forward, keep
        self._called = False
        self._kept: dict[str, _Kept] = {}
        self._before = [(module, name, _value(module, name).detach().clone()) for module, name in buffers]
        self._draws = _host_generators()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as contexts:
            if self._called:
                contexts.enter_context(self._as_before())
            if self._keep:
                contexts.enter_context((_Giving if self._called else _Keeping)(self._keep, self._kept))
            self._called = True
            return self._forward(*args, **kwargs)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Other tensors in place of the buffers: autograd may have saved the live ones, which must not change."""
        now, draws = [_value(module, name) for module, name, _ in self._before], _host_generators()
        for module, name, value in self._before:
            module._buffers[name] = value.clone()
        _set_host_generators(self._draws)
        try:
            yield
        finally:  # the recomputation ends with an exception once it has what it needs
            for (module, name, _), live in zip(self._before, now, strict=True):
                module._buffers[name] = live
            _set_host_generators(draws)


def written(op: Any, args: Sequence[Any]) -> list[Tensor]:
    """The arguments that an operator changes in place."""
    return [
        tensor
        for formal, given in zip(op._schema.arguments, args, strict=False)
        if formal.alias_info is not None and formal.alias_info.is_write
        for tensor in _tensors(given)
    ]


def _kept(out: Any, copied: Callable[[Tensor], Tensor]) -> _Kept:
    value = copied(out) if isinstance(out, Tensor) else tuple(copied(o) if isinstance(o, Tensor) else o for o in out)
    return _Kept(value, [tensor._version for tensor in _tensors(value)])


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and version, without the graph that autograd will hang on ``tensor``."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in (value if isinstance(value, tuple | list) else (value,)) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _value(module: nn.Module, name: str) -> Tensor:
    value = module._buffers[name]
    assert value is not None
    return value


def _host_generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_host_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
