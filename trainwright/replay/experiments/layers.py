"""What the layers of a step do: activations, gradients over depth, attention, routers, BatchNorm, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.recorder.program import tensors_of
from trainwright.replay.classified import classes_in
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.replay.tour import Tour

RELUS = {"relu", "relu_", "threshold", "threshold_", "relu6"}
DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"}
MAPS = {"linear", "conv1d", "conv2d", "conv3d"}
_PRODUCTS = {"matmul", "bmm", "__matmul__", "einsum", "baddbmm"}
_KEEPS = {"dropout", "to", "type_as", "nan_to_num", "clone", "contiguous", "view", "reshape", "expand"} | DROPOUTS
_CHOICES = {"topk", "max", "argmax", "argsort", "sort", "multinomial"}
STRONG = 0.7  # a dropout below is nobody's fault


class _Look(Tour):
    """One pass through the layers."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.relus: dict[str, dict[str, Any]] = {}
        self.attention: dict[str, dict[str, Any]] = {}
        self.routers: dict[str, dict[str, Any]] = {}
        self.norms: dict[str, dict[str, Any]] = {}
        self.dropout: dict[str, float] = {}
        self.order: list[str] = []
        self._scores: dict[int, tuple[str, Tensor, Tensor]] = {}
        self._gates: dict[int, tuple[str, Tensor]] = {}
        self._kept: list[Any] = []
        self._usual: tuple[int, Tensor] = (0, torch.zeros(0))

    def on_enter(self, path: str, module: nn.Module, given: list[Tensor], recomputed: bool) -> None:
        if path not in self.order:
            self.order.append(path)
        if not isinstance(module, _BatchNorm) or not given or not module.training:
            return
        x = given[0]
        seen = self.norms.setdefault(path, {"values": 0, "samples": 0, "calls": 0, "again": 0})
        seen["again" if recomputed else "calls"] += 1
        if not recomputed:
            seen |= {"values": x.numel() // max(1, x.shape[1]), "samples": int(x.shape[0])}
            seen["momentum"] = module.momentum

    @torch.no_grad()
    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if not self.stack:
            return
        if name in MAPS and len(given := tensors_of([args, kwargs], 3)) > 1:
            self._usual = id(result), given[1].detach().flatten(1).norm(dim=1) * given[0].detach().pow(2).mean().sqrt()
            self._kept.append(result)
        if name in RELUS and args[0].is_floating_point() and not name.endswith("_"):
            self._note_relu(args[0])
        elif name in DROPOUTS:
            self._note_dropout(args, kwargs)
        elif name == "softmax" and args[0].dim() >= 2:
            self._gates[id(result)] = self.stack[-1], args[0].detach()
            self._scores[id(result)] = self.stack[-1], args[0].detach(), result.detach()
            self._kept.append(result)
        elif name == "scaled_dot_product_attention":
            self._note_fused(args, kwargs)
        elif name == "multi_head_attention_forward":
            self._note_module(args, kwargs)
        if name in _PRODUCTS:
            self._note_product(args)
        elif name in _KEEPS and args and id(args[0]) in self._scores:
            self._scores[id(result)] = self._scores[id(args[0])]
            self._kept.append(result)
        if name in _CHOICES and args and isinstance(args[0], Tensor):
            self._note_choice(name, args[0], result)

    def _note_relu(self, x: Tensor) -> None:
        """Units whose input lies so far below 0 that no sample will ever reach it: by its own spread, and by what its
        weights make of such an input. Deep in a plain net signals hardly differ, and that alone makes no unit dead.
        """
        units = x.detach().float()
        units = units.movedim(1, -1) if units.dim() in (4, 5) else units
        units = units.flatten(0, -2) if units.dim() > 1 else units[:, None]
        if len(units) < 8:
            return
        mean, spread = units.mean(0), units.std(0)
        varies = spread > 1e-5 * mean.abs()
        made_by, usual = self._usual
        far = torch.maximum(spread, usual.float()) if made_by == id(x) and len(usual) == len(spread) else spread
        dead = (units.amax(0) < 0) & (mean < -4 * far) & varies
        self._keep_worse(
            self.relus,
            {
                "units": units.shape[1],
                "dead": float(dead.float().mean()),
                "never": float((units.amax(0) <= 0).float().mean()),
                "varies": float(varies.float().mean()),
                "rows": len(units),
                "furthest": float(mean.min()),
            },
            "dead",
        )

    def _keep_worse(self, where: dict[str, dict[str, Any]], told: dict[str, Any], by: str) -> None:
        known = where.get(self.stack[-1])
        if known is None or told[by] > known[by]:
            where[self.stack[-1]] = told

    def _note_dropout(self, args: Any, kwargs: Any) -> None:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if training and isinstance(p, float):
            self.dropout[self.stack[-1]] = max(p, self.dropout.get(self.stack[-1], 0.0))

    # attention: a softmax whose outcome weighs something

    def _note_product(self, args: Any) -> None:
        for weights in [t for t in tensors_of(args, 2) if id(t) in self._scores]:
            path, scores, spread = self._scores[id(weights)]
            if scores.dim() >= 3 and scores.shape[-1] > 1:
                self._note_attention(path, scores.float(), spread.float())

    def _note_attention(self, path: str, scores: Tensor, weights: Tensor) -> None:
        seen = scores[scores.isfinite() & (scores.abs() < 1e4)]
        if not seen.numel():
            return
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
        allowed = (weights > 0).sum(-1).clamp(min=1).float()
        even = entropy[allowed > 1] / allowed[allowed > 1].log() if bool((allowed > 1).any()) else torch.ones(1)
        told = {"highest": float(seen.abs().max()), "spread": float(seen.std()), "evenness": float(even.mean())}
        known = self.attention.get(path)
        if known is None or told["highest"] > known["highest"]:
            self.attention[path] = told

    def _note_fused(self, args: Any, kwargs: Any) -> None:
        q, k = (t.detach().float() for t in args[:2])
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        few = max(1, (1 << 22) // max(1, q.shape[-2] * k.shape[-2]))  # scores: more are not needed to know
        q, k = q.flatten(0, -3)[:few], k.flatten(0, -3)[:few]
        if q.shape[0] != k.shape[0]:
            return  # grouped heads
        scores = q @ k.transpose(-1, -2) * scale
        if kwargs.get("is_causal", False):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        self._note_attention(self.stack[-1], scores, scores.softmax(-1))

    def _note_module(self, args: Any, kwargs: Any) -> None:
        """nn.MultiheadAttention, which is one function."""
        named = dict(zip(("query", "key", "value", "embed", "heads", "weight", "bias"), args)) | kwargs
        q, k, heads, weight, bias = (named.get(n) for n in ("query", "key", "heads", "weight", "bias"))
        if not isinstance(weight, Tensor) or q is None or k is None or q.dim() != 3:
            return
        d = q.shape[-1]
        parts = [None, None] if bias is None else [bias[:d].detach(), bias[d : 2 * d].detach()]
        q = nn.functional.linear(q.detach(), weight[:d].detach(), parts[0])
        k = nn.functional.linear(k.detach(), weight[d : 2 * d].detach(), parts[1])
        q, k = (x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3) for x in (q, k))  # from (T, B, D)
        self._note_fused((q, k), {"is_causal": False})

    # routers: a softmax that a choice is made of, and that weighs what was chosen

    def _note_choice(self, name: str, given: Tensor, result: Any) -> None:
        indices = [t for t in tensors_of(result, 2) if not t.is_floating_point()]
        if not indices or given.dim() < 2 or not 2 <= given.shape[-1] <= 512 or given.numel() < 8 * given.shape[-1]:
            return
        num = int(given.shape[-1])
        if id(given) not in self._gates and not self._has_experts(num):
            return
        chosen = indices[0]
        chosen = chosen if name != "argsort" and name != "sort" else chosen[..., :1]
        if int(chosen.max()) >= num:
            return
        load = torch.bincount(chosen.flatten(), minlength=num).float() / chosen.numel()
        entropy = float(-(load * load.clamp(min=1e-30).log()).sum())
        path = self.stack[-1]
        self.routers[path] = {
            "experts": num,
            "effective": math.exp(entropy),
            "most": float(load.max()),
            "used": int((load > 0).sum()),
            "rows": chosen.numel(),
            "is_router": self._has_experts(num) or bool(_floats_with_graph(result)),
        }

    def _has_experts(self, num: int) -> bool:
        """Whether a module that runs now holds as many modules of one kind as there are choices."""
        modules = self.bench.modules
        inside = [modules[path] for path in self.stack]
        return any(
            isinstance(child, nn.ModuleList) and len(child) == num and len({type(m) for m in child}) == 1
            for module in inside
            for child in module.children()
        )


def _floats_with_graph(result: Any) -> list[Tensor]:
    return [t for t in tensors_of(result, 2) if t.is_floating_point() and t.requires_grad]


@experiment("layers", when="checkup")
def layers(bench: ReplaySession) -> dict[str, Any]:
    """One replay, and what each layer did in it."""
    look = _Look(bench)
    with bench.live():
        before = _updates(bench)
        played = look.go()
        for path, number in _updates(bench).items():
            if path in look.norms:
                look.norms[path]["updates"] = number - before[path]
    strong = {path: p for path, p in look.dropout.items() if p >= STRONG}
    routers = {path: seen for path, seen in look.routers.items() if seen["is_router"]}
    return {
        "loss": played.loss,
        "relus": look.relus,
        "attention": look.attention,
        "routers": routers,
        "norms": look.norms,
        "depth": _depth(bench, look.order, played),
        "narrow": any(call.autocast[0] for call in bench.segment.calls) or _is_narrow(bench),
        "dropout": strong,
    }


@experiment("dropout_gap", when="asked")
def dropout_gap(bench: ReplaySession) -> dict[str, Any]:
    """The loss of the step's batch without strong dropout, and its mean over several draws of it."""
    losses = []
    with bench.live():
        for seed in range(8):
            torch.manual_seed(seed)
            losses.append(bench.player.play(bench.segment, Intervention(fresh_rng=True), upto="forward").loss)
    without = bench.run(Intervention(ops=_undropped), upto="forward").loss
    return {"with": sum(losses) / len(losses), "without": without}


def _updates(bench: ReplaySession) -> dict[str, int]:
    """How often the statistics of each BatchNorm were moved."""
    norms = {path: m for path, m in bench.modules.items() if isinstance(m, _BatchNorm)}
    return {path: int(m.num_batches_tracked) for path, m in norms.items() if m.num_batches_tracked is not None}


def _is_narrow(bench: ReplaySession) -> bool:
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in bench.player.subject.parameters)


def _undropped(function: Any, args: Any, kwargs: Any) -> Any:
    """Dropout of a strong kind does nothing."""
    name = getattr(function, "__name__", "")
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5) if name in DROPOUTS else 0.0
    return args[0] if isinstance(p, float) and p >= STRONG else function(*args, **kwargs)


def _depth(bench: ReplaySession, order: list[str], played: ReplayResult) -> list[list[Any]]:
    """The root mean square of the gradient of every weight matrix, in the order in which they were used."""
    told = []
    modules = bench.modules
    names = {id(p): n for n, p in zip(bench.player.names, bench.player.subject.parameters)}
    for path in order:
        for parameter in modules[path].parameters(recurse=False):
            grad = played.grads.get(names.get(id(parameter), ""))
            if parameter.dim() >= 2 and grad is not None and not grad.is_sparse and not _is_table(modules[path]):
                told.append([path, float(grad.double().pow(2).mean().sqrt())])
                break
    return told


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


@experiment("depth_in_fp32", when="asked")
def depth_in_fp32(bench: ReplaySession) -> dict[str, Any]:
    """The gradients over the depth once more, with nothing in 16 bit."""
    look = _Look(bench)
    with bench.live():
        played = look.go(dtype="fp32")
    return {"depth": _depth(bench, look.order, played)}


class _Outputs(Tour):
    """The outputs of the roots, with their graph, and the widths of cross-entropies."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.made: list[Tensor] = []
        self.classes: list[int] = []

    def on_leave(self, path: str, module: nn.Module, output: Any, recomputed: bool) -> None:
        if not self.stack and not recomputed:
            self.made += [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if not self.stack and name != "nll_loss" and (classes := classes_in(name, args, kwargs)) is not None:
            self.classes.append(classes)


@experiment("twins", when="first")
def twins(bench: ReplaySession) -> dict[str, Any]:
    """Units with equal weights that also get equal gradients, whatever the loss: they can never become different.

    The gradient is that of a random weighing of the outputs. One of cross-entropy would not do: behind equal columns
    it sums to zero.
    """
    told = []
    with bench.live():
        outputs = _Outputs(bench)
        outputs.go(upto="forward")
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, generator=generator).to(t) for t in outputs.made]
        named = [
            (n, p)
            for n, p in zip(bench.player.names, bench.player.subject.parameters)
            if p.requires_grad and p.dim() >= 2 and p.shape[0] > 1
        ]
        grads = torch.autograd.grad(outputs.made, [p for _, p in named], weights, allow_unused=True)
        for (name, parameter), grad in zip(named, grads):
            if grad is not None and not grad.is_sparse and (share := _alike(parameter.detach(), grad)) > 0:
                told.append({"weight": name, "share": share, "units": int(parameter.shape[0])})
    return {"alike": told}


def _alike(weight: Tensor, grad: Tensor) -> float:
    """The share of the rows that equal the first in both."""
    both = []
    for each in (weight, grad):
        rows = each.float().flatten(1)
        size = rows.abs().max()
        if each is grad and not float(size) > 0:
            return 0.0
        both.append(((rows - rows[:1]).abs().amax(1) <= 1e-4 * size) & (each is not grad or rows.abs().amax(1) > 0))
    share = (both[0] & both[1])[1:].float().mean()
    return float(share)


@experiment("initial", when="first")
def initial(bench: ReplaySession) -> dict[str, Any]:
    """The first loss against chance, and what it is with weights of the usual size."""
    outputs = _Outputs(bench)
    with bench.live():
        as_it_was = outputs.go(upto="forward").loss
        sizes = _gains(bench)
    large = {name: gain for name, gain in sizes.items() if gain > 2.5}
    inputs = [x.float() for x in bench.inputs if x.is_floating_point() and x.numel()]
    return {
        "loss": as_it_was,
        "classes": outputs.classes[:1],
        "input_size": max((float(x.pow(2).mean().sqrt()) for x in inputs), default=None),
        "large": large,
        "rescaled": bench.run(Intervention(model=lambda: smaller(bench, large)), upto="forward").loss
        if large
        else None,
    }


def _gains(bench: ReplaySession) -> dict[str, float]:
    """The size of every weight that multiplies, times the root of its fan-in: about 1 where signals keep their size."""
    names = {id(p): n for n, p in zip(bench.player.names, bench.player.subject.parameters)}
    told = {}
    for module in bench.modules.values():
        for parameter in module.parameters(recurse=False) if not _is_table(module) else ():
            if parameter.dim() >= 2 and id(parameter) in names:
                fan_in = parameter[0].numel()
                told[names[id(parameter)]] = float(parameter.detach().float().std()) * math.sqrt(fan_in)
    return told


@contextmanager
def smaller(bench: ReplaySession, gains: dict[str, float]) -> Iterator[None]:
    """These weights are divided by their gain. The stage of the replay puts them back."""
    with torch.no_grad():
        for name, parameter in zip(bench.player.names, bench.player.subject.parameters):
            if name in gains:
                parameter.data.div_(gains[name])
    yield
