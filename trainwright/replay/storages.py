"""Storages of the tensors in a replay: the range of values in each, and the names of those that no op made."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainwright.replay.mechanism import Range, range_of

_View: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""A view of a storage: offset, shape, stride, dtype, and the version of the tensor."""


class Storages:
    """Storages by key. ``names`` maps the key of a storage to the kind and the name of its tensor."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[str, str]] = {}
        self._pins: dict[int, StorageWeakRef] = {}
        self._ranges: dict[int, dict[_View, Range]] = {}

    def name(self, tensor: Tensor, kind: str, name: str) -> None:
        """Names a tensor that no op made: an input, a weight, a buffer, a gradient."""
        if (key := self.key(tensor)) is not None:
            self.names.setdefault(key, (kind, name))

    def range(self, tensor: Tensor) -> Range:
        """Returns the current range of the values of a tensor, computed once for each of its versions."""
        key = self.key(tensor)
        if key is None:
            return range_of(tensor if tensor.layout == torch.strided else tensor._values())
        version = 0 if tensor.is_inference() else tensor._version
        view = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)
        known = self._ranges.setdefault(key, {})
        if view not in known:
            known[view] = range_of(tensor)
        return known[view]

    def forget(self, tensor: Tensor) -> None:
        """Drops the range of a tensor that was written to."""
        self._ranges.pop(self.key(tensor) or 0, None)

    def key(self, tensor: Tensor) -> int | None:
        """Returns the key of a tensor's storage. A weak reference prevents reuse of its address."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except NotImplementedError:  # sparse, or wrapped by a transform of torch.func
            return None
        key = int(reference.cdata)
        self._pins.setdefault(key, reference)
        return key


def is_float(tensor: Tensor) -> bool:
    """Returns True for a floating-point or complex tensor of an ordinary kind, whose values can be read."""
    is_known = tensor.layout in (torch.strided, torch.sparse_coo) and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return is_known and (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta"
