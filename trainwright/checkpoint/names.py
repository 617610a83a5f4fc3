"""Names of modules and parameters: paths as the author of the model writes them, unique among several models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

SHARED = "_shared_weights"
"""Name of the module of a pipeline stage that holds weights under the names that they have on another stage."""
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", SHARED))


def plain_name(name: str) -> str:
    """Return a path without the segments that torch.compile, activation checkpointing, FSDP and stages insert."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def named_roots(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each root with the prefix of its paths: "" if it alone has parameters, else its number.

    A root without parameters among others, such as a loss, has the name of its class.
    """
    trained = [root for root in roots if any(True for _ in root.parameters())]
    for number, root in enumerate(roots):
        if len(roots) == 1 or trained == [root]:
            yield "", root
        else:
            yield str(number) if root in trained or not trained else type(root).__name__, root


def named_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its path. A wrapper comes before the wrapped module, and has the same path."""
    for start, root in named_roots(roots):
        for path, module in root.named_modules():
            yield _joined(start, path), module


def named_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter with its path."""
    for start, root in named_roots(roots):
        for path, parameter in root.named_parameters():
            yield _joined(start, path), parameter


def _joined(start: str, path: str) -> str:
    return plain_name(".".join(part for part in (start, path) if part))
