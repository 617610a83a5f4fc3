"""Applies activation checkpointing to a model, block by block, as specified by a ``Checkpointing``.

Gradients, random numbers and buffers are bit-identical to a run without it; see ``CheckpointedForward``.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.errors import UsageError
from trainwright.plan.checkpointing import Checkpointing

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
"""Operators whose number of calls may differ in the recomputation, because autocast caches the casts of weights."""


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
    """Dispatch mode of the first run, in the forward pass: stores outputs in ``saved``, by site (see ``KeepRule``)."""

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
    """Dispatch mode of the second run, in backward: returns each saved output once. A third run computes it again."""

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
    """The function for ``torch.utils.checkpoint``: called in the forward pass, and again in the backward pass.

    ``keep`` names the sites whose outputs are saved, ``buffers`` the buffers that the pass may change.
    ``torch.utils.checkpoint`` restores torch's generators. This class also restores the generators of Python and NumPy,
    by which some models drop layers.
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
        """Context with the buffers and generators of the first run. Afterwards restores the current values.

        Buffers are replaced, not written to, because autograd may have saved the current tensors.
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


SELECTIVE = ("matmul", "convolution", "attention")
"""The policy ``selective``: outputs that take many FLOPs are saved; memory-bound operators are computed again."""
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model.

    These are the layers of a Hugging Face model, else ``model.blocks``, else the largest list of modules of one class.

    Raises:
        UsageError: There are none.
    """
    if layers := _hugging_face_layers(model):
        return layers
    declared = getattr(model, "blocks", None)
    if isinstance(declared, nn.ModuleList | nn.Sequential):
        return list(declared)
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    uniform_lists = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if not uniform_lists:
        raise UsageError(
            "a setting is per block, and the model has no list of equal blocks",
            remedy="give the model an attribute `blocks` (nn.ModuleList or nn.Sequential)",
        )
    return max(uniform_lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


def apply_checkpointing(model: nn.Module, checkpointing: Checkpointing) -> int:
    """Apply activation checkpointing to the blocks of a model; return the number of blocks that have it.

    Replaces earlier activation checkpointing. It is active in training mode with gradients enabled. Names in the state
    dict do not change. Models of ``transformers`` are switched by their own method, which also disables the KV cache.

    Raises:
        UsageError: The model has no blocks, or not as many as ``checkpointing`` specifies.
    """
    blocks = find_blocks(model)
    if len(blocks) != len(checkpointing.blocks):
        raise UsageError(
            f"activation checkpointing for {len(checkpointing.blocks)} blocks does not fit a model of {len(blocks)}",
            remedy="plan it again for this model",
        )
    regions = [Region(block, keep) for block, keep in zip(blocks, checkpointing.blocks, strict=True)]
    if _hugging_face_layers(model):
        _switch_hugging_face(model, regions)
    else:
        for region in regions:
            region.install()
    return checkpointing.count


def checkpointing_as_requested(model: nn.Module, setting: str, planned: Checkpointing | None = None) -> Checkpointing:
    """Apply ``model.activation_checkpointing`` of a recipe and return what was applied.

    If the setting is ``auto`` or an amount of memory, applies ``planned``. Raises UsageError if ``planned`` is missing.
    """
    if setting in ("block", "selective"):
        planned = Checkpointing.every(len(find_blocks(model)), SELECTIVE if setting == "selective" else ())
    if planned is None:
        raise UsageError(f"{setting!r} requires a plan, and there is none", remedy="set it to none, block or selective")
    apply_checkpointing(model, planned)
    return planned


class Region:
    """One block and the sites in it whose outputs are saved; ``keep`` None: no activation checkpointing."""

    def __init__(self, block: nn.Module, keep: tuple[str, ...] | None) -> None:
        self.block = block
        self.keep = keep
        self.buffers = [
            (module, name)
            for module in block.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set  # these are usually tables of constants
        ]

    def install(self) -> None:
        """Replace the block's ``forward``. Hooks on the block run outside the checkpointed part, as FSDP requires."""
        installed = self.block.__dict__.get("forward")
        if isinstance(installed, partial) and installed.func is _forward:
            forward = installed.args[1]
            del self.block.forward
        else:
            forward = self.block.forward
        if self.keep is not None:
            self.block.forward = partial(_forward, self, forward)
        elif getattr(forward, "__func__", None) is not type(self.block).forward:
            self.block.forward = forward  # restores an instance attribute of the user

    def run(self, forward: Callable[..., object], *args: object, **kwargs: Any) -> object:
        """Return ``forward(*args, **kwargs)`` under activation checkpointing."""
        if self.keep is None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph restores neither buffers nor generators of the host
            if not self.keep:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, self.keep), **kwargs)
        return checkpoint(CheckpointedForward(forward, self.keep, self.buffers), *args, use_reentrant=False, **kwargs)


def _forward(region: Region, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if not (region.block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return region.run(forward, *args, **kwargs)


def _contexts(keep: tuple[str, ...]) -> Contexts:
    """Return torch's contexts of the forward pass and of its second run, which torch.compile supports."""
    rule = KeepRule(keep)

    def policy(_context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_saved = isinstance(op, OpOverload) and rule.site(op, args, kwargs) is not None
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _hugging_face_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that ``transformers`` itself can checkpoint, in the order of the model."""
    return [m for m in model.modules() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)]


def _switch_hugging_face(model: nn.Module, regions: Sequence[Region]) -> None:
    """Switch checkpointing by the model's own method, which also disables the KV cache; its name changed in 5.x."""
    on = any(region.keep is not None for region in regions)
    verb = "enable" if on else "disable"
    for module in model.modules():
        if switch := getattr(module, f"activation_checkpointing_{verb}", None):
            switch({"use_reentrant": False}) if on else switch()
            break
        if switch := getattr(module, f"gradient_checkpointing_{verb}", None):
            switch({"use_reentrant": False}) if on else switch()
            break
    for region in regions:
        layer: Any = region.block
        layer.gradient_checkpointing = region.keep is not None
        layer._gradient_checkpointing_func = region.run
