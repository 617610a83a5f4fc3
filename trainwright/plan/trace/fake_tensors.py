"""Fake tensors on a device that need not be present, and the private torch functions that they need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.rng import preserved_rng
from trainwright.errors import UsageError, require_choice
from trainwright.plan.trace.simulated_cuda import register_simulated_cuda
from trainwright.plan.trace.simulated_lstm import simulated_lstm

DeviceName = Literal["cpu", "cuda"]
Data = TypeVar("Data")
UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""The exceptions of fake tensors for operators that are unknown or whose result depends on values."""


class AutogradNode(Protocol):
    """The part of an autograd node that is read here. ``_sequence_nr`` is private to torch."""

    @property
    def next_functions(self) -> tuple[tuple[AutogradNode | None, int], ...]: ...

    def name(self) -> str: ...

    def _sequence_nr(self) -> int: ...


def simulated_device(name: str) -> torch.device:
    """Return the device that stands for ``name``: tensors made on it under ``fake_tensors`` hold no memory.

    ``cuda`` is the real device if there is a GPU, else a simulated one. Raises UsageError for any other name.
    """
    require_choice("the simulated device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        return register_simulated_cuda()
    return torch.device(name)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Enter a context in which every new tensor is fake: it has shape, dtype, strides and device, but no values.

    The random state is restored, because operators on fake tensors also draw from the generators.
    """
    original = nn.Module._apply
    nn.Module._apply = _module_apply()  # type: ignore[method-assign]
    try:
        key = "CUDA" if torch.cuda.is_available() else "PrivateUse1"
        mode = _Mode(allow_non_fake_inputs=True)
        with preserved_rng(), warnings.catch_warnings(), simulated_lstm(key), mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy reads it
            yield mode
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __deepcopy__(self, memo: object) -> FakeTensorMode:
        """Return self.

        Otherwise, a copied parameter would belong to another mode, and each view of it would get its own storage.
        """
        return self


def _module_apply() -> Callable[..., nn.Module]:
    """Return ``Module._apply`` for fake tensors; ``Module.to`` and similar methods call it.

    torch's version swaps the contents of two tensors, which it refuses for fake ones. Here parameters are replaced;
    tied parameters stay tied within one call.
    """
    replacements: dict[tuple[int, int], tuple[object, nn.Parameter, nn.Parameter]] = {}

    def replaced(fn: Callable[[Tensor], Tensor], parameter: nn.Parameter) -> nn.Parameter:
        key = (id(fn), id(parameter))
        if key not in replacements:
            with torch.no_grad():
                changed = fn(parameter)
            new = parameter if changed is parameter else nn.Parameter(changed, parameter.requires_grad)
            replacements[key] = (fn, parameter, new)  # both are kept, so that no other object gets their id
        return replacements[key][2]

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replaced(fn, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    return apply


def fake_batch(data: Data, device: torch.device) -> Data:
    """Copy ``data``, nested in any way, with a fake tensor on ``device`` for each real one.

    Call it under ``fake_tensors``.
    """

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    copied: Data = tree_map_only(Tensor, fake, data)
    return copied


def current_node() -> AutogradNode | None:
    """Return the autograd node that is running, or None outside a backward pass."""
    node: AutogradNode | None = torch._C._current_autograd_node()
    return node


def in_backward() -> bool:
    """Return True if a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def next_sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread; the numbers rise by one."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def use_foreach(optimizer: Optimizer) -> None:
    """Set ``foreach`` as torch's optimizers do on CUDA; for fake tensors, they would update one tensor at a time."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def untraceable(error: Exception) -> UsageError:
    """Return the error that names the operator whose result depends on values."""
    operator = getattr(error, "func", None) or error
    return UsageError(
        f"the step cannot be simulated: the result of {operator} depends on the values of its input",
        remedy="leave operators out that read values (.item(), unique, boolean indexing), or measure on the device",
    )
