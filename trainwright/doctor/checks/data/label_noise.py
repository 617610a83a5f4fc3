"""See the function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.data import BatchFacts, SampleLabelsFacts
from trainwright.doctor.finding import ExperimentRequest
from trainwright.runlog.records import Where

STEPS, TRIES = 16, 6
LEARNED = 0.1
"""Of the entropy of the labels: below it the model contradicts hardly any label."""
SAMPLES, WRONG = 128, 24
"""Samples, and labels that contradict the model among them, that are needed."""


@check(stage="label", confidence=0.8, needs=BatchFacts, explains=("optim.lr_too_low",))
def label_noise(run: RunContext) -> Iterator[Result]:
    """A large part of the labels is wrong.

    Why it matters: the loss stops falling early, then falls because wrong labels are memorized.

    How it is detected: 8 to 50 % of the labels contradict the model, which is as confident there as where labels agree,
    and these labels name any other class.

    Exceptions: hard samples, on which the model is less confident and the label is mostly its second choice.

    Usual cause: labels are wrong at random: annotation errors, or a join that mixed up some rows.

    Looks like: data.label_feature_misaligned, where the loss never falls.

    Fix: look at the samples named first; relabel or drop them, or stop before they are memorized.

    Sources: arXiv 2412.11304.
    """
    exams, batch = run.every(SampleLabelsFacts), run.latest(BatchFacts)
    recent = [each.loss for each in run.steps if each.step > run.last_step - STEPS]
    mean = sum(recent) / max(1, len(recent))
    entropy = batch.entropy if batch is not None and (batch.classes or 0) > 1 else None
    if entropy and run.last_step >= STEPS and LEARNED * entropy < mean < entropy:
        is_due = exams[-1][0] + STEPS <= run.last_step if exams else not run.was_tried(SampleLabelsFacts)
        if is_due and (run.finished or len(exams) < TRIES):
            yield ExperimentRequest(SampleLabelsFacts.experiment)
    for step, facts in exams:
        wrong = _suspects(facts)
        if not wrong:
            continue
        count, losses = len(facts.ids), facts.loss
        chosen = sorted(wrong, key=lambda n: -losses[n])
        right = sorted(set(range(count)) - set(wrong))
        yield run.finding(
            step,
            symptom=f"{len(wrong) / count:.0%} of labels contradict a model that is as confident there as elsewhere",
            where=Where(sample_ids=tuple(facts.ids[n] for n in chosen[:256])),
            evidence=[
                ("samples examined", count),
                ("loss where the label differs", _median(losses, wrong), _median(losses, right)),
            ],
        )
        return
    if exams:
        yield Passed(f"{len(exams[-1][1].ids)} labels")


def _suspects(facts: SampleLabelsFacts) -> list[int]:
    """Indices of the samples whose label is likely wrong; none where the task looks merely hard."""
    rank, sure = facts.rank, facts.sure
    wrong = [n for n, place in enumerate(rank) if place]
    right = [n for n, place in enumerate(rank) if not place]
    if len(rank) < SAMPLES or len(wrong) < WRONG or not 0.08 <= len(wrong) / len(rank) <= 0.5:
        return []
    middle = len(rank) // 2
    early = sum(1 for n in wrong if n < middle) / middle
    late = sum(1 for n in wrong if n >= middle) / (len(rank) - middle)
    usual = _median(sure, right)
    is_level = usual >= max(0.45, 2 / facts.classes) and _median(sure, wrong) >= 0.85 * usual
    if not is_level or max(early, late) > 1.6 * min(early, late) or _surer(sure, right, wrong) > 0.66:
        return []
    far = sum(1 for n in wrong if rank[n] > 1) / len(wrong)
    return wrong if facts.classes < 3 or far >= 0.65 * (facts.classes - 2) / (facts.classes - 1) else []


def _median(values: Sequence[float], places: Sequence[int]) -> float:
    chosen = sorted(values[n] for n in places)
    return float(chosen[len(chosen) // 2])


def _surer(sure: Sequence[float], ones: Sequence[int], others: Sequence[int]) -> float:
    """How often one of ``ones`` is surer than one of ``others`` (the AUC): 0.5 where there is no difference."""
    order = sorted([(sure[n], 0) for n in others] + [(sure[n], 1) for n in ones])
    ranks = sum(place for place, (_, one) in enumerate(order) if one)
    return (ranks - len(ones) * (len(ones) - 1) / 2) / (len(ones) * len(others))
