"""Fake tensors on a device that need not be there. The only file that touches torch's private parts for this."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainwright.errors import UsageError, require_choice
from trainwright.forecast.simulated_cuda import CASTS, stand_in

DeviceName = Literal["cpu", "cuda"]
UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fake tensors raise for an operator whose result depends on values, or that they do not know."""


def simulated_device(name: str) -> torch.device:
    """The device that stands for ``name``: tensors made on it under ``fake_tensors`` hold no memory.

    ``cuda`` is itself where there is a GPU, else a stand-in. Raises UsageError for a name that cannot be simulated.
    """
    require_choice("the simulated device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        return stand_in()
    return torch.device(name)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside, every new tensor is fake: shape, dtype, strides and device, but no values."""
    own = nn.Module._apply
    nn.Module._apply = _Moves().apply  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(), _Mode(allow_non_fake_inputs=True) as mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy looks at it
            yield mode
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __deepcopy__(self, memo: object) -> FakeTensorMode:
        """Else a copied parameter is of another mode, and each view of it gets a storage of its own."""
        return self


def without_fake_tensors() -> AbstractContextManager[object]:
    """Inside, new tensors are real ones again."""
    return unset_fake_temporarily()


class _Moves:
    """``Module.to`` and the like: torch's own swaps the contents of two tensors, which it refuses for fake ones.

    Parameters are replaced instead; tied ones stay tied within one call.
    """

    def __init__(self) -> None:
        self._moved: dict[tuple[int, int], tuple[Any, nn.Parameter, nn.Parameter]] = {}
        moves = self

        def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            for child in module.children() if recurse else ():
                child._apply(fn)  # type: ignore[no-untyped-call]
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = moves.moved(fn, parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            return module

        self.apply = apply

    def moved(self, fn: Callable[[Tensor], Tensor], parameter: nn.Parameter) -> nn.Parameter:
        key = (id(fn), id(parameter))
        if key not in self._moved:
            with torch.no_grad():
                changed = fn(parameter)
            new = parameter if changed is parameter else nn.Parameter(changed, parameter.requires_grad)
            self._moved[key] = (fn, parameter, new)  # both are kept, so that no other object gets their id
        return self._moved[key][2]


def fake_batch(data: Any, device: torch.device) -> Any:
    """``data``, nested in any way, with a fake tensor on ``device`` for each real one; under ``fake_tensors``."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    return tree_map_only(Tensor, fake, data)


def current_node() -> Any:
    """The autograd node that is computing, None outside a backward pass."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets; they are given in order."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def forget_casts() -> None:
    """As autocast does when the forward pass is over: drops the weights in low precision that nothing else holds."""
    CASTS.clear()


def as_on_cuda(optimizer: Optimizer) -> None:
    """torch's optimizers update all parameters at once on CUDA; for fake tensors they would choose the loop."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def untraceable(error: Exception) -> UsageError:
    """In plain words: which operator cannot be followed without values."""
    what = getattr(error, "func", None) or error
    return UsageError(
        f"the step cannot be simulated: the result of {what} depends on the values of its input",
        remedy="leave operators out that read values (.item(), unique, boolean indexing), or measure on the device",
    )
