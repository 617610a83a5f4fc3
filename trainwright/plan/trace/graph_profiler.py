"""Reads the autograd graph of a loss: its nodes, edges and saved tensors. Works for real and fake tensors.

The names of saved tensors (``_raw_saved_*``) and the numbers of nodes (``_sequence_nr``) are private to torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainwright.plan.profile import LOSS, GraphProfile, ModuleProfile, Node, Role, SavedTensor
from trainwright.plan.trace.fake_tensors import AutogradNode, next_sequence_number
from trainwright.plan.trace.operator_call import tensors_in
from trainwright.plan.trace.tracker import ModulePaths

_RAW = "_raw_saved_"
_HAS_HOOKS, _IS_NONE = "hooks have already been set", "with value None"


class GraphProfiler:
    """Observes one forward pass of ``model``; ``read`` then profiles its autograd graph. Use it once.

    Costs hooks at each module call, and keeps the inputs of modules alive until it is closed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = ModulePaths(model)
        self.calls: Counter[str] = Counter()
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.inputs: dict[str, dict[int, Tensor]] = {}
        self._end = 0  # the sequence number of the first node after the model
        handles = self.paths.handles
        handles += [m.register_forward_pre_hook(self._on_enter, with_kwargs=True) for m in model.modules()]
        handles += [m.register_forward_hook(self._on_leave, prepend=True) for m in model.modules()]

    def _on_enter(self, _module: nn.Module, args: object, kwargs: object) -> None:
        path = self.paths.stack[-1]
        self.calls[path] += 1
        tensors = tensors_in((args, kwargs))
        self.inputs.setdefault(path, {}).update({t.untyped_storage()._cdata: t.detach() for t in tensors})

    def _on_leave(self, module: nn.Module, _args: object, output: object) -> None:
        if module is self.model:
            self._end = next_sequence_number()
        first = next(tensors_in((output,)), None)
        if first is not None:
            self.outputs.setdefault(self.paths.stack[-1], tuple(first.shape))

    def read(self, loss: Tensor, data: object, resident: Iterable[Tensor] = ()) -> GraphProfile:
        """Return the profile of the forward pass that ends in ``loss``. ``resident`` are further tensors that always
        exist.

        The graph stays usable: the backward pass can still run.
        """
        storages = _Storages(self.model, data, resident)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        nodes = _in_order(loss)
        places = {node: index for index, node in enumerate(nodes)}
        with _disable_current_modes():  # otherwise a number saved as a tensor reaches the hooks as a number
            profiled = tuple(self._node(node, places, names, storages) for node in nodes)
        return GraphProfile(tuple(self._modules(storages)), profiled)

    def close(self) -> None:
        """Remove the hooks and release the tensors."""
        self.paths.close()
        self.inputs.clear()

    def _node(
        self, node: AutogradNode, places: dict[AutogradNode, int], names: dict[int, str], storages: _Storages
    ) -> Node:
        inputs = tuple(places[behind] for behind, _ in node.next_functions if behind is not None)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            name = names.get(id(variable), "(input)")
            return Node("AccumulateGrad", name.rpartition(".")[0] if name in names.values() else "", (), inputs, name)
        tensors, hidden = _saved_tensors(node)
        saved = tuple(storages.saved(name, tensor) for name, tensor in tensors)
        return Node(node.name(), self._module(node._sequence_nr()), saved, inputs, "", hidden)

    def _module(self, number: int) -> str:
        path = self.paths.of(number)
        return LOSS if not path and number >= self._end else path

    def _modules(self, storages: _Storages) -> Iterator[ModuleProfile]:
        owners: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            parameters = {name: p for name, p in module._parameters.items() if p is not None}
            tied = tuple(owners[id(p)] for p in parameters.values() if id(p) in owners)
            new = {id(p): p for p in parameters.values() if id(p) not in owners}
            for name, p in parameters.items():
                owners.setdefault(id(p), f"{path}.{name}" if path else name)
            inputs = tuple(storages.saved("", tensor) for tensor in self.inputs.get(path, {}).values())
            yield ModuleProfile(
                path,
                type(module).__name__,
                sum(p.numel() for p in new.values()),
                sum(p.numel() for p in new.values() if p.requires_grad),
                tied,
                self.calls[path],
                self.outputs.get(path),
                inputs,
            )
        yield ModuleProfile(LOSS, "", 0, 0)


class _Storages:
    """Numbers storages in the order of their first use, with the role of each. Keeps them alive."""

    def __init__(self, model: nn.Module, data: object, resident: Iterable[Tensor]) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[UntypedStorage] = []
        self._roles: dict[int, Role] = {}
        leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
        known: list[tuple[Role, Iterable[Tensor]]] = [
            ("weights", model.parameters()),
            ("buffers", (*model.buffers(), *resident)),
            ("inputs", leaves),
        ]
        for role, tensors in known:
            for tensor in tensors:
                self._roles.setdefault(self._number(tensor), role)

    def saved(self, name: str, tensor: Tensor) -> SavedTensor:
        """Return the record of a tensor that autograd saved as ``name``."""
        number = self._number(tensor)
        return SavedTensor(name, number, tensor.untyped_storage().nbytes(), self._roles.get(number, "activations"))

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._alive.append(storage)
        return self._numbers.setdefault(storage._cdata, len(self._numbers))


def _in_order(loss: Tensor) -> list[AutogradNode]:
    """Return all nodes that ``loss`` depends on in the order of the forward pass, gradient accumulators last."""
    found: dict[AutogradNode, None] = {}
    waiting: list[AutogradNode | None] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [behind for behind, _ in reversed(node.next_functions)]
    return sorted(found, key=lambda node: math.inf if hasattr(node, "variable") else node._sequence_nr())


def _saved_tensors(node: AutogradNode) -> tuple[list[tuple[str, Tensor]], int]:
    """Return the saved tensors of a node by name, and the number of those that saved-tensor hooks have packed.

    Reading ``_saved_*`` would unpack the tensors, and so run a checkpointed block again. Instead, a hook is set on each
    saved tensor and receives it without unpacking; torch raises an error if the tensor has a hook already.
    """
    found: list[tuple[str, Tensor]] = []
    hidden = 0
    for attribute in dir(node):
        if not attribute.startswith(_RAW):
            continue
        raw = getattr(node, attribute)
        for one in raw if isinstance(raw, list | tuple) else (raw,):
            try:
                one.register_hooks(partial(_append, found, attribute.removeprefix(_RAW)), lambda tensor: tensor)
            except RuntimeError as error:
                if not any(reason in str(error) for reason in (_HAS_HOOKS, _IS_NONE)):
                    raise
                hidden += _HAS_HOOKS in str(error)
    return found, hidden


def _append(found: list[tuple[str, Tensor]], name: str, tensor: Tensor) -> Tensor:
    found.append((name, tensor))
    return tensor
