"""The first batch: one forward and one backward pass of the untrained model, listened to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.build.assemble import Parts
from trainwright.engine.loss import Loss, as_loss_fn, call_loss
from trainwright.errors import TrainwrightError
from trainwright.replay.classified import CHUNKED, Classified, classified
from trainwright.state.cursor import MicroBatch
from trainwright.verbs.check.samples import DatasetSample
from trainwright.verbs.check.verdict import Verdict

CLASSES = ("cross_entropy", "nll_loss")
YES_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Scored:
    """A call of a loss of torch: what it was given, without graphs."""

    op: str
    output: Tensor
    target: Tensor
    ignored: int = -100

    @property
    def classes(self) -> int | None:
        """How many classes a cross-entropy tells apart."""
        if self.op not in CLASSES or self.output.dim() == 0:
            return None
        return self.output.shape[1 if self.output.dim() > 1 else 0]

    def rows(self) -> Tensor:
        """Scores (n, c), one row a prediction."""
        x = self.output
        x = x.movedim(1, -1) if self.op in CLASSES and x.dim() > 1 else x
        return x.reshape(-1, x.shape[-1]) if self.op in CLASSES else x.reshape(len(x) if x.dim() else 1, -1)

    def value(self) -> float:
        """The loss itself, a mean over what counts."""
        given: dict[str, Any] = {"ignore_index": self.ignored} if self.op in CLASSES else {}
        function: Callable[..., Tensor] = getattr(F, self.op)
        return float(function(self.output.float(), self._target(), **given))

    def chance(self) -> float | None:
        """The loss of a model that knows nothing: ln C, ln 2, the mean square of the targets."""
        if self.op in CLASSES:
            return math.log(max(2, self.classes or 2))
        if self.op in YES_NO:
            return math.log(2)
        return float((self._target() ** 2).mean()) if self.op == "mse_loss" else None

    def _target(self) -> Tensor:
        return self.target.float() if self.op not in CLASSES or self.target.is_floating_point() else self.target


class Tap(TorchFunctionMode):
    """Keeps what the losses of torch are given while it is entered; what it hears goes on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Scored] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        of_chunks = classified(name, args, kwargs) if name == CHUNKED else None
        if of_chunks is not None and len(self.heard) < 16:
            self.heard.append(_of_chunks(of_chunks))
        elif name in (*CLASSES, *YES_NO, *NUMBERS) and len(self.heard) < 16:
            given = dict(zip(("input", "target"), args, strict=False)) | kwargs
            output, target = given.get("input"), given.get("target")
            if isinstance(output, Tensor) and isinstance(target, Tensor):
                ignored = kwargs.get("ignore_index", -100)
                self.heard.append(Scored(name, output.detach().clone(), target.detach().clone(), ignored))
        return func(*args, **kwargs)


def _of_chunks(given: Classified) -> Scored:
    """A loss in chunks as a plain one, of some of its rows."""
    at = given.sample()
    target = given.target[at].masked_fill(given.target[at] < 0, given.ignore_index)
    return Scored("cross_entropy", given.scores(at), target, given.ignore_index)


@dataclass
class First:
    """What the first batch gave. ``loss`` is a mean; ``error`` is what it raised instead, in words.

    ``rows`` are those of the embedding that looks the first input up, None where there is none.
    """

    micro: MicroBatch
    heard: list[Scored] = field(default_factory=list)
    loss: float = math.nan
    error: str = ""
    remedy: str = ""
    without_grad: list[str] = field(default_factory=list)
    values_without: int = 0
    trained: int = 0
    bad_grad: list[str] = field(default_factory=list)
    begins_with_norm: bool = False
    rows: int | None = None

    @property
    def scored(self) -> Scored | None:
        """The one call of a loss, None where there was none or several."""
        return self.heard[0] if len(self.heard) == 1 else None

    @property
    def classes(self) -> int | None:
        return next((each.classes for each in self.heard if each.classes is not None), None)


def ignored_by(seen: First) -> int:
    """The ignore_index of its cross-entropy."""
    return next((each.ignored for each in seen.heard if each.classes is not None), -100)


def first_batch(parts: Parts, micro: MicroBatch) -> First:
    """Forward and backward of ``micro``; afterwards none has a gradient. Buffers are the caller's to put back."""
    seen, order, tap = First(micro), list[nn.Module](), Tap()
    leaves = [module for module in parts.model.modules() if not list(module.children())]
    given = micro.data[0] if isinstance(micro.data, tuple | list) and micro.data else None

    def entered(module: nn.Module, args: Any) -> None:
        order.append(module)
        if isinstance(module, nn.Embedding) and args and args[0] is given:
            seen.rows = module.num_embeddings

    handles = [leaf.register_forward_pre_hook(entered) for leaf in leaves]
    try:
        with tap:
            output = call_loss(as_loss_fn(parts.loss), parts.model, micro, "the first batch")
        mean = output.total / max(float(output.weight), 1e-12) if isinstance(output, Loss) else output
        seen.loss = float(mean.detach())
        if mean.requires_grad:
            mean.backward()  # type: ignore[no-untyped-call]
        _look_at_gradients(seen, parts.model)
    except TrainwrightError as error:
        seen.error, seen.remedy = error.message, error.remedy
    except Exception as error:
        seen.error, seen.remedy = f"{type(error).__name__}: {error}", _remedy(str(error), micro.data)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parts.model.parameters():
            parameter.grad = None
    seen.heard = tap.heard
    seen.begins_with_norm = bool(order) and isinstance(order[0], NORMS)
    return seen


def _look_at_gradients(seen: First, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        seen.trained += parameter.numel()
        if parameter.grad is None:
            seen.without_grad.append(name)
            seen.values_without += parameter.numel()
        elif not bool(parameter.grad.isfinite().all()):
            seen.bad_grad.append(name)


def _remedy(said: str, data: Any) -> str:
    """For errors of torch that are met most often."""
    if "dtype" in said or "expected scalar type" in said or "Long but found Float" in said or "same type" in said:
        return "give the model the type that it computes in: x.float(), or x.float() / 255 for bytes; labels as int64"
    if "shapes cannot be multiplied" in said or "size mismatch" in said or "expected input" in said:
        return "the model was made for inputs of another size: compare its first layer with a sample"
    if "out of bounds" in said or "index out of range" in said:
        return "an id or label is larger than the model has rows or outputs for"
    if "more than 1 value per channel" in said:
        return "BatchNorm needs more than one sample: take a larger batch.micro, or GroupNorm"
    return "call the model and the loss on one batch by hand"


def fits(seen: First) -> Iterator[Verdict]:
    """Whether model, loss and batch go together at all."""
    shapes = "; ".join(described(seen.micro.data)) or type(seen.micro.data).__name__
    if seen.error:
        yield Verdict("fail", "first batch", f"{seen.error.splitlines()[0]} [{shapes}]", seen.remedy)
        return
    given = seen.scored
    made = f" -> {given.op}{tuple(given.output.shape)}" if given else ""
    yield Verdict("ok", "first batch", f"{shapes}{made}")


def described(data: Any) -> list[str]:
    """Type, shape and device of each tensor of a batch."""
    if isinstance(data, Tensor):
        return [f"{str(data.dtype).removeprefix('torch.')}{tuple(data.shape)} on {data.device}"]
    values = data.values() if isinstance(data, dict) else data if isinstance(data, tuple | list) else ()
    return [said for value in values for said in described(value)]


def initial_loss(seen: First) -> Iterator[Verdict]:
    """The loss before any update, against that of a guess."""
    if seen.error:
        return
    if not math.isfinite(seen.loss):
        remedy = "look for NaN in the data, logarithms of 0 and divisions by 0"
        yield Verdict("fail", "initial loss", f"it is {seen.loss}", remedy)
        return
    given = seen.scored
    chance = given.chance() if given else None
    if given is None or chance is None:
        yield Verdict("cannot tell", "initial loss", f"{seen.loss:.4g}: what a guess has is not known for this loss")
        return
    own = given.value()
    if own > 0 and abs(seen.loss + own) < 0.1 * own:
        told = f"{seen.loss:.4g} is minus {given.op}: it would be maximised"
        yield Verdict("fail", "initial loss", told, "return the loss itself, not its negative", "loss.wrong_sign")
        return
    said = f"{seen.loss:.4g}, a guess has {chance:.4g}"
    if given.op != "mse_loss" and own > 1.5 * chance + 0.5:
        remedy = "normalise the inputs; begin with weights of the usual size (or none in the last layer)"
        yield Verdict("warn", "initial loss", said, remedy, "init.too_large")
    elif given.op in CLASSES and own < 0.5 * chance:
        yield Verdict(
            "ok", "initial loss", f"{said}: weights that were trained before, or labels that are easy to guess"
        )
    else:
        yield Verdict("ok", "initial loss", said)


def right_loss(seen: First, train: DatasetSample) -> Iterator[Verdict]:
    """Whether the loss is made for what it is given."""
    given = seen.scored
    if given is None or seen.error:
        return
    rows = given.rows()
    is_share = rows.shape[-1] > 1 and bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < 1e-3).all())
    if given.op in CLASSES and is_share and rows.shape[-1] > 1:
        log = given.op == "nll_loss"
        said = "nll_loss is given probabilities, not their logarithms" if log else "softmax comes before cross_entropy"
        remedy = "take log_softmax, or cross_entropy on plain scores" if log else "give cross_entropy the plain scores"
        code = "loss.nll_on_probs" if log else "loss.softmax_before_ce"
        yield Verdict("fail", "loss", f"{said}: each row sums to 1, which bounds gradient and loss", remedy, code)
    elif given.op == YES_NO[1] and bool(((given.output >= 0) & (given.output <= 1)).all()) and given.output.numel() > 8:
        remedy = "give it the plain scores: it takes the sigmoid itself"
        yield Verdict("warn", "loss", f"all scores of {given.op} lie between 0 and 1: a sigmoid twice?", remedy)
    classes = train.labels()
    if given.op in NUMBERS and classes is not None and 2 < len(set(classes.tolist())) <= 1000:
        said = f"{given.op} on whole numbers, {len(set(classes.tolist()))} of them: they look like classes"
        yield Verdict("warn", "loss", said, "use cross_entropy with an output for each class")
    elif given.op in NUMBERS and given.output.shape != given.target.shape:
        said = f"{given.op} compares {tuple(given.output.shape)} with {tuple(given.target.shape)}, each with all others"
        yield Verdict("fail", "loss", said, "give both the same shape: output.squeeze(-1)", "loss.broadcast_target")


def gradients(seen: First) -> Iterator[Verdict]:
    """Whether every parameter that is to be trained gets one."""
    if seen.error or not math.isfinite(seen.loss):
        return
    if not seen.trained or seen.values_without == seen.trained:
        said = "nothing is trained: no parameter gets a gradient"
        yield Verdict(
            "fail", "gradients", said, "look for .detach(), no_grad and requires_grad=False", "grad.graph_cut"
        )
    elif seen.bad_grad:
        said = f"not finite in {_some(seen.bad_grad)}"
        yield Verdict("fail", "gradients", said, "look for sqrt, log or division at 0", "num.nonfinite")
    elif seen.without_grad:
        share = seen.values_without / seen.trained
        yield Verdict(
            "fail" if share >= 0.5 else "warn",
            "gradients",
            f"none for {len(seen.without_grad)} parameters ({share:.0%} of all values): {_some(seen.without_grad)}",
            "look for .detach() or .data behind them; freeze with model.freeze what is not to be trained",
            code="grad.graph_cut",
        )
    else:
        yield Verdict("ok", "gradients", f"all {seen.trained:,} values that are trained get one")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
