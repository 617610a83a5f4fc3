"""The samples on which a model is wrong, as ``errors.json`` of a run folder and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainwright.runs.files import BUNDLE, UnreadableFile, read_json
from trainwright.runs.json_values import JsonValue, strict

NAME = "errors.json"
MAX_ENTRIES_PRINTED = 10
"""The number of entries of each list that the text shows."""
_FILE_CONFIG = ConfigDict(extra="ignore")


@dataclass(frozen=True, config=_FILE_CONFIG)
class SamplePreview:
    """A sample to display: a picture (``png``, in base64), or a text."""

    kind: Literal["image", "text", "table", "other"]
    text: str = ""
    png: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/=]*$")] = ""


@dataclass(frozen=True, config=_FILE_CONFIG)
class BadCase:
    """One sample: ``sure`` is the probability of the prediction, ``own`` the probability of the label.

    ``likely``: its label is probably wrong.
    """

    id: int
    loss: float
    label: str = ""
    predicted: str = ""
    sure: float | None = None
    own: float | None = None
    likely: bool = False


@dataclass(frozen=True, config=_FILE_CONFIG)
class LossSlice:
    """The samples with one value of a grouping.

    ``excess`` is their mean loss minus that of all others, ``at_least`` its lower bound with 95% confidence.
    """

    grouping: str
    name: str
    count: int
    loss: float
    excess: float
    at_least: float
    accuracy: float | None = None


@dataclass(frozen=True, config=_FILE_CONFIG)
class ConfidenceBin:
    """Predictions of about equal probability: their number, mean probability, and accuracy."""

    count: int
    sure: float
    accuracy: float


@dataclass(frozen=True, config=_FILE_CONFIG)
class ConfusedPair:
    """The number of times that ``label`` was predicted as ``predicted``."""

    label: str
    predicted: str
    count: int


@dataclass(frozen=True, config=_FILE_CONFIG, repr=False)
class BadCases:
    """The errors of a model on a dataset of ``count`` samples; each list begins with the worst.

    ``worst`` has the largest losses, ``mistakes`` the wrong predictions with the highest confidence, ``labels`` the
    labels that are most likely wrong; ``likely_wrong`` counts all labels that are probably wrong. ``accuracy`` and
    ``ece`` (expected calibration error) are over ``unit``: samples, tokens or pixels. ``matrix`` has a row for each
    label and a column for each prediction, in the order of ``classes``; it is empty if there are many classes.
    ``shown`` are the samples of all lists, by id.
    """

    data: str
    count: int
    loss: float
    run: str = ""
    step: int | None = None
    likely_wrong: int = 0
    unit: str = "samples"
    accuracy: float | None = None
    ece: float | None = None
    worst: tuple[BadCase, ...] = ()
    mistakes: tuple[BadCase, ...] = ()
    labels: tuple[BadCase, ...] = ()
    slices: tuple[LossSlice, ...] = ()
    bins: tuple[ConfidenceBin, ...] = ()
    confused: tuple[ConfusedPair, ...] = ()
    classes: tuple[str, ...] = ()
    matrix: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    shown: dict[int, SamplePreview] = field(default_factory=dict)
    exit_code = 0

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return the output of ``--json``, which is also stored in the run folder."""
        fields: Mapping[str, object] = asdict(self)
        return strict(fields)

    def lines(self) -> list[str]:
        return list(_lines(self))


def read_bad_cases(path: Path) -> BadCases:
    """Read ``errors.json``. Raises UnreadableFile if it does not have the format of ``trainwright errors``."""
    value = read_json(path, BUNDLE)
    try:
        return TypeAdapter(BadCases).validate_python(value)
    except ValidationError as error:
        raise UnreadableFile(path, f"{error.error_count()} of its values are not those of a list of errors") from None


def _lines(cases: BadCases) -> Iterator[str]:
    at = "" if cases.step is None else f", step {cases.step}"
    of = f"{cases.run}{at}: " if cases.run else ""
    right = "" if cases.accuracy is None else f", {cases.accuracy:.2%} of the {cases.unit} right"
    yield f"{of}{cases.count:,} samples of {cases.data}, loss {cases.loss:.4g}{right}"
    yield from _section("the largest losses", cases.worst, cases)
    yield from _section("the model is most sure of these mistakes", cases.mistakes, cases)
    likely = [each for each in cases.labels if each.likely]
    first = f", the first {len(likely):,} of them" if len(likely) < cases.likely_wrong else ""
    yield from _section(f"labels that are likely wrong: {cases.likely_wrong:,}{first}", likely, cases)
    others = [each for each in cases.labels if not each.likely]
    title = "not likely wrong, and next in order" if likely else "no label is likely wrong; these come first"
    yield from _section(title, others, cases)
    for grouping in dict.fromkeys(each.grouping for each in cases.slices):
        yield f"loss by {grouping}, the worst first"
        for each in [one for one in cases.slices if one.grouping == grouping][:MAX_ENTRIES_PRINTED]:
            right = "" if each.accuracy is None else f", {each.accuracy:.2%} right"
            yield (
                f"  {each.name}: loss {each.loss:.4g} of {each.count:,} samples{right}; "
                f"{each.excess:+.4g} to all others{_bound(each.at_least)}"
            )
    if cases.confused:
        yield "most frequent confusions"
    for pair in cases.confused[:MAX_ENTRIES_PRINTED]:
        yield f"  {pair.label} for {pair.predicted}: {pair.count:,}"
    if cases.ece is not None:
        yield f"calibration: {cases.ece:.2%} expected calibration error{_tendency(cases.bins)}"
    yield from (f"note: {note}" for note in cases.notes)


def _section(title: str, listed: Sequence[BadCase], cases: BadCases) -> Iterator[str]:
    if not listed:
        return
    yield title
    for rank, each in enumerate(listed[:MAX_ENTRIES_PRINTED], 1):
        yield f"  {rank}. sample {each.id}: {', '.join(_describe(each))}{_glimpse(cases.shown.get(each.id))}"
    if len(listed) > MAX_ENTRIES_PRINTED:
        yield f"  and {len(listed) - MAX_ENTRIES_PRINTED} more in {NAME}"


def _describe(case: BadCase) -> Iterator[str]:
    yield f"loss {case.loss:.4g}"
    if case.label:
        yield f"label {case.label}" + ("" if case.own is None else f" ({case.own:.1%})")
    if case.predicted:
        yield f"predicted {case.predicted}" + ("" if case.sure is None else f" ({case.sure:.1%})")


def _bound(at_least: float) -> str:
    return f", at least {at_least:+.4g}" if math.isfinite(at_least) else ""


def _glimpse(sample: SamplePreview | None) -> str:
    if sample is None or sample.kind not in ("text", "table"):
        return ""
    text = " ".join(sample.text.split())
    return f"  | {text[:60]}{'...' if len(text) > 60 else ''}"


def _tendency(bins: Sequence[ConfidenceBin]) -> str:
    count = sum(each.count for each in bins)
    surer = sum(each.count * (each.sure - each.accuracy) for each in bins) / max(1, count)
    return f"; on average {abs(surer):.2%} too {'sure' if surer > 0 else 'unsure'}"
