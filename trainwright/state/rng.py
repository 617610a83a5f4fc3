"""All random number generators that training draws from: Python's, NumPy's, torch's on CPU and CUDA."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seeds every generator of this process; ``seed`` is any non-negative integer."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA and other devices too


@dataclass(frozen=True)
class RngBag:
    """The state of every generator at one instant. ``torch_cuda`` has one entry for each visible device."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...] = ()

    @classmethod
    def capture(cls) -> RngBag:
        """Copies the states; costs a device-to-host copy of a few bytes for each CUDA device in use."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Puts every generator back to what it was."""
        random.setstate(self.python)
        np.random.set_state(dict(self.numpy))
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))

    def to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors for safetensors and the rest for JSON."""
        tensors = {"torch_cpu": self.torch_cpu}
        tensors |= {f"torch_cuda.{i}": state for i, state in enumerate(self.torch_cuda)}
        tensors["numpy_key"] = torch.from_numpy(self.numpy["state"]["key"].astype(np.int64))
        version, internal, gauss = self.python
        numpy_rest = {
            "bit_generator": self.numpy["bit_generator"],
            "pos": int(self.numpy["state"]["pos"]),
            "has_gauss": int(self.numpy["has_gauss"]),
            "gauss": float(self.numpy["gauss"]),
        }
        return tensors, {"python": [version, list(internal), gauss], "numpy": numpy_rest}

    @classmethod
    def from_parts(cls, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> RngBag:
        """The inverse of ``to_parts``."""
        version, internal, gauss = rest["python"]
        numpy_rest = rest["numpy"]
        numpy_state = {
            "bit_generator": numpy_rest["bit_generator"],
            "state": {"key": tensors["numpy_key"].numpy().astype(np.uint32), "pos": numpy_rest["pos"]},
            "has_gauss": numpy_rest["has_gauss"],
            "gauss": numpy_rest["gauss"],
        }
        cuda = [name for name in tensors if name.startswith("torch_cuda.")]
        ordered = sorted(cuda, key=lambda name: int(name.rpartition(".")[2]))
        return cls(
            (version, tuple(internal), gauss),
            numpy_state,
            tensors["torch_cpu"],
            tuple(tensors[name] for name in ordered),
        )


@contextmanager
def preserved_rng() -> Iterator[None]:
    """What happens inside draws from the generators and leaves no trace in them."""
    before = RngBag.capture()
    try:
        yield
    finally:
        before.restore()
