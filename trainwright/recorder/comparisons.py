"""Finds evaluations: passes without gradients whose outputs are compared with targets.

A rollout, a sampled sequence, a teacher or a target network also runs without gradients, but nothing compares its
outputs with targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trainwright.recorder.callers import Line, caller, calling_frame, line_within
from trainwright.recorder.listener import Listener, inside
from trainwright.recorder.pausable import PausableMode
from trainwright.recorder.program import tensors_of
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

Site: TypeAlias = tuple[Line, CodeType | None, Line]
"""The call site of a model: the line in the loop's function, and the innermost line of the user's source."""

LEAVES = frozenset({"item", "__float__", "__int__", "__format__", "tolist", "numpy", "__array__"})
"""Functions that convert the value of a tensor to Python or NumPy."""
CONVERSIONS = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"})
"""Functions that make tensors of data that are no tensors, such as labels in a collate function."""
EQUALITY = frozenset({"eq", "ne", "isclose"})
JOINS = frozenset(
    {"sub", "rsub", "mul", "rmul", "gather", "take_along_dim", "getitem", "dist", "cdist"}
    | {"pairwise_distance", "cosine_similarity", "logical_and", "bitwise_and", "and"}
)
"""Functions with which a metric written by hand compares outputs with targets."""


@cache
def loss_functions() -> frozenset[str]:
    """Returns the names of torch's loss functions: those with a reduction."""
    functions = inspect.getmembers(nn.functional, inspect.isfunction)
    return frozenset(name for name, each in functions if "reduction" in inspect.signature(each).parameters)


def plain_name(function: TorchFunction) -> str:
    """Returns the name of a torch function, which is the same for ``a - b``, ``a.sub(b)`` and ``a.sub_(b)``."""
    return str(getattr(function, "__name__", "?")).strip("_")


class EvaluationSites(Listener):
    """The call sites of a loop that are known to evaluate. ``loop_code`` returns the function that holds the loop.

    Register it before the listeners that read ``current``.
    """

    def __init__(self, loop_code: Callable[[], CodeType | None] = lambda: None) -> None:
        self._loop_code = loop_code
        self.current: Site = (None, None, None)
        """The site of the newest call without gradients of a watched model."""
        self.follow: Callable[[Sequence[nn.Module]], None] = lambda modules: None
        """Tracks the outputs of these copies of a model, too. Set by the probe of evaluations."""
        self._compared: set[Site] = set()
        self._trained_on: set[Site] = set()

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.current = self.here()

    def here(self) -> Site:
        """Returns the site of the current call. Takes about 5 us."""
        frame = calling_frame()
        inner = (None, None) if frame is None else (frame.f_code, frame.f_lineno)
        return line_within(self._loop_code()), *inner

    def add(self, sites: Iterable[Site]) -> None:
        """Marks sites whose outputs were compared with targets."""
        self._compared.update(sites)

    def exclude(self, sites: Iterable[Site]) -> None:
        """Marks sites whose outputs training uses, so that they are no evaluations."""
        self._trained_on.update(sites)

    def __contains__(self, site: object) -> bool:
        return site in self._compared and site not in self._trained_on


@dataclass(frozen=True, slots=True)
class Made:
    """The derivation of a tensor from outputs of a model.

    ``sites`` called the model. ``is_joined``: a function of JOINS has combined it with other data.
    """

    sites: frozenset[Site]
    is_joined: bool = False


class ComparedOutputs(PausableMode):
    """While it runs, tracks tensors that are computed from outputs of a model. Does not keep them alive.

    ``compared`` is called at each comparison with the name of the function, the output and the target.
    """

    def __init__(
        self, sites: EvaluationSites, compared: Callable[[str, Tensor, Tensor], None] = lambda *_: None
    ) -> None:
        super().__init__()
        self._sites, self._compared = sites, compared
        self.derived: TensorNotes[Made] = TensorNotes()
        """Tensors that were computed from outputs of a model."""
        self._constants: TensorNotes[None] = TensorNotes()  # tensors made of no data: noise, zeros
        self._passes: TensorNotes[set[int]] = TensorNotes()  # the passes after which each tensor with a graph was read
        self.stale_reads: int
        """The most passes after which the loop read one tensor that the training has made."""
        self.stale_at: str | None
        self.forget()

    def forget(self) -> None:
        """Forgets all tensors, because a new pass begins."""
        for notes in (self.derived, self._constants, self._passes):
            notes.clear()
        self.stale_reads, self.stale_at = 0, None
        self._num_returned = 0
        self._generating: set[Site] = set()  # sites whose outputs become inputs again, as in a sampler

    def trained_on(self, tensors: Iterable[Tensor]) -> None:
        """Records training inputs. The sites that made them are part of the training: a rollout, a teacher."""
        if self.derived:
            self._sites.exclude(site for each in tensors if (made := self.derived.get(each)) for site in made.sites)

    def returned(self, output: object, inputs: object, site: Site) -> None:
        """Records an output. A 0-d output of several inputs counts as a loss: targets are among the inputs."""
        self._num_returned += 1
        tensors, given = tensors_of(output), tensors_of(inputs, 3)
        if any(each in self.derived for each in given):
            self._generating.add(site)
        for each in tensors:
            self.derived[each] = Made(frozenset({site}))
        if len(given) > 1 and any(not each.dim() and each.is_floating_point() for each in tensors):
            self._sites.add({site})

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        if self.running and not inside.listeners and not torch.compiler.is_compiling():
            self._note(function, args, kwargs or {}, result)
        return result

    def _note(self, function: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        name, inputs = plain_name(function), tensors_of((args, kwargs), 3)
        made = [known for each in inputs if (known := self.derived.get(each)) is not None]
        for each in () if torch.is_grad_enabled() else inputs:
            if each.grad_fn is not None:
                if (passes := self._passes.get(each)) is None:
                    passes = self._passes[each] = set()
                passes.add(self._num_returned)
                if len(passes) > self.stale_reads:
                    self.stale_reads, self.stale_at = len(passes), caller()
        if not made:
            if all(each in self._constants for each in inputs):
                for each in tensors_of(result, 2):
                    if name not in CONVERSIONS or each.numel() < 2:
                        self._constants[each] = None
            return
        sites = frozenset().union(*(each.sites for each in made))
        is_joined = any(each.is_joined for each in made)
        if any(each.requires_grad for each in tensors_of(result, 2)):
            self._sites.exclude(sites)  # their outputs are part of a loss that is trained on
        if getattr(function, "__name__", "") in LEAVES:
            if is_joined and inputs[0].numel() == 1 and self._generating.isdisjoint(sites):
                self._sites.add(sites)
            return
        targets = [each for each in inputs if self._may_be_target(each)]
        is_equality = name in EQUALITY and any(each.numel() > 1 or inputs[0].numel() == 1 for each in targets)
        if targets and (is_equality or name in loss_functions()):
            self._sites.add(sites)
            self._compared(name, next(each for each in inputs if each in self.derived), targets[0])
        is_joined |= name in JOINS and any(each.dim() for each in targets)
        for each in [inputs[0]] if name == "setitem" else tensors_of(result, 2):
            self.derived[each] = Made(sites, is_joined)

    def _may_be_target(self, tensor: Tensor) -> bool:
        is_made = isinstance(tensor, nn.Parameter) or tensor in self._constants or tensor in self.derived
        return tensor.numel() > 0 and not is_made
