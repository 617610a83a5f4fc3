"""The layers in a step: dead activations, gradients over depth, attention, routers, BatchNorm, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.doctor.measure.formats import has_half_parameters
from trainwright.doctor.program.measure.modes import DROPOUTS
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classes_in
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import argument, function_name
from trainwright.replay.inspector import StepInspector
from trainwright.replay.replayer import Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

RELUS = {"relu", "relu_", "threshold", "threshold_", "relu6"}
MAPS = {"linear", "conv1d", "conv2d", "conv3d"}
_PRODUCTS = {"matmul", "bmm", "__matmul__", "einsum", "baddbmm"}
_KEEPS = {"dropout", "to", "type_as", "nan_to_num", "clone", "contiguous", "view", "reshape", "expand"} | DROPOUTS
_CHOICES = {"topk", "max", "argmax", "argsort", "sort", "multinomial"}
STRONG_DROPOUT = 0.7
"""The rate from which on dropout is suspicious."""


class _Layers(StepInspector):
    """Collects what each layer does in one forward and backward pass."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.relus: dict[str, Facts] = {}
        self.attention: dict[str, Facts] = {}
        self.routers: dict[str, Facts] = {}
        self.norms: dict[str, Facts] = {}
        self.dropout: dict[str, float] = {}
        self.order: list[str] = []
        self._scores: dict[int, tuple[str, Tensor, Tensor]] = {}
        self._gates: dict[int, tuple[str, Tensor]] = {}
        self._kept: list[object] = []  # so that no id is used again
        self._expected: tuple[int, Tensor | None] = 0, None  # output id of the last linear map, its units' spread

    def on_enter(self, path: str, module: nn.Module, inputs: list[Tensor], in_backward: bool) -> None:
        if path not in self.order:
            self.order.append(path)
        if not isinstance(module, _BatchNorm) or not inputs or not module.training:
            return
        x = inputs[0]
        facts = self.norms.setdefault(path, {"values": 0, "samples": 0, "calls": 0, "again": 0})
        facts["again" if in_backward else "calls"] += 1
        if not in_backward:
            facts |= {"values": x.numel() // max(1, x.shape[1]), "samples": int(x.shape[0])}
            facts["momentum"] = module.momentum

    @torch.no_grad()
    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if not self.stack:
            return
        if name in MAPS and len(tensors := tensors_of([args, kwargs], 3)) > 1:
            x, weight = tensors[0].detach(), tensors[1].detach()
            self._expected = id(result), weight.flatten(1).norm(dim=1) * x.pow(2).mean().sqrt()
            self._kept.append(result)
        if name in RELUS and args[0].is_floating_point() and not name.endswith("_"):
            self._note_relu(args[0])
        elif name in DROPOUTS:
            self._note_dropout(args, kwargs)
        elif name == "softmax" and args[0].dim() >= 2 and isinstance(result, Tensor):
            self._gates[id(result)] = self.stack[-1], args[0].detach()
            self._scores[id(result)] = self.stack[-1], args[0].detach(), result.detach()
            self._kept.append(result)
        elif name == "scaled_dot_product_attention":
            self._note_fused(args, kwargs)
        elif name == "multi_head_attention_forward":
            self._note_module(args, kwargs)
        if name in _PRODUCTS:
            self._note_product(name, args)
        elif name in _KEEPS and args and id(args[0]) in self._scores:
            self._scores[id(result)] = self._scores[id(args[0])]
            self._kept.append(result)
        if name in _CHOICES and args and isinstance(args[0], Tensor):
            self._note_choice(name, args[0], result)

    def _note_relu(self, x: Tensor) -> None:
        """Dead units: their input is so far below 0 that no sample will reach it, by its own standard deviation and by
        the one that their weights give to such an input. Deep in a plain network signals hardly differ between samples,
        and that alone makes no unit dead.
        """
        units = x.detach().float()
        units = units.movedim(1, -1) if units.dim() in (4, 5) else units
        units = units.flatten(0, -2) if units.dim() > 1 else units[:, None]
        if len(units) < 8:
            return
        mean, spread = units.mean(0), units.std(0)
        varies = spread > 1e-5 * mean.abs()
        made_by, expected = self._expected
        if expected is not None and made_by == id(x) and len(expected) == len(spread):
            spread = torch.maximum(spread, expected.float())
        dead = (units.amax(0) < 0) & (mean < -4 * spread) & varies
        self._keep_worse(
            self.relus,
            {
                "dead": float(dead.float().mean()),
                "varies": float(varies.float().mean()),
                "rows": len(units),
                "furthest": float(mean.min()),
            },
            "dead",
        )

    def _keep_worse(self, where: dict[str, Facts], facts: Facts, by: str) -> None:
        known = where.get(self.stack[-1])
        if known is None or facts[by] > known[by]:
            where[self.stack[-1]] = facts

    def _note_dropout(self, args: Args, kwargs: Kwargs) -> None:
        p = argument(args, kwargs, 1, "p", 0.5)
        if argument(args, kwargs, 2, "training", True) and isinstance(p, float):
            self.dropout[self.stack[-1]] = max(p, self.dropout.get(self.stack[-1], 0.0))

    # attention: a softmax whose result is multiplied by values

    def _note_product(self, name: str, args: Args) -> None:
        for place, weights in [(n, t) for n, t in enumerate(tensors_of(args, 2)) if id(t) in self._scores]:
            path, scores, spread = self._scores[id(weights)]
            if scores.dim() >= 3 and scores.shape[-1] > 1:
                is_square = weights.shape[-1] == weights.shape[-2]  # else a pooling may weigh what it is given
                of_a_product = name.strip("_") in ("matmul", "bmm") and weights.shape == spread.shape
                of_a_product = of_a_product and (is_square or not place)
                sums = spread.float().sum(-2 if place else -1) if of_a_product else torch.ones_like(spread)
                self._note_attention(path, scores.float(), spread.float(), float((sums - 1).abs().median()))

    def _note_attention(self, path: str, scores: Tensor, weights: Tensor, off: float = 0.0) -> None:
        """``off``: by how much the weights of what they are multiplied with differ from 1 in their sum."""
        allowed_scores = scores.isfinite() & (scores.abs() < 1e4)
        unmasked = scores[allowed_scores]
        if not unmasked.numel():
            return
        top, least = (scores.masked_fill(~allowed_scores, sign * -torch.inf).mul(sign).amax(-1) for sign in (1, -1))
        several = allowed_scores.sum(-1) > 1
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
        allowed = (weights > 0).sum(-1).clamp(min=1).float()
        some = allowed > 1
        even = entropy[some] / allowed[some].log() if bool(some.any()) else torch.ones_like(entropy)
        facts = {
            "highest": float(unmasked.abs().max()),
            "spread": float(unmasked.std()),
            "evenness": float(even.mean()),
            "contrast": float((top + least)[several].mean()) if bool(several.any()) else 0.0,
            "off": off,
        }
        known = self.attention.get(path)
        if known is None or facts["highest"] > known["highest"]:
            self.attention[path] = facts

    def _note_fused(self, args: Args, kwargs: Kwargs) -> None:
        q, k = (t.detach().float() for t in args[:2])
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        num_heads = max(1, (1 << 22) // max(1, q.shape[-2] * k.shape[-2]))  # that many scores are enough to tell
        q, k = q.flatten(0, -3)[:num_heads], k.flatten(0, -3)[:num_heads]
        if q.shape[0] != k.shape[0]:
            return  # grouped heads
        scores = q @ k.transpose(-1, -2) * scale
        if kwargs.get("is_causal", False):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        self._note_attention(self.stack[-1], scores, scores.softmax(-1))

    def _note_module(self, args: Args, kwargs: Kwargs) -> None:
        """``nn.MultiheadAttention``, which is one torch function."""
        names = ("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias")
        arguments: Kwargs = dict(zip(names, args)) | kwargs
        q, k, weight, bias = (arguments.get(names[n]) for n in (0, 1, 5, 6))
        if not isinstance(weight, Tensor) or q is None or k is None or q.dim() != 3:
            return
        d = q.shape[-1]
        parts = [None, None] if bias is None else [bias[:d].detach(), bias[d : 2 * d].detach()]
        q = nn.functional.linear(q.detach(), weight[:d].detach(), parts[0])
        k = nn.functional.linear(k.detach(), weight[d : 2 * d].detach(), parts[1])
        q, k = (x.reshape(*x.shape[:2], arguments[names[4]], -1).permute(1, 2, 0, 3) for x in (q, k))  # from (T, B, D)
        self._note_fused((q, k), {"is_causal": False})

    # routers: a softmax whose largest values choose experts and weight their outputs

    def _note_choice(self, name: str, gates: Tensor, result: object) -> None:
        indices = [t for t in tensors_of(result, 2) if not t.is_floating_point()]
        if not indices or gates.dim() < 2 or not 2 <= gates.shape[-1] <= 512 or gates.numel() < 8 * gates.shape[-1]:
            return
        num = int(gates.shape[-1])
        if id(gates) not in self._gates and not self._has_experts(num):
            return
        chosen = indices[0]
        chosen = chosen if name != "argsort" and name != "sort" else chosen[..., :1]
        if int(chosen.max()) >= num:
            return
        load = torch.bincount(chosen.flatten(), minlength=num).float() / chosen.numel()
        entropy = float(-(load * load.clamp(min=1e-30).log()).sum())
        path = self.stack[-1]
        self.routers.pop(path, None)  # the last choice counts
        if self._has_experts(num) or _floats_with_graph(result):
            self.routers[path] = {
                "experts": num,
                "effective": math.exp(entropy),
                "most": float(load.max()),
                "rows": chosen.numel(),
            }

    def _has_experts(self, num: int) -> bool:
        """Whether a module that runs now holds a list of ``num`` modules of one class."""
        modules = self.session.modules
        inside = [modules[path] for path in self.stack]
        return any(
            isinstance(child, nn.ModuleList) and len(child) == num and len({type(m) for m in child}) == 1
            for module in inside
            for child in module.children()
        )


def _floats_with_graph(result: object) -> list[Tensor]:
    return [t for t in tensors_of(result, 2) if t.is_floating_point() and t.requires_grad]


@experiment("layers", when="checkup")
def layers(session: ReplaySession) -> Facts:
    """What each layer did in one replay of the step."""
    inspector = _Layers(session)
    with session.live():
        before = _updates(session)
        result = inspector.run()
        for path, number in _updates(session).items():
            if path in inspector.norms:
                inspector.norms[path]["updates"] = number - before[path]
    return {
        "loss": result.loss,
        "relus": inspector.relus,
        "attention": inspector.attention,
        "routers": inspector.routers,
        "norms": inspector.norms,
        "depth": _depth(session, inspector.order, result),
        "narrow": any(call.autocast[0] for call in session.recorded_step.calls) or has_half_parameters(session),
        "dropout": {path: p for path, p in inspector.dropout.items() if p >= STRONG_DROPOUT},
    }


@experiment("dropout_gap", when="requested")
def dropout_gap(session: ReplaySession) -> Facts:
    """The loss of the step's batch without strong dropout, and its mean over eight dropout masks."""
    losses = []
    with session.live():
        for seed in range(8):
            torch.manual_seed(seed)
            losses.append(
                session.replayer.run(session.recorded_step, Intervention(fresh_rng=True), upto="forward").loss
            )
    without = session.run(Intervention(ops=_without_dropout), upto="forward").loss
    return {"with": sum(losses) / len(losses), "without": without}


def _updates(session: ReplaySession) -> dict[str, int]:
    """How often the running statistics of each BatchNorm were updated."""
    norms = {path: m for path, m in session.modules.items() if isinstance(m, _BatchNorm)}
    return {path: int(m.num_batches_tracked) for path, m in norms.items() if m.num_batches_tracked is not None}


def _without_dropout(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Strong dropout returns its input."""
    name = function_name(function)
    p = argument(args, kwargs, 1, "p", 0.5) if name in DROPOUTS else 0.0
    return args[0] if isinstance(p, float) and p >= STRONG_DROPOUT else function(*args, **kwargs)


def _depth(session: ReplaySession, order: list[str], result: ReplayResult) -> list[tuple[str, float]]:
    """The module and the root mean square gradient of every weight matrix, in the order in which they were used."""
    sizes = []
    modules = session.modules
    names = {id(p): n for n, p in session.parameters.items()}
    for path in order:
        for parameter in modules[path].parameters(recurse=False):
            grad = result.grads.get(names.get(id(parameter), ""))
            if parameter.dim() >= 2 and grad is not None and not grad.is_sparse and not _is_table(modules[path]):
                sizes.append((path, float(grad.double().pow(2).mean().sqrt())))
                break
    return sizes


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


@experiment("depth_in_fp32", when="requested", memory=2.5, steps=4.0)
def depth_in_fp32(session: ReplaySession) -> Facts:
    """The gradients over depth once more, with everything in float32."""
    inspector = _Layers(session)
    with session.live():
        result = inspector.run(dtype="fp32")
    return {"depth": _depth(session, inspector.order, result)}


class _Outputs(StepInspector):
    """The outputs of the roots, with their graph, and the numbers of classes of the cross-entropies."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.outputs: list[Tensor] = []
        self.classes: list[int] = []

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if not self.stack and not in_backward:
            self.outputs += [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if not self.stack and name != "nll_loss" and (classes := classes_in(name, args, kwargs)) is not None:
            self.classes.append(classes)


@experiment("twins", when="first", steps=1.0)
def twins(session: ReplaySession) -> Facts:
    """Units with equal weights that also get equal gradients, whatever the loss is: they can never become different.

    The gradient is that of a randomly weighted sum of the outputs. That of cross-entropy would not do: behind equal
    columns it sums to zero.
    """
    alike = []
    with session.live():
        inspector = _Outputs(session)
        inspector.run(upto="forward")
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, generator=generator, device="cpu").to(t) for t in inspector.outputs]
        named = [(n, p) for n, p in session.parameters.items() if p.requires_grad and p.dim() >= 2 and p.shape[0] > 1]
        if not named:
            return {"alike": []}
        grads = torch.autograd.grad(inspector.outputs, [p for _, p in named], weights, allow_unused=True)
        for (name, parameter), grad in zip(named, grads):
            if grad is not None and not grad.is_sparse and (share := _alike(parameter.detach(), grad)) > 0:
                alike.append({"weight": name, "share": share})
    return {"alike": alike}


def _alike(weight: Tensor, grad: Tensor) -> float:
    """The share of rows that equal the first one both in the weight and in its gradient."""
    both = []
    for each in (weight, grad):
        rows = each.float().flatten(1)
        size = rows.abs().max()
        if each is grad and not float(size) > 0:
            return 0.0
        both.append(((rows - rows[:1]).abs().amax(1) <= 1e-4 * size) & (each is not grad or rows.abs().amax(1) > 0))
    share = (both[0] & both[1])[1:].float().mean()
    return float(share)


@experiment("initial", when="first", steps=0.5, latest=4)
def initial(session: ReplaySession) -> Facts:
    """The first loss, and the loss with weights of the usual size."""
    inspector = _Outputs(session)
    with session.live():
        as_it_was = inspector.run(upto="forward").loss
        gains = _gains(session)
    large = {name: gain for name, gain in gains.items() if gain > 2.5}
    rescaled = None
    if large:
        rescaled = session.run(Intervention(model=lambda: smaller(session, large)), upto="forward").loss
    inputs = [x.float() for x in session.inputs if x.is_floating_point() and x.numel()]
    return {
        "loss": as_it_was,
        "classes": inspector.classes[:1],
        "input_size": max((float(x.pow(2).mean().sqrt()) for x in inputs), default=None),
        "large": large,
        "rescaled": rescaled,
    }


def _gains(session: ReplaySession) -> dict[str, float]:
    """The standard deviation of every weight matrix times the square root of its fan-in: about 1 where signals keep
    their size.
    """
    names = {id(p): n for n, p in session.parameters.items()}
    gains = {}
    for module in session.modules.values():
        for parameter in module.parameters(recurse=False) if not _is_table(module) else ():
            if parameter.dim() >= 2 and id(parameter) in names:
                fan_in = parameter[0].numel()
                gains[names[id(parameter)]] = float(parameter.detach().float().std()) * math.sqrt(fan_in)
    return gains


@contextmanager
def smaller(session: ReplaySession, gains: dict[str, float]) -> Iterator[None]:
    """Divides these weights by their gains. The end of the replay restores them."""
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            if name in gains:
                parameter.data.div_(gains[name])
    yield
