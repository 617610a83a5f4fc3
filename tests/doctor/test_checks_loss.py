"""Checks of labels on records made by hand: each on its mechanism, and silent on its look-alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.data.names import labels
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.runlog.records import Examined, Watched

Check = Callable[[Case], Iterable[Finding | ExperimentRequest]]


def exam(name: str, step: int = 1, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=name, values=values)


def about_loss(*given: dict[str, Any], step: int = 1, **more: Any) -> Examined:
    """The exam of a step; every loss in it is asked to get smaller unless it says otherwise."""
    usual = {"shape": [64, 10], "module": "", "wants": 1, "value": 2.3}
    values = {"outer": [], "drawn": False, "terms": 1, "rivals": False, "tokens": False, "fed": True, "reached": 6}
    return exam("loss", step, given=[usual | each for each in given], **values | more)


def codes(check: Check, *records: Examined | Watched, finished: bool = False) -> list[str]:
    """What a check says: codes, and the names of the experiments that it wishes for."""
    said = check(Case(records, finished=finished))
    return [each.experiment if isinstance(each, ExperimentRequest) else each.found.code for each in said]


CE = {"op": "cross_entropy"}


def asked_for(offset: int, sees: float = 0.0, **more: Any) -> Examined:
    shares = {str(each): 1.0 if each == offset else 0.03 for each in (-1, 0, 1, 2, 3)}
    found = {"input": 0, "loss": 0, "shares": shares, "shape": [32, 16], "sees": sees, "from": 12, "ends": None}
    return exam("tokens", found=[found | more])


def test_targets_and_tokens() -> None:
    assert codes(labels.no_shift, asked_for(0)) == ["loss.no_shift"]
    assert codes(labels.no_shift, asked_for(0, given=1.2)) == ["loss.no_shift"]
    assert codes(labels.no_shift, asked_for(0, given=0.0)) == [], "the model shifts what it is given"
    assert codes(labels.no_shift, asked_for(2)) == ["loss.no_shift"]
    assert [each.found.severity for each in labels.no_shift(Case([asked_for(-1)]))] == ["info"]
    assert codes(labels.no_shift, asked_for(1)) == []
    assert codes(labels.no_shift, asked_for(0, sees=0.4)) == [], "an autoencoder sees the whole row"
    assert codes(labels.future_leak, asked_for(1, sees=0.4)) == ["model.future_leak"]
    assert codes(labels.future_leak, asked_for(1)) == codes(labels.future_leak, asked_for(0, sees=0.4)) == []


def test_ends_that_are_never_learned() -> None:
    ends = {"id": 0, "within": 32, "attended": 0, "first": 32, "targets": 0, "rows": 32}
    assert codes(labels.eos_ignored, asked_for(1, ends=ends)) == ["loss.eos_ignored"]
    assert codes(labels.eos_ignored, asked_for(1, ends=ends | {"within": 0, "attended": 32})) == ["loss.eos_ignored"]
    assert codes(labels.eos_ignored, asked_for(1, ends=ends | {"within": 0})) == [], "padding and nothing else"
    assert codes(labels.eos_ignored, asked_for(1, ends=ends | {"targets": 5})) == []


def test_labels_that_are_no_classes_are_named() -> None:
    given = {"shape": [4], "dtype": "int64", "min": 1.0, "max": 10.0, "values": [3, 10, 1, 10]}
    failed = {"op": "cross_entropy", "arguments": ["Slot", given, -100]}
    raised = exam("unfinished", error="IndexError: Target 10 is out of bounds.", ids=[[7, 8, 9, 5]], failed=failed)
    (said,) = labels.label_out_of_range(Case([raised], finished=True))
    assert isinstance(said, Finding)
    assert said.found.where.sample_ids == (8, 5)
    from_0 = {"op": "cross_entropy", "arguments": ["Slot", given | {"min": 0.0}, -100]}
    for ids, asks in (([[7, 8, 9, 5]], "the samples named"), ([], "for these labels in the data")):
        raised = exam("unfinished", error="IndexError: Target 10 is out of bounds.", ids=ids, failed=from_0)
        (said,) = labels.label_out_of_range(Case([raised], finished=True))
        assert isinstance(said, Finding) and asks in said.found.remedy
    assert codes(labels.label_out_of_range, exam("unfinished", error="KeyboardInterrupt: ", ids=[])) == []
    yes_or_no = {"op": "binary_cross_entropy_with_logits", "target_min": -1.0, "target_max": 1.0}
    assert codes(labels.label_out_of_range, about_loss(yes_or_no)) == ["data.label_out_of_range"]


def samples(sure_where_wrong: float, rank: Callable[[int], int], wrong: Callable[[int], bool]) -> Examined:
    ids = list(range(400))
    return exam(
        "sample_labels",
        24,
        classes=4,
        ids=ids,
        rank=[rank(n) if wrong(n) else 0 for n in ids],
        sure=[(sure_where_wrong if wrong(n) else 0.7) + n % 7 / 100 for n in ids],
        loss=[2.0 if wrong(n) else 0.3 for n in ids],
    )


def test_wrong_labels() -> None:
    hint = about_loss(CE | {"right": 0.7, "sure": 0.6}, step=24)
    assert codes(labels.label_noise, hint) == ["sample_labels"]
    noise = samples(0.7, lambda n: 1 + n % 3, lambda n: n % 10 < 3)
    assert codes(labels.label_noise, noise) == ["data.label_noise"]


@each_row(
    "looks_like",
    [
        samples(0.4, lambda n: 1 + n % 3, lambda n: n % 10 < 3),  # hard: it is not sure there
        samples(0.7, lambda n: 1, lambda n: n % 10 < 3),  # two classes are easily mistaken for one another
        samples(0.7, lambda n: 1 + n % 3, lambda n: n >= 280),  # data of another kind, from some step on
        samples(0.7, lambda n: 1 + n % 3, lambda n: n % 10 < 7),  # nothing is learned
    ],
)
def test_hard_samples_are_not_wrong_labels(looks_like: Examined) -> None:
    assert codes(labels.label_noise, looks_like) == []
