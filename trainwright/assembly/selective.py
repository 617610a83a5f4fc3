"""The forward pass of a block under selective activation checkpointing, which is rerun in backward with the same bits.

The second run starts from the random generators and the buffers (BatchNorm's statistics, spectral norm's vectors) that
the first run started from, and leaves both unchanged. Saved outputs are returned instead of being computed. The output
of an operator that draws random numbers is never saved: skipping the operator would shift all later draws.

torch's ``create_selective_checkpoint_contexts`` also saves outputs, but fails if a saved output is changed in place
later in the block, and if a weight is used twice under autocast (it counts the casts, of which there is one). It also
makes each operator of the forward pass take half as much time again. It is used under torch.compile only.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
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
"""ATen operators by family. Any other operator is a separate family: ``"gelu"``, ``"native_layer_norm"``."""
_FAMILY_OF = {f"aten::{op}": family for family, ops in FAMILIES.items() for op in ops}
_CASTS = ("_to_copy", "clone", "detach")
"""Operators that run more or less often in the second run, because autocast caches the casts of weights."""


@cache
def family_of(op: OpOverload) -> str | None:
    """Return the family of an operator, or None if its output cannot be saved."""
    name = op._schema.name
    if op._schema.is_mutable or name.removeprefix("aten::") in _CASTS:
        return None
    return _FAMILY_OF.get(name, name.removeprefix("aten::"))


def draws_random_numbers(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return True if this call advances a random generator. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


class KeepRule:
    """Decides which outputs of one run are saved. ``keep`` names operator families and single calls, ``"matmul:3"``."""

    def __init__(self, keep: Sequence[str]) -> None:
        self._keep = frozenset(keep)
        self._families = {site.partition(":")[0] for site in keep}
        self._calls: Counter[str] = Counter()

    def site(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
        """Return the name of this call within its family, ``"matmul:3"``, or None if its output is not saved."""
        family = family_of(op)
        if family not in self._families:
            return None
        site = f"{family}:{self._calls[family]}"
        self._calls[family] += 1
        if not (family in self._keep or site in self._keep) or draws_random_numbers(op, args, kwargs):
            return None
        return site


class _Saved(NamedTuple):
    """An output, and the version counter of each of its tensors."""

    value: object
    versions: list[int]


class _SaveOutputs(TorchDispatchMode):
    """The first run: stores outputs in ``saved``, by site."""

    def __init__(self, keep: Sequence[str], saved: dict[str, _Saved]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._saved = KeepRule(keep), saved
        self._sites: dict[int, str] = {}  # by storage

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            if self._sites:
                self._copy_saved(written(func, args))
            return func(*args, **kwargs)
        site = self._rule.site(func, args, kwargs)
        out = func(*args, **kwargs)
        if site is not None:
            self._saved[site] = _save(out, _alias)
            self._sites.update({storage_number(tensor): site for tensor in _tensors(out)})
        return out

    def _copy_saved(self, changed: Sequence[Tensor]) -> None:
        """Copy the saved outputs that an operator is about to change in place."""
        for tensor in changed:
            site = self._sites.pop(storage_number(tensor), None)
            if site is not None:
                self._saved[site] = _save(self._saved[site].value, torch.clone)


class _ReuseOutputs(TorchDispatchMode):
    """The second run: returns each saved output once; a third run computes it."""

    def __init__(self, keep: Sequence[str], saved: dict[str, _Saved]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._saved = KeepRule(keep), saved

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        site = self._rule.site(func, args, kwargs)
        saved = self._saved.pop(site, None) if site is not None else None
        if saved is None:
            return func(*args, **kwargs)
        if [tensor._version for tensor in _tensors(saved.value)] != saved.versions:
            raise UsageError(
                f"activation checkpointing saved the output of {func._schema.name}, and it was changed in place after "
                "its block",
                remedy="write the model without that in-place operation, or use model.activation_checkpointing: block",
            )
        return saved.value


class CheckpointedForward:
    """The function for ``torch.utils.checkpoint``: its first call is the forward pass, later ones rerun it in backward.

    ``keep`` names the sites whose outputs are saved, ``buffers`` the buffers that the pass may change.
    ``torch.utils.checkpoint`` restores torch's generators; those of Python and NumPy, by which some models drop layers,
    are restored here.
    """

    def __init__(
        self, forward: Callable[..., object], keep: Sequence[str], buffers: Sequence[tuple[nn.Module, str]]
    ) -> None:
        self._forward, self._keep = forward, keep
        self._called = False
        self._saved: dict[str, _Saved] = {}
        self._buffers = [(module, name, _value(module, name).detach().clone()) for module, name in buffers]
        self._generators = _host_generators()

    def __call__(self, *args: object, **kwargs: object) -> object:
        with ExitStack() as contexts:
            if self._called:
                contexts.enter_context(self._restored())
            if self._keep:
                contexts.enter_context((_ReuseOutputs if self._called else _SaveOutputs)(self._keep, self._saved))
            self._called = True
            return self._forward(*args, **kwargs)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Context with the buffers and generators of the first run; restores the current ones afterwards.

        Buffers are replaced, not written to: autograd may have saved the current tensors.
        """
        live, generators = [_value(module, name) for module, name, _ in self._buffers], _host_generators()
        for module, name, value in self._buffers:
            module._buffers[name] = value.clone()
        _set_host_generators(self._generators)
        try:
            yield
        finally:  # torch ends the second run by an exception once it has every tensor that it needs
            for (module, name, _), value in zip(self._buffers, live, strict=True):
                module._buffers[name] = value
            _set_host_generators(generators)


def written(op: OpOverload, args: Sequence[object]) -> list[Tensor]:
    """Return the tensors among ``args`` that an operator changes in place."""
    return [
        tensor
        for parameter, value in zip(op._schema.arguments, args, strict=False)
        if parameter.alias_info is not None and parameter.alias_info.is_write
        for tensor in _tensors(value)
    ]


def _save(out: object, copied: Callable[[Tensor], Tensor]) -> _Saved:
    value = out
    if isinstance(out, Tensor):
        value = copied(out)
    elif isinstance(out, tuple | list):
        value = tuple(copied(each) if isinstance(each, Tensor) else each for each in out)
    return _Saved(value, [tensor._version for tensor in _tensors(value)])


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and version counter, outside of the graph of ``tensor``."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(value: object) -> list[Tensor]:
    return [each for each in (value if isinstance(value, tuple | list) else (value,)) if isinstance(each, Tensor)]


def storage_number(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, while that memory is alive."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _value(module: nn.Module, name: str) -> Tensor:
    value = module._buffers[name]
    assert value is not None
    return value


def _host_generators() -> tuple[tuple[Any, ...], object]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_host_generators(states: tuple[tuple[Any, ...], object]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
