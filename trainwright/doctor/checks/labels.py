"""Checks of labels: shifted tokens, tokens seen before their time, ends, labels that cannot be or that are wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, check, finding
from trainwright.runlog.records import Examined, Where

SAME = 0.95
"""Share of targets that equal a token of the input, from which on they are taken from it."""
SEEN = 1e-3
"""Change of a score, in deviations of the scores, that rounding does not make."""
LOOKS = 2
"""How many steps are looked at for tokens."""


@check
def look_at_tokens(case: Case) -> Iterator[ExperimentRequest]:
    """Where a model is given tokens and asked for classes, what it is asked for is looked at in the first steps."""
    exam = case.exam("loss")
    if exam is None or len(case.exams("tokens")) >= LOOKS or not exam.values.get("tokens"):
        return
    if any(told["op"] in ("cross_entropy", "nll_loss", "chunked_cross_entropy") for told in exam.values["given"]):
        yield ExperimentRequest("tokens", exam.step)


def _found(case: Case) -> Iterator[tuple[Examined, list[dict[str, Any]]]]:
    for exam in case.exams("tokens"):
        if exam.values.get("found"):
            yield exam, exam.values["found"]


def _offset(told: dict[str, Any]) -> int | None:
    """How many places further on the targets were read; 1 is the next token. None where none stands out."""
    shares = {int(k): v for k, v in told["shares"].items() if v is not None and v >= SAME}
    return next(iter(shares)) if len(shares) == 1 else None


@check
def no_shift(case: Case) -> Iterator[Finding]:
    """A model that sees no later token is asked for the one it is given, or for another than the next.

    Where some loss does ask for the next token, others may ask for what they like (several tokens ahead). A model that
    sees the whole row may rightly have to rebuild it, through a bottleneck or from what is hidden: nothing is said.
    """
    for exam, found in _found(case):
        offsets = [(_offset(told), told) for told in found]
        if any(offset == 1 for offset, _ in offsets):
            return
        for offset, told in offsets:
            if offset is None or told.get("sees") is None or told["sees"] > SEEN:
                continue
            asked = {0: "the token it is given", -1: "the token before"}.get(offset, f"the token {offset} places on")
            yield finding(
                "loss.no_shift",
                "critical",
                exam.step,
                symptom=f"the model is asked for {asked}: {told['shares'][str(offset)]:.0%} of the targets are that",
                cause="targets are not shifted by one against the inputs"
                if offset <= 0
                else "targets are shifted twice",
                remedy="cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), the shift made once",
                sure=0.95,
                stage="label",
                where=Where(op="cross_entropy"),
                evidence=[
                    ("targets that equal the input there", told["shares"][str(offset)], 0.0),
                    ("targets that equal the next token", told["shares"]["1"], 1.0),
                    ("change of scores when only later tokens change", told["sees"], 0.0),
                ],
                trial=RemedyTrial("next_token"),
            )
            return


@check
def future_leak(case: Case) -> Iterator[Finding]:
    """The targets are the next tokens, and the scores before a place change when only the tokens after it do.

    Looked at in eval mode, so that what samples share in a batch does not count, and only at places whose target
    counts: a prefix that is seen as a whole and not predicted is no leak.
    """
    for exam, found in _found(case):
        for told in found:
            if _offset(told) != 1 or told.get("sees") is None or told["sees"] <= SEEN:
                continue
            yield finding(
                "model.future_leak",
                "critical",
                exam.step,
                symptom=f"scores change by {told['sees']:.2g} of their deviation when only tokens from place "
                f"{told['from']} on are others",
                cause="the model sees the tokens that it is to predict: the causal mask is missing or off by one",
                remedy="is_causal=True in the attention; no bidirectional layer, symmetric padding or norm over time",
                sure=0.95,
                stage="forward",
                evidence=[
                    ("change of earlier scores, in deviations", told["sees"], 0.0),
                    ("targets that are the next token", told["shares"]["1"], 1.0),
                ],
                trial=RemedyTrial("causal_mask"),
                explains=("data.target_leak",),
            )
            return


@check
def eos_ignored(case: Case) -> Iterator[Finding]:
    """The id that fills rows up also ends something, and never is a target.

    Padding alone only stands at the end. Here the id also stands right after targets with other tokens to come, or a
    mask of the input says that the first one is to be seen. Prompts that are not trained on have no target before it.
    """
    best: tuple[Examined, dict[str, Any]] | None = None
    for exam, found in _found(case):
        for told in found:
            ends = told.get("ends")
            if ends and ends["targets"]:
                return
            if ends and _offset(told) == 1 and max(ends["within"], ends["attended"]) >= max(2, ends["rows"] // 8):
                best = best or (exam, ends)
    if best is None:
        return
    exam, ends = best
    how = (
        f"{ends['within']} times between tokens that are learned"
        if ends["within"] >= ends["attended"]
        else f"{ends['attended']} times where the attention mask counts it as text"
    )
    yield finding(
        "loss.eos_ignored",
        "warning",
        exam.step,
        symptom=f"token {ends['id']} ends texts and is never a target: it occurs {how}, and 0 times in what is learned",
        cause=f"{ends['id']} is padding as well as the end of a text, and padding is ignored in the loss",
        remedy="a padding token of its own, or labels that are ignored by the attention mask, not by the id",
        sure=0.9,
        stage="label",
        where=Where(op="cross_entropy"),
        evidence=[("ends in the inputs", ends["within"] + ends["first"]), ("ends among the targets", 0, "> 0")],
        trial=RemedyTrial("learned_ends", {"end": ends["id"]}),
    )


_SAID = re.compile(
    r"(?:Target|label) (-?\d+) is out of (?:bounds|range)|"
    r"Class values must be (?:smaller than num_classes|non-negative)"
)


@check
def label_out_of_range(case: Case) -> Iterator[Finding]:
    """The loss raised over a label that is no class; or a label of a yes-or-no loss lies outside of 0 to 1.

    The labels are those that the function was given when it raised. How many classes there are is known from steps
    before; else the label that the message names is the least that is none.
    """
    told = case.about("unfinished")
    if (said := _SAID.search(told.get("error") or "")) is not None:
        yield _out_of_range(case, told, int(said.group(1)) if said.group(1) else None)
    for exam in case.exams("loss"):
        for given in exam.values.get("given", ()):
            low, high = given.get("target_min", 0.0), given.get("target_max", 1.0)
            if low < -1e-6 or high > 1 + 1e-6:
                yield _not_between(exam, given["op"], low, high)
                return


def _out_of_range(case: Case, told: dict[str, Any], named: int | None) -> Finding:
    failed = told.get("failed") or {}
    op = failed.get("op") or "cross_entropy"
    arguments = [
        a for a in failed.get("arguments", ()) if isinstance(a, dict) and a["dtype"].startswith(("int", "uint"))
    ]
    labels = arguments[0] if arguments else {}
    before = (g["shape"][1] for e in case.exams("loss") for g in e.values.get("given", ()) if g["op"] == op)
    classes = next(before, None)
    least = classes if classes is not None else named if named is not None and named >= 0 else None
    values: list[int] = labels.get("values", [])
    ids: list[int] = next((i for i in reversed(told.get("ids", ())) if i), [])
    bad = [n for n, v in enumerate(values) if (least is not None and v >= least) or (v < 0 and v != -100)]
    seen = f"{labels['min']:.0f} to {labels['max']:.0f}" if "min" in labels else str(named)
    by_one = least is not None and labels.get("min") == 1 and labels.get("max") == least
    off_by_one = "subtract 1 from the labels, or give the last layer one more output"
    return finding(
        "data.label_out_of_range",
        "critical",
        max(case.last_step, 1),
        symptom=f"{op} raised: {named if named is not None else 'a label'} is no class; the labels are {seen}",
        cause="labels are counted from 1" if by_one else "a label names no class, or the model has too few outputs",
        remedy=off_by_one if by_one else "look at the samples named; what is to be left out is labelled -100",
        sure=0.98,
        stage="label",
        where=Where(op=op, sample_ids=tuple(ids[n] for n in bad) if len(ids) == len(values) else ()),
        evidence=[
            ("labels", seen, "classes" if classes is None else f"0 to {classes - 1}"),
            ("labels of this batch that are none", len(bad), 0),
        ],
        explains=("loop.*",),
    )


def _not_between(exam: Examined, op: str, low: float, high: float) -> Finding:
    return finding(
        "data.label_out_of_range",
        "critical",
        exam.step,
        symptom=f"targets of {op} lie between {low:.4g} and {high:.4g}",
        cause="a target outside of 0 to 1 has no best score: the loss falls without end",
        remedy="labels 0 and 1 (not -1 and 1, nor 0 to 255)",
        sure=0.95,
        stage="label",
        where=Where(op=op),
        evidence=[("targets", [low, high], "0 to 1")],
        trial=RemedyTrial("targets_in_range"),
        explains=("loss.*", "opt.*"),
    )


@check
def label_noise(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The model is as sure where a label contradicts it as where it agrees, and such labels may name any other class.

    Hard samples are told by both: there it is less sure, and the label is mostly its second choice. Data of another
    kind, which come from some step on, are contradicted then and not before.
    """
    exam = case.exam("loss")
    asked = [e for e in case.exams("sample_labels") if "rank" in e.values]
    if exam is not None and exam.step >= 16 and (case.finished or len(case.exams("sample_labels")) < 6):
        for told in exam.values.get("given", ()):
            if 0.4 <= told.get("right", 1.0) <= 0.95 and told["sure"] >= 0.35:
                yield ExperimentRequest("sample_labels", exam.step)
                break
    for each in asked:
        wrong = suspects(each.values)
        if not wrong:
            continue
        ids, count = each.values["ids"], len(each.values["ids"])
        losses = each.values["loss"]
        chosen = sorted(wrong, key=lambda n: -losses[n])
        right = sorted(set(range(count)) - set(wrong))
        yield finding(
            "data.label_noise",
            "warning",
            each.step,
            symptom=f"{len(wrong) / count:.0%} of the labels contradict a model that is as sure there as elsewhere",
            cause="a part of the labels is wrong, at random: first they are not learned, later they are memorised",
            remedy="look at the samples named first; relabel or drop them, or stop before they are memorised",
            sure=0.8,
            stage="label",
            where=Where(sample_ids=tuple(ids[n] for n in chosen[:256])),
            evidence=[
                ("samples judged", count),
                ("probability of the class it names, where the label differs", _median(each.values["sure"], wrong)),
                ("where it agrees", _median(each.values["sure"], right)),
                ("loss where the label differs", _median(losses, wrong), _median(losses, right)),
            ],
            trial=RemedyTrial("without_samples", {"ids": [ids[n] for n in chosen]}),
            explains=("opt.lr_too_low",),
        )
        return


def suspects(values: dict[str, Any]) -> list[int]:
    """Places in the lists of samples whose label is likely wrong; none where it looks like a hard task."""
    rank, sure, classes = values["rank"], values["sure"], values["classes"]
    wrong = [n for n, place in enumerate(rank) if place]
    right = [n for n, place in enumerate(rank) if not place]
    if len(rank) < 128 or len(wrong) < 24 or not 0.08 <= len(wrong) / len(rank) <= 0.5:
        return []
    middle = len(rank) // 2
    early = sum(1 for n in wrong if n < middle) / middle
    late = sum(1 for n in wrong if n >= middle) / (len(rank) - middle)
    usual = _median(sure, right)
    level = usual >= max(0.45, 2 / classes) and _median(sure, wrong) >= 0.85 * usual
    if not level or max(early, late) > 1.6 * min(early, late) or _surer(sure, right, wrong) > 0.66:
        return []
    far = sum(1 for n in wrong if rank[n] > 1) / len(wrong)
    return wrong if classes < 3 or far >= 0.65 * (classes - 2) / (classes - 1) else []


def _median(values: Sequence[float], places: Sequence[int]) -> float:
    chosen = sorted(values[n] for n in places)
    return float(chosen[len(chosen) // 2])


def _surer(sure: Sequence[float], ones: Sequence[int], others: Sequence[int]) -> float:
    """How often one of ``ones`` is surer than one of ``others``: 0.5 where it makes no difference."""
    order = sorted([(sure[n], 0) for n in others] + [(sure[n], 1) for n in ones])
    ranks = sum(place for place, (_, one) in enumerate(order) if one)
    return (ranks - len(ones) * (len(ones) - 1) / 2) / (len(ones) * len(others))
