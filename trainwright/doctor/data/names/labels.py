"""Checks of labels: shifted tokens, future tokens in the input, ignored end tokens, labels out of range or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where

SAME = 0.95
"""Share of targets that must equal a token of the input for them to count as read from there."""
SEEN = 1e-3
"""Change of a score, in standard deviations of the scores, that is too large for rounding."""
LOOKS = 2
"""In how many steps tokens are examined."""


def look_at_tokens(case: Case) -> Iterator[ExperimentRequest]:
    """Requests a look at the targets in the first steps of a model that gets tokens and predicts classes."""
    exam = case.newest("loss")
    if exam is None or len(case.outcomes("tokens")) >= LOOKS or not exam.values.get("tokens"):
        return
    if any(row["op"] in ("cross_entropy", "nll_loss", "chunked_cross_entropy") for row in exam.values["given"]):
        yield ExperimentRequest("tokens", exam.step)


def _rows(case: Case) -> Iterator[tuple[Examined, list[Facts]]]:
    for exam in case.outcomes("tokens"):
        if exam.values.get("found"):
            yield exam, exam.values["found"]


def _offset(row: Facts) -> int | None:
    """By how many places the targets are shifted against the input, 1 for the next token; None where none fits."""
    shares = {int(k): v for k, v in row["shares"].items() if v is not None and v >= SAME}
    return next(iter(shares)) if len(shares) == 1 else None


def no_shift(case: Case) -> Iterator[Finding]:
    """The target of a causal model is the token that it is given, or another one than the next.

    Where one loss has the next token as its target, others may have any (prediction of several tokens). A model that
    sees the whole row may reconstruct it on purpose (autoencoder, masked tokens): nothing is reported. Nor is it where
    the scores at a position do not depend on its own token: the model shifts what it is given (teacher forcing within a
    decoder, masked convolutions).
    """
    for exam, found in _rows(case):
        offsets = [(_offset(row), row) for row in found]
        if any(offset == 1 for offset, _ in offsets):
            return
        for offset, row in offsets:
            if offset is None or row.get("sees") is None or row["sees"] > SEEN:
                continue
            if offset == 0 and row.get("given") is not None and row["given"] <= SEEN:
                continue
            target = {0: "the token it is given", -1: "the token before"}.get(offset, f"the token {offset} places on")
            yield finding(
                "loss.no_shift",
                "critical" if offset >= 0 else "info",  # to say again what was heard is a task of its own
                exam.step,
                symptom=f"{row['shares'][str(offset)]:.0%} of the targets are {target}, not the next one",
                cause="targets are not shifted by one against the inputs"
                if offset <= 0
                else "targets are shifted twice",
                remedy="shift once: cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())",
                sure=0.95,
                stage="label",
                where=Where(op="cross_entropy"),
                evidence=[
                    ("targets that equal the input there", row["shares"][str(offset)], 0.0),
                    ("targets that equal the next token", row["shares"]["1"], 1.0),
                    ("change of scores when only later tokens change", row["sees"], 0.0),
                ],
                trial=RemedyTrial("next_token"),
            )
            return


def future_leak(case: Case) -> Iterator[Finding]:
    """The targets are the next tokens, and scores change when only tokens after their position are replaced.

    Measured in eval mode, so that the statistics of a batch do not count, and only at positions whose target counts: a
    prefix that is seen as a whole and not predicted is no leak.
    """
    for exam, found in _rows(case):
        for row in found:
            if _offset(row) != 1 or row.get("sees") is None or row["sees"] <= SEEN:
                continue
            yield finding(
                "model.future_leak",
                "critical",
                exam.step,
                symptom=f"earlier scores change by {row['sees']:.2g} standard deviations when only tokens from place "
                f"{row['from']} on are replaced",
                cause="the model sees the tokens that it has to predict: the causal mask is missing or off by one",
                remedy="is_causal=True in the attention; no bidirectional layer, symmetric padding or norm over time",
                sure=0.95,
                stage="forward",
                evidence=[
                    ("change of earlier scores, in deviations", row["sees"], 0.0),
                    ("targets that are the next token", row["shares"]["1"], 1.0),
                ],
                trial=RemedyTrial("causal_mask"),
                explains=("data.target_leak",),
            )
            return


def eos_ignored(case: Case) -> Iterator[Finding]:
    """The id that pads rows also ends texts, and it is never a target.

    Mere padding stands only at the end. Here the id also stands between targets, or the attention mask counts the first
    one as text. Prompts that are not trained on have no target before it.
    """
    best: tuple[Examined, Facts] | None = None
    for exam, found in _rows(case):
        for row in found:
            ends = row.get("ends")
            if ends and ends["targets"]:
                return
            if ends and _offset(row) == 1 and max(ends["within"], ends["attended"]) >= max(2, ends["rows"] // 8):
                best = best or (exam, ends)
    if best is None:
        return
    exam, ends = best
    how = (
        f"{ends['within']} times between targets"
        if ends["within"] >= ends["attended"]
        else f"{ends['attended']} times where the attention mask counts it as text"
    )
    yield finding(
        "loss.eos_ignored",
        "warning",
        exam.step,
        symptom=f"token {ends['id']} ends texts and is never a target: it occurs {how}, and 0 times among the targets",
        cause=f"{ends['id']} is padding as well as the end of a text, and the loss ignores padding",
        remedy="a separate padding token, or labels that are ignored by the attention mask, not by the id",
        sure=0.9,
        stage="label",
        where=Where(op="cross_entropy"),
        evidence=[("ends in the inputs", ends["within"] + ends["first"]), ("ends among the targets", 0, "> 0")],
        trial=RemedyTrial("learned_ends", {"end": ends["id"]}),
    )


_OUT_OF_RANGE = re.compile(
    r"(?:Target|label) (-?\d+) is out of (?:bounds|range)|"
    r"Class values must be (?:smaller than num_classes|non-negative)"
)


def label_out_of_range(case: Case) -> Iterator[Finding]:
    """The loss raised an error about a label that is no class, or a target of a binary loss lies outside of 0 to 1.

    The labels are the arguments of the function that raised. The number of classes is known from earlier steps; else
    the label that the message names is taken as the lowest invalid one.
    """
    facts = case.facts("unfinished")
    if (match := _OUT_OF_RANGE.search(facts.get("error") or "")) is not None:
        yield _out_of_range(case, facts, int(match.group(1)) if match.group(1) else None)
    for exam in case.outcomes("loss"):
        for used in exam.values.get("given", ()):
            low, high = used.get("target_min", 0.0), used.get("target_max", 1.0)
            if low < -1e-6 or high > 1 + 1e-6:
                yield _not_between(exam, used["op"], low, high)
                return


def _out_of_range(case: Case, facts: Facts, named: int | None) -> Finding:
    failed = facts.get("failed") or {}
    op = failed.get("op") or "cross_entropy"
    arguments = [
        a for a in failed.get("arguments", ()) if isinstance(a, dict) and a["dtype"].startswith(("int", "uint"))
    ]
    labels = arguments[0] if arguments else {}
    before = (g["shape"][1] for e in case.outcomes("loss") for g in e.values.get("given", ()) if g["op"] == op)
    classes = next(before, None)
    least = classes if classes is not None else named if named is not None and named >= 0 else None
    values: list[int] = labels.get("values", [])
    ids: list[int] = next((i for i in reversed(facts.get("ids", ())) if i), [])
    bad = [n for n, v in enumerate(values) if (least is not None and v >= least) or (v < 0 and v != -100)]
    span = f"{labels['min']:.0f} to {labels['max']:.0f}" if "min" in labels else str(named)
    by_one = least is not None and labels.get("min") == 1 and labels.get("max") == least
    off_by_one = "subtract 1 from the labels, or give the last layer one more output"
    samples = tuple(ids[n] for n in bad) if len(ids) == len(values) else ()
    look = "look at the samples named" if samples else "look for these labels in the data"
    return finding(
        "data.label_out_of_range",
        "critical",
        max(case.last_step, 1),
        symptom=f"{op} raised: {named if named is not None else 'a label'} is no class; the labels are {span}",
        cause="labels are counted from 1" if by_one else "a label names no class, or the model has too few outputs",
        remedy=off_by_one if by_one else f"{look}; label what is to be ignored -100",
        sure=0.98,
        stage="label",
        where=Where(op=op, sample_ids=samples, source=failed.get("line")),
        evidence=[
            ("labels", span, "classes" if classes is None else f"0 to {classes - 1}"),
            ("labels of this batch that are no class", len(bad), 0),
        ],
        explains=("loop.*",),
    )


def _not_between(exam: Examined, op: str, low: float, high: float) -> Finding:
    return finding(
        "data.label_out_of_range",
        "critical",
        exam.step,
        symptom=f"targets of {op} lie between {low:.4g} and {high:.4g}",
        cause="for a target outside of 0 to 1 no score is best: the loss falls without end",
        remedy="labels 0 and 1 (not -1 and 1, nor 0 to 255)",
        sure=0.95,
        stage="label",
        where=Where(op=op),
        evidence=[("targets", [low, high], "0 to 1")],
        trial=RemedyTrial("targets_in_range"),
        explains=("loss.*", "opt*.*"),
    )


def label_noise(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The model is as confident where a label contradicts it as where it agrees, and such labels name any other class.

    On hard samples it is less confident, and the label is mostly its second choice. Data of another kind, which begin
    at some step, are contradicted only from there on.
    """
    exam = case.newest("loss")
    judged = [e for e in case.outcomes("sample_labels") if "rank" in e.values]
    if exam is not None and exam.step >= 16 and (case.finished or len(case.outcomes("sample_labels")) < 6):
        for used in exam.values.get("given", ()):
            if 0.4 <= used.get("right", 1.0) <= 0.95 and used["sure"] >= 0.35:
                yield ExperimentRequest("sample_labels", exam.step)
                break
    for each in judged:
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
            symptom=f"{len(wrong) / count:.0%} of labels contradict a model that is as confident there as elsewhere",
            cause="some labels are wrong at random: at first the model does not learn them, later it memorises them",
            remedy="look at the samples named first; relabel or drop them, or stop before they are memorised",
            sure=0.8,
            stage="label",
            where=Where(sample_ids=tuple(ids[n] for n in chosen[:256])),
            evidence=[
                ("samples examined", count),
                ("probability of the predicted class where the label differs", _median(each.values["sure"], wrong)),
                ("where the label agrees", _median(each.values["sure"], right)),
                ("loss where the label differs", _median(losses, wrong), _median(losses, right)),
            ],
            trial=RemedyTrial("without_samples", {"ids": [ids[n] for n in chosen]}),
            explains=("optim.lr_too_low",),
        )
        return


def suspects(values: Facts) -> list[int]:
    """Indices of the samples whose label is likely wrong; none where the task looks merely hard."""
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
    """How often one of ``ones`` is surer than one of ``others`` (the AUC): 0.5 where there is no difference."""
    order = sorted([(sure[n], 0) for n in others] + [(sure[n], 1) for n in ones])
    ranks = sum(place for place, (_, one) in enumerate(order) if one)
    return (ranks - len(ones) * (len(ones) - 1) / 2) / (len(ones) * len(others))


NAMES: tuple[OldCheck, ...] = (
    look_at_tokens,
    no_shift,
    future_leak,
    eos_ignored,
    label_out_of_range,
    label_noise,
)
