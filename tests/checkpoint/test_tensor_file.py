"""Our writer of the safetensors format: the library reads what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainwright.checkpoint.tensor_file import _NAMES, write_tensors


def test_the_library_reads_it(tmp_path: Path) -> None:
    """All dtypes, a scalar, an empty tensor, names that sort otherwise than they were given, one that is not ASCII."""
    torch.manual_seed(0)
    tensors = {f"z.{dtype}": (torch.randn(3, 5) * 9).abs().to(dtype) for dtype in _NAMES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "größe": torch.ones(7)}
    write_tensors(tensors, tmp_path / "ours")
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_what_has_no_name_in_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a: a tensor of torch\.complex128"):
        write_tensors({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "ours")
