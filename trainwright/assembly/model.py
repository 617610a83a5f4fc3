"""Checks and changes of a model before training: readiness, frozen parameters, number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.weights import require_python
from trainwright.errors import Problem, UsageError


def require_ready(model: nn.Module) -> None:
    """Raise UsageError for weights without shape or memory, and for a model made by torch.jit."""
    require_python(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} of the model has no shape yet (a lazy module)",
                remedy="call the model once on one batch when it is made: model(x[:2])",
            )
        if tensor.is_meta:
            raise UsageError(
                f"{name} of the model is on the meta device and has no values",
                remedy="build the model outside torch.device('meta'), or model.to_empty(device='cpu') and fill it",
            )


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Disable gradients for every parameter whose name matches a glob pattern; return their names.

    Raises UsageError for a pattern that matches nothing, and if nothing is left to train.
    """
    for found in unmatched_patterns(model, patterns):
        raise UsageError(found.rule, remedy=found.remedy)
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names, both valid
    frozen = [name for pattern in patterns for name in named if fnmatchcase(name, pattern)]
    for name in frozen:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("nothing is left to train: every parameter is frozen", remedy="freeze fewer parameters")
    return list(dict.fromkeys(frozen))


def unmatched_patterns(model: nn.Module, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of patterns of ``model.freeze`` that match no parameter name."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for number, pattern in enumerate(patterns):
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        close = get_close_matches(pattern[:100], names, n=1, cutoff=0.3)
        remedy = f"names are, for instance: {', '.join(names[:6])}"
        if close:
            remedy = f"patterns are globs such as 'blocks.0.*'; the nearest name is {close[0]!r}"
        yield Problem(f"model.freeze.{number}", f"freeze: no parameter is named like {pattern!r}", remedy=remedy)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters; tied weights count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
