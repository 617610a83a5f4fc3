"""How the model is built and wired: looked at once, on a replay of the first step that is examined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments import experiment
from trainwright.replay.experiments.layers import MAPS
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.tour import Tour, checksum, leaves_of, nodes_of

_MOVES = {"view", "reshape", "flatten", "unflatten", "contiguous", "permute", "transpose", "squeeze", "unsqueeze"}
_MOVES |= {"dropout", "to", "float", "clone", "movedim", "expand", "rearrange"}
"""Functions after which a linear map is still one."""
_ASKS = {"size", "dim", "__get__", "numel", "stride", "is_contiguous", "element_size", "is_floating_point"}
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm))
_OWN = ("torch.", "trainwright.")
FEW_ROWS = 256  # positions up to here are exact in every 16-bit type


class _Survey(Tour):
    """What one forward and backward pass shows of the wiring."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self._from: dict[int, str] = {}  # a tensor that a linear map made, and nothing but moves came after
        self._shapes: dict[str, list[int]] = {}
        self._kept: list[Any] = []  # so that no id is given away twice
        self._uses: Counter[str] = Counter()
        self.chains: list[dict[str, Any]] = []
        self._cuts: list[tuple[str, str, list[Tensor]]] = []
        self.called: list[str] = []
        self.leaves: dict[int, Tensor] = {}
        self.custom: dict[str, str] = {}
        self.shuffles: list[dict[str, Any]] = []
        self.aliases: list[dict[str, Any]] = []

    def on_enter(self, path: str, module: nn.Module, given: list[Tensor], recomputed: bool) -> None:
        if path not in self.called:
            self.called.append(path)

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        if recomputed or self.stack:
            return
        self._from.clear()  # the last layer of a generator and the first of its critic are no chain
        outputs = tensors_of(output)
        self.leaves.update({id(leaf): leaf for leaf in leaves_of(outputs)})
        for node in nodes_of(outputs):
            made_by = getattr(type(node), "_forward_cls", None)
            if made_by is not None and not made_by.__module__.startswith(_OWN):
                self.custom[f"{made_by.__module__}.{made_by.__qualname__}"] = made_by.__name__

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = tensors_of([args, kwargs], 3)
        self._note_cut(name, given, result)
        if not isinstance(result, Tensor) or not self.stack:
            return
        if name in MAPS and len(given) > 1:
            self._note_map(given, result)
        elif name in _MOVES and given and id(given[0]) in self._from:
            self._tag(result, self._from[id(given[0])])
        elif name not in _ASKS:
            self._uses.update({self._from[id(t)] for t in given if id(t) in self._from})
        if name in ("view", "reshape"):
            self._note_shuffle(given[0], result)
        elif name in ("sin", "cos"):
            self._note_angles(given[0])

    def _tag(self, tensor: Tensor, weight: str) -> None:
        self._from[id(tensor)] = weight
        self._kept.append(tensor)

    def _note_map(self, given: list[Tensor], result: Tensor) -> None:
        """A linear layer: does the very output of another one enter it?"""
        x, weight = given[:2]
        name = self.names.get(id(weight))
        if name is None:
            return
        width = x.shape[-1] if weight.dim() == 2 else x.shape[1 - weight.dim()]
        self._shapes[name] = [int(weight.shape[0]), int(width), *map(int, weight.shape[2:])]
        plain = weight.requires_grad and weight.shape[1] == width
        before = self._from.get(id(x))
        if before is not None and before != name:
            chain = {"first": before, "second": name, "of": [self._shapes[before], self._shapes[name]]}
            if plain and chain not in self.chains:
                self.chains.append(chain)
            self._uses[before] += 1
        if plain:
            self._tag(result, name)

    def _note_cut(self, name: str, given: list[Tensor], result: Any) -> None:
        """A floating tensor without a graph, made of tensors with one."""
        if not isinstance(result, Tensor) or result.requires_grad or not result.is_floating_point():
            return
        sources = [t for t in given if t.requires_grad]
        if sources and len(self._cuts) < 256:
            how = "no_grad" if not torch.is_grad_enabled() else "data" if name == "__get__" else name
            self._cuts.append((how, self.stack[-1] if self.stack else "", sources))

    def _note_shuffle(self, x: Tensor, result: Tensor) -> None:
        """A view that gives the sizes in another order: transpose was meant, values end up in other samples."""
        was, now = list(x.shape), list(result.shape)
        if was != now and sorted(was) == sorted(now) and was[0] != now[0] and min(was[0], now[0]) > 1:
            self.shuffles.append({"module": self.stack[-1], "from": was, "to": now})

    def _note_angles(self, angles: Tensor) -> None:
        far, same = aliased(angles)
        if same and same * 10 >= far:
            kind = str(angles.dtype).removeprefix("torch.")
            self.aliases.append({"module": self.stack[-1], "dtype": kind, "far": far, "same": same})

    def used_otherwise(self, chain: dict[str, Any]) -> bool:
        return self._uses[chain["first"]] > 1

    def cuts(self, unreached: set[str]) -> list[dict[str, Any]]:
        """Where the graph ends above parameters that no gradient reaches, nearest to the loss first."""
        told: list[dict[str, Any]] = []
        for how, path, sources in reversed(self._cuts):
            behind = sorted({self.names[id(p)] for p in leaves_of(sources) if id(p) in self.names} & unreached)
            if behind and not any(set(behind) <= set(each["behind"]) for each in told):
                owners = {name.rpartition(".")[0] for name in behind}
                last = next((path for path in reversed(self.called) if path in owners), None)
                told.append({"how": how, "in": path, "last": last, "behind": behind})
        return told


def aliased(angles: Tensor) -> tuple[int, int]:
    """Positions far from 0, and how many of them have the very angles of their neighbour."""
    if not angles.is_floating_point() or angles.numel() > 2**24 or angles.requires_grad:
        return 0, 0
    rows = angles.detach().float()
    rows = rows[:, None] if rows.dim() == 1 else rows.flatten(0, -2)
    for table in (rows, rows.T):
        far = table.abs().amax(1) >= FEW_ROWS
        if len(table) > FEW_ROWS and bool(far.any()):
            return int(far.sum()), int(((table[1:] == table[:-1]).all(1) & far[1:]).sum())
    return 0, 0


@experiment("structure", when="first")
def structure(bench: ReplaySession) -> dict[str, Any]:
    """What is trained, what the graph reaches, and which layers follow each other with nothing between them."""
    survey = _Survey(bench)
    with bench.live():
        played = survey.go()
        owned = {id(p) for o in bench.optimizers for g in o.param_groups for p in g["params"]}
        trained = {survey.names[id(p)] for p in bench.player.subject.parameters if p.requires_grad and id(p) in owned}
        unreached = {name for name in trained if played.grads.get(name) is None}
        cuts = survey.cuts(unreached)
    held = _unregistered(bench, survey.leaves)
    return {
        **_counted(bench, trained),
        "unreached": sorted(unreached),
        "cuts": cuts,
        "unregistered": [{"held": name.partition("#")[0], "shape": list(t.shape)} for name, t in held.items()],
        "chains": [chain for chain in survey.chains if not survey.used_otherwise(chain)],
        "custom": sorted(survey.custom.values()),
        "shuffles": survey.shuffles[:4],
        "aliases": survey.aliases[:4],
    }


def _counted(bench: ReplaySession, trained: set[str]) -> dict[str, Any]:
    """How many weights are trained, and whether they are those of normalisations alone."""
    of_norms: set[int] = set()
    for module in bench.modules.values():
        if isinstance(module, _NORMS):
            of_norms.update(id(p) for p in module.parameters(recurse=False))
    parameters = dict(zip(bench.player.names, bench.player.subject.parameters))
    others = [name for name in trained if id(parameters[name]) not in of_norms]
    return {
        "trained": len(trained),
        "trained_beside_norms": len(others),
        "frozen_beside_norms": sum(id(p) not in of_norms and not p.requires_grad for p in parameters.values()),
    }


def _unregistered(bench: ReplaySession, leaves: dict[int, Tensor]) -> dict[str, Tensor]:
    """Leaves of the graph that are no model's parameters but that a module holds in a list, a dict or an attribute."""
    known = {id(p) for p in bench.player.subject.parameters} | {id(x) for x in bench.inputs}
    strange = {key: leaf for key, leaf in leaves.items() if key not in known}
    found: dict[str, Tensor] = {}
    for path, module in bench.modules.items() if strange else ():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or "hooks" in name:
                continue
            for leaf in _held(value):
                if strange.pop(id(leaf), None) is not None:
                    found[f"{'.'.join(p for p in (path, name) if p)}#{len(found)}"] = leaf
    return found


def strangers(bench: ReplaySession) -> dict[str, Tensor]:
    """The same by a replay, for who wants to train them."""
    survey = _Survey(bench)
    with bench.live():
        survey.go(upto="forward")
    return _unregistered(bench, survey.leaves)


def _held(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, list | tuple | set):
        for each in value:
            yield from _held(each, depth - 1)
    elif depth and isinstance(value, dict):
        yield from _held(list(value.values()), depth - 1)


@experiment("isolation", when="first")
def isolation(bench: ReplaySession) -> dict[str, Any]:
    """Whether the outputs for a sample change when another one does, with dropout off and BatchNorm on its own."""
    size = bench.size
    if size is None or size < 3 or _needs_batch(bench):
        return {"asked": False}
    if any(list(x.shape).count(size) > 1 for x in bench.inputs):  # a graph or a mask says who belongs to whom
        return {"asked": False}
    counts = [len(ids) for ids in bench.ids if ids]
    one = bench.run(Intervention(mode="eval"), upto="forward")
    for changed in (size // 2, 0):
        other = bench.run(Intervention(mode="eval", inputs=_swapped(size, changed)), upto="forward")
        moved, watched = _moved(one.outputs, other.outputs, size, changed)
        if watched and moved["own"] > 0:
            return {"asked": True, "size": size, "is_batch": size in counts, "changed": changed, **moved}
    return {"asked": False}


def _needs_batch(bench: ReplaySession) -> bool:
    """A BatchNorm that has no statistics of its own uses the batch's, always."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in bench.modules.values())


def _swapped(size: int, changed: int) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        leaf = leaf.clone()
        leaf[changed] = leaf[(changed + 1) % size]
        return leaf

    def inputs(number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(one(x) for x in args), {name: one(x) for name, x in kwargs.items()}

    return inputs


def _moved(ones: list[Any], others: list[Any], size: int, changed: int) -> tuple[dict[str, Any], bool]:
    """By how much the changed sample's outputs moved, and the others'; relative to the spread of the outputs."""
    told: dict[str, Any] = {"own": 0.0, "others": 0.0, "samples": 0}
    watched = False
    for one, other in zip(tensors_of(ones), tensors_of(others)):
        rows = [n for n, d in enumerate(one.shape) if d == size]
        if rows != [0] or one.shape != other.shape or not one.is_floating_point():
            continue  # of another size, or (B, B): samples against samples
        watched = True
        delta = (one.double() - other.double()).flatten(1).abs().amax(1) / (one.double().std() + 1e-12)
        told["own"] = max(told["own"], float(delta[changed]))
        delta[changed] = 0.0
        told["others"] = max(told["others"], float(delta.max()))
        told["samples"] = max(told["samples"], int((delta > 1e-3).sum()))
    return told, watched


class _Ledger(Tour):
    """Checksums of what the graph saves, and of what every module is given and gives."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.modified: list[tuple[str, list[int], Tensor]] = []
        self._first: dict[str, list[Tensor]] = {}
        self._again: list[tuple[str, Tensor]] = []
        norms = (m for m in bench.modules.values() if isinstance(m, _NormBase))
        self._written = {b.data_ptr() for m in norms for b in m.buffers(recurse=False)}

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        made = [checksum(t) for t in tensors_of(output) if t.is_floating_point()]
        if not made:
            return
        if recomputed:
            self._again.append((path, made[0]))
        else:
            self._first.setdefault(path, []).append(made[0])

    def pack(self, tensor: Tensor) -> Any:
        kept = tensor.detach()
        skip = not tensor.is_floating_point() or tensor.is_sparse or tensor.data_ptr() in self._written
        return kept, None if skip else checksum(kept), self.stack[-1] if self.stack else ""

    def unpack(self, packed: Any) -> Tensor:
        kept, before, path = packed
        if before is not None:
            self.modified.append((path, list(kept.shape), _differ(before, checksum(kept))))
        return kept  # type: ignore[no-any-return]

    def recomputed(self) -> dict[str, Any]:
        """How many modules ran again in the backward pass, and the first that gave something else there."""
        other = None
        for path, made in self._again:
            before = self._first.get(path, [])
            if before and all(bool(_differ(each, made)) for each in before):
                other = path
                break
        return {"again": len(self._again), "differs": other}


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Apart by more than what another order of summation gives; a scalar on the device."""
    return ((one - other).abs() > 1e-5 * (one.abs() + one[1].abs().sqrt())).any()


@experiment("integrity", when="first")
def integrity(bench: ReplaySession) -> dict[str, Any]:
    """Whether the backward pass reads what the forward pass had left for it, and recomputes what was."""
    with bench.live():
        ledger = _Ledger(bench)
        with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack):
            ledger.go()
        changed = [{"module": path, "shape": shape} for path, shape, flag in ledger.modified if bool(flag)]
        kinds = {path: type(module).__name__ for path, module in bench.modules.items()}
        told = ledger.recomputed()
    return {"modified": changed[:8], **told, "kind": kinds.get(told["differs"])}
