"""What the warnings of torch and numpy mean for a training."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainwright.doctor.finding import Severity
from trainwright.doctor.program.facts import ShownWarning


@dataclass(frozen=True)
class Meaning:
    """Of the warnings that ``text`` is found in."""

    text: re.Pattern[str]
    severity: Severity
    cause: str
    remedy: str


def _means(text: str, severity: Severity, cause: str, remedy: str) -> Meaning:
    return Meaning(re.compile(text), severity, cause, remedy)


MEANINGS: tuple[Meaning, ...] = (
    _means(
        r"Using a target size .* different to the input size",
        "warning",
        "prediction and target broadcast: each prediction is compared with the targets of others",
        "give both the same shape: prediction.squeeze(1), or target.unsqueeze(1)",
    ),
    _means(
        r"None of the inputs have requires_grad=True",
        "warning",
        "an activation checkpoint got no input with a graph, so nothing inside of it is trained",
        "checkpoint(..., use_reentrant=False)",
    ),
    _means(
        r"\.grad attribute of a Tensor that is not a leaf",
        "warning",
        "the gradient of a computed tensor is read, which is None",
        "read .grad of the parameter itself, or call retain_grad() on that tensor before backward()",
    ),
    _means(
        r"To copy construct from a tensor",
        "info",
        "torch.tensor(tensor) copies the values and drops the graph",
        "use the tensor itself where its gradient matters, tensor.detach().clone() where it does not",
    ),
    _means(
        r"Implicit dimension choice for (log_)?soft(max|min)",
        "warning",
        "softmax without dim chooses the dimension by the number of dimensions, which may be that of the batch",
        "pass dim=-1, or the dimension of the classes",
    ),
    _means(
        r"degrees of freedom is <= 0",
        "warning",
        "a standard deviation or variance of one value is NaN",
        "pass correction=0, or leave out what has one value",
    ),
    _means(
        r"discards the imaginary part",
        "warning",
        "complex values are cast to real ones: half of them is lost",
        "use .abs(), .real or torch.view_as_real on purpose",
    ),
    _means(
        r"scheduler\.step\(\)` before `optimizer\.step\(\)",
        "info",
        "the schedule advances before the first update, so its first rate is never used",
        "call scheduler.step() after optimizer.step()",
    ),
    _means(
        r"(invalid value|divide by zero|overflow) encountered|Mean of empty slice",
        "warning",
        "numpy computed a value that is not finite",
        "look at what the line divides by or takes the logarithm of",
    ),
    _means(
        r"gamma.*beta.*(renamed|unexpected)|were not used when initializing|newly initialized|size mismatch",
        "warning",
        "some weights of a checkpoint were not loaded",
        "compare the names in the checkpoint with those of the model",
    ),
    _means(
        r"lists? of numpy\.ndarrays is extremely slow",
        "info",
        "a tensor is made from a list of arrays, one number at a time",
        "torch.from_numpy(numpy.stack(arrays))",
    ),
)
"""The first one that fits counts."""


def meaning_of(shown: ShownWarning) -> Meaning | None:
    """What a warning means for the training; None where it is about something else, such as a name that will go."""
    return next((each for each in MEANINGS if each.text.search(shown.text)), None)
