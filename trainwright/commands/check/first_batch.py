"""Runs one forward and one backward pass of the untrained model on the first batch, and makes verdicts on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.commands.check.samples import DatasetSample
from trainwright.commands.check.verdict import Verdict, first_of
from trainwright.engine.input_errors import refusal
from trainwright.engine.loss import Loss, as_loss_fn, call_loss
from trainwright.errors import TrainwrightError, text_of
from trainwright.replay.classified import CHUNKED, Classified, classified

CLASSES = ("cross_entropy", "nll_loss")
YES_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class LossCall:
    """One call of a torch loss function: its output and target, detached."""

    op: str
    output: Tensor
    target: Tensor
    ignored: int = -100

    @property
    def classes(self) -> int | None:
        """The number of classes of a cross-entropy; None for other losses."""
        if self.op not in CLASSES or self.output.dim() == 0:
            return None
        return self.output.shape[1 if self.output.dim() > 1 else 0]

    def rows(self) -> Tensor:
        """Return the scores (n, c), one row per prediction."""
        x = self.output
        x = x.movedim(1, -1) if self.op in CLASSES and x.dim() > 1 else x
        return x.reshape(-1, x.shape[-1]) if self.op in CLASSES else x.reshape(len(x) if x.dim() else 1, -1)

    def value(self) -> float:
        """Return the loss of this call, a mean over all targets that count."""
        options = {"ignore_index": self.ignored} if self.op in CLASSES else {}
        function: Callable[..., Tensor] = getattr(F, self.op)
        return float(function(self.output.float(), self._target(), **options))

    def chance(self) -> float | None:
        """Return the loss of a guess: ln C, ln 2, or the mean square of the targets; None if unknown."""
        if self.op in CLASSES:
            return math.log(max(2, self.classes or 2))
        if self.op in YES_NO:
            return math.log(2)
        return float((self._target() ** 2).mean()) if self.op == "mse_loss" else None

    def _target(self) -> Tensor:
        return self.target.float() if self.op not in CLASSES or self.target.is_floating_point() else self.target


class LossRecorder(TorchFunctionMode):
    """Records calls of torch's loss functions. Their results are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        chunked = classified(name, args, kwargs) if name == CHUNKED else None
        if chunked is not None and len(self.calls) < 16:
            self.calls.append(_of_chunks(chunked))
        elif name in (*CLASSES, *YES_NO, *NUMBERS) and len(self.calls) < 16:
            arguments = dict(zip(("input", "target"), args, strict=False)) | kwargs
            output, target = arguments.get("input"), arguments.get("target")
            if isinstance(output, Tensor) and isinstance(target, Tensor):
                ignored = kwargs.get("ignore_index", -100)
                self.calls.append(LossCall(name, output.detach().clone(), target.detach().clone(), ignored))
        return func(*args, **kwargs)


def _of_chunks(call: Classified) -> LossCall:
    """Return a chunked loss as a plain call on some of its rows."""
    at = call.sample(call.max_rows)
    target = call.target[at].masked_fill(call.target[at] < 0, call.ignore_index)
    return LossCall("cross_entropy", call.scores(at), target, call.ignore_index)


@dataclass
class FirstBatch:
    """The results of the first batch.

    ``loss`` is a mean. ``error`` is the message of an exception, if any. ``trained`` counts the values that require a
    gradient, ``values_without`` the values among them without one. ``without_grad`` and ``bad_grad`` (not finite) name
    parameters. ``rows`` is the size of the embedding of the first input; None without one.
    """

    micro: MicroBatch
    loss_calls: list[LossCall] = field(default_factory=list)
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
    def loss_call(self) -> LossCall | None:
        """The only call of a loss function; None for no or several calls."""
        return self.loss_calls[0] if len(self.loss_calls) == 1 else None

    @property
    def classes(self) -> int | None:
        """The number of classes of the first cross-entropy; None without one."""
        return next((each.classes for each in self.loss_calls if each.classes is not None), None)

    @property
    def ignored(self) -> int:
        """The ``ignore_index`` of the first cross-entropy."""
        return next((each.ignored for each in self.loss_calls if each.classes is not None), -100)


def first_batch(parts: Parts, micro: MicroBatch) -> FirstBatch:
    """Run forward and backward on ``micro`` and drop the gradients. The caller must restore buffers."""
    seen, order, recorder = FirstBatch(micro), list[nn.Module](), LossRecorder()
    leaves = [module for module in parts.model.modules() if not list(module.children())]
    first_input = micro.data[0] if isinstance(micro.data, tuple | list) and micro.data else None

    def entered(module: nn.Module, args: tuple[object, ...]) -> None:
        order.append(module)
        if isinstance(module, nn.Embedding) and args and args[0] is first_input:
            seen.rows = module.num_embeddings

    handles = [leaf.register_forward_pre_hook(entered) for leaf in leaves]
    try:
        with recorder:
            output = call_loss(as_loss_fn(parts.loss), parts.model, micro, "the first batch")
        mean = output.total / max(float(output.weight), 1e-12) if isinstance(output, Loss) else output
        seen.loss = float(mean.detach())
        if mean.requires_grad:
            mean.backward()  # type: ignore[no-untyped-call]
        _check_gradients(seen, parts.model)
    except TrainwrightError as error:
        seen.error, seen.remedy = error.message, error.remedy
    except Exception as error:
        refused = refusal(error, parts.model)
        seen.error = text_of(error) if refused is None else refused.message
        seen.remedy = "call the model and the loss on one batch by hand" if refused is None else refused.remedy
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parts.model.parameters():
            parameter.grad = None
    seen.loss_calls = recorder.calls
    seen.begins_with_norm = bool(order) and isinstance(order[0], NORMS)
    return seen


def _check_gradients(seen: FirstBatch, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        seen.trained += parameter.numel()
        if parameter.grad is None:
            seen.without_grad.append(name)
            seen.values_without += parameter.numel()
        elif not bool(parameter.grad.isfinite().all()):
            seen.bad_grad.append(name)


def fits(seen: FirstBatch) -> Iterator[Verdict]:
    """Check that model, loss and batch fit each other."""
    shapes = "; ".join(described(seen.micro.data)) or type(seen.micro.data).__name__
    if seen.error:
        yield Verdict("fail", "first batch", f"{seen.error.splitlines()[0]} [{shapes}]", seen.remedy)
        return
    call = seen.loss_call
    made = f" -> {call.op}{tuple(call.output.shape)}" if call else ""
    yield Verdict("ok", "first batch", f"{shapes}{made}")


def described(data: object) -> list[str]:
    """Return type, shape and device of each tensor of a batch."""
    if isinstance(data, Tensor):
        return [f"{str(data.dtype).removeprefix('torch.')}{tuple(data.shape)} on {data.device}"]
    values = data.values() if isinstance(data, dict) else data if isinstance(data, tuple | list) else ()
    return [text for value in values for text in described(value)]


def initial_loss(seen: FirstBatch) -> Iterator[Verdict]:
    """Compare the loss before any update with the loss of a guess."""
    if seen.error:
        return
    if not math.isfinite(seen.loss):
        remedy = "check for NaN in the data, logarithms of 0 and divisions by 0"
        yield Verdict("fail", "initial loss", f"it is {seen.loss}", remedy)
        return
    call = seen.loss_call
    chance = call.chance() if call else None
    if call is None or chance is None:
        yield Verdict(
            "cannot tell", "initial loss", f"{seen.loss:.4g}: the loss of a guess is unknown for this function"
        )
        return
    value = call.value()
    if value > 0 and abs(seen.loss + value) < 0.1 * value:
        message = f"{seen.loss:.4g} is minus {call.op}: it would be maximised"
        yield Verdict("fail", "initial loss", message, "return the loss itself, not its negative", "loss.wrong_sign")
        return
    message = f"{seen.loss:.4g}, that of a guess is {chance:.4g}"
    if call.op != "mse_loss" and value > 1.5 * chance + 0.5:
        remedy = "normalise the inputs; initialise weights with the usual size (or zeros in the last layer)"
        yield Verdict("warn", "initial loss", message, remedy, "model.init_too_large")
    elif call.op in CLASSES and value < 0.5 * chance:
        yield Verdict("ok", "initial loss", f"{message}: pretrained weights, or labels that are easy to guess")
    else:
        yield Verdict("ok", "initial loss", message)


def right_loss(seen: FirstBatch, train: DatasetSample) -> Iterator[Verdict]:
    """Check that the loss function suits its inputs."""
    call = seen.loss_call
    if call is None or seen.error:
        return
    rows = call.rows()
    are_probabilities = bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < 1e-3).all())
    if call.op in CLASSES and are_probabilities and rows.shape[-1] > 1:
        message = "softmax comes before cross_entropy"
        remedy, code = "pass the plain scores to cross_entropy", "loss.softmax_before_cross_entropy"
        if call.op == "nll_loss":
            message = "nll_loss gets probabilities, not their logarithms"
            remedy, code = "take log_softmax, or cross_entropy on plain scores", "loss.nll_without_log_softmax"
        yield Verdict("fail", "loss", f"{message}: each row sums to 1, which bounds gradient and loss", remedy, code)
    elif call.op == YES_NO[1] and bool(((call.output >= 0) & (call.output <= 1)).all()) and call.output.numel() > 8:
        remedy = "pass the plain scores: it applies the sigmoid itself"
        yield Verdict("warn", "loss", f"all scores of {call.op} lie between 0 and 1: a sigmoid twice?", remedy)
    classes = train.labels()
    are_whole = bool((call.target == call.target.round()).all())  # a loss may compute its targets, such as noise
    if call.op in NUMBERS and are_whole and classes is not None and 2 < len(set(classes.tolist())) <= 1000:
        message = f"{call.op} on whole numbers, {len(set(classes.tolist()))} of them: they look like classes"
        yield Verdict("warn", "loss", message, "use cross_entropy with an output for each class")
    elif call.op in NUMBERS and call.output.shape != call.target.shape:
        message = f"{call.op} compares {tuple(call.output.shape)} with {tuple(call.target.shape)}, each with all others"
        yield Verdict("fail", "loss", message, "give both the same shape: output.squeeze(-1)", "loss.broadcast_target")


def gradients(seen: FirstBatch) -> Iterator[Verdict]:
    """Check that every trained parameter receives a finite gradient."""
    if seen.error or not math.isfinite(seen.loss):
        return
    if not seen.trained or seen.values_without == seen.trained:
        message = "nothing is trained: no parameter gets a gradient"
        yield Verdict(
            "fail", "gradients", message, "look for .detach(), no_grad and requires_grad=False", "gradient.graph_cut"
        )
    elif seen.bad_grad:
        message = f"not finite in {first_of(seen.bad_grad)}"
        yield Verdict("fail", "gradients", message, "look for sqrt, log or division at 0", "precision.nonfinite_step")
    elif seen.without_grad:
        fraction = seen.values_without / seen.trained
        names = first_of(seen.without_grad)
        yield Verdict(
            "fail" if fraction >= 0.5 else "warn",
            "gradients",
            f"none for {len(seen.without_grad)} parameters ({fraction:.0%} of all values): {names}",
            "look for .detach() or .data after them; freeze parameters that should not train with model.freeze",
            code="gradient.graph_cut",
        )
    else:
        yield Verdict("ok", "gradients", f"all {seen.trained:,} trained values get one")
