"""The names of the parts of a run: paths as the author of the model writes them, and unique among several models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))


def plain_name(name: str) -> str:
    """A path without the segments that torch.compile, activation checkpointing and FSDP put into it."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def named_roots(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each with what its paths begin with: "" where it alone has parameters, else its number.

    One without parameters beside others, such as a loss, has the name of its class.
    """
    trained = [root for root in roots if any(True for _ in root.parameters())]
    for number, root in enumerate(roots):
        if len(roots) == 1 or trained == [root]:
            yield "", root
        else:
            yield str(number) if root in trained or not trained else type(root).__name__, root


def named_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path. A wrapper comes before what it wraps, and has the same path."""
    for start, root in named_roots(roots):
        for path, module in root.named_modules():
            yield _joined(start, path), module


def named_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter with its path."""
    for start, root in named_roots(roots):
        for path, parameter in root.named_parameters():
            yield _joined(start, path), parameter


def _joined(start: str, path: str) -> str:
    return plain_name(".".join(part for part in (start, path) if part))
