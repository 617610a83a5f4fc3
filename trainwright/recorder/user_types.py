"""Types of the values in the user's loop: arguments of calls, functions of torch, data loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a torch function or a module, of any type."""

Kwargs: TypeAlias = dict[str, Any]
"""The keyword arguments."""

TorchFunction: TypeAlias = Callable[..., Any]
"""A function or method of torch, with any signature."""

Loader: TypeAlias = DataLoader[Any]
"""A DataLoader of samples of any type."""
