"""Checks of the loss: what it is given, which way it pulls, whether it reaches the model, and which term rules it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, check, finding
from trainwright.runlog.records import Examined, Watched, Where

RATIO = 1000.0
"""Between the gradients of two terms, from which on the smaller one is as good as not there."""


def _given(case: Case) -> Iterator[tuple[Examined, dict[str, Any]]]:
    """Every loss or softmax of every examined step, with the exam it is from."""
    for exam in case.exams("loss"):
        for told in exam.values.get("given", ()):
            yield exam, told


@check
def softmax_before_ce(case: Case) -> Iterator[Finding]:
    """cross_entropy takes a softmax itself, and every row it is given is one already: none negative, the sum is 1.

    Logits that happen to be positive do not sum to 1 in each row; log-probabilities, for which a second log_softmax
    changes nothing, are negative. A sigmoid before a loss with logits is the same, told by the graph.
    """
    for exam, told in _given(case):
        twice = told["op"] in ("cross_entropy", "log_softmax") and told.get("simplex") and told.get("wants") == 1
        if not twice and not told.get("squashed"):
            continue
        first = "sigmoid" if told.get("squashed") else "softmax"
        seen = "probabilities between 0 and 1" if told.get("squashed") else "rows that sum to 1, none negative"
        yield finding(
            "loss.softmax_before_ce",
            "critical",
            exam.step,
            symptom=f"{told['op']} is given probabilities: {seen}",
            cause=f"the {first}{_in(told)} comes before {told['op']}, which takes logits and applies its own",
            remedy=f"leave the {first} out of the model in training and give {told['op']} the scores before it",
            sure=0.97,
            stage="loss",
            where=Where(module=told.get("made_in") or told["module"] or None, op=told["op"]),
            evidence=[("sum of each row of its input" if first == "softmax" else "input", seen, "logits")],
            trial=RemedyTrial("scores_for_probabilities"),
            explains=("loss.softmax_twice", "opt.lr_too_low", "opt.lr_too_high", "grad.vanishing", "data.label_*"),
        )
        return


def _in(told: dict[str, Any]) -> str:
    return f" in {told['made_in']}" if told.get("made_in") else ""


@check
def softmax_twice(case: Case) -> Iterator[Finding]:
    """A softmax of what is already a softmax is nearly flat, wherever it is: probabilities differ by 1 at most."""
    for exam, told in _given(case):
        if told["op"] == "cross_entropy" or not told.get("simplex") or "softmax" not in told["op"]:
            continue
        if told["op"] == "log_softmax" and told.get("wants") == 1:
            continue  # a likelihood: softmax_before_ce
        place = "in the loss" if not told["module"] else f"in {told['module']}"
        yield finding(
            "loss.softmax_twice",
            "warning",
            exam.step,
            symptom=f"a {told['op']} {place} is given probabilities, so what it returns is nearly uniform",
            cause=f"a softmax{_in(told)} has already been applied to the scores: the second one flattens them",
            remedy="give the second softmax the scores before the first, or leave it out",
            sure=0.9,
            stage="loss",
            where=Where(module=told.get("made_in") or told["module"] or None, op=told["op"]),
            evidence=[("sum of each row of its input", 1.0, "scores"), ("shape", told["shape"])],
            trial=RemedyTrial("second_softmax"),
        )
        return


@check
def nll_on_probs(case: Case) -> Iterator[Finding]:
    """nll_loss and kl_div take logarithms of probabilities, which are never above 0; these are.

    A density may well be above 1 and its logarithm above 0, but nobody gives a density to a loss over classes; one that
    weighs log-probabilities (focal) stays below 0.
    """
    for exam, told in _given(case):
        probs = told["op"] in ("nll_loss", "kl_div") and told.get("simplex")
        if not probs and told.get("above_0", 0.0) < 0.1:
            continue
        what = "probabilities" if probs else "scores"
        share = told.get("above_0", 1.0)
        yield finding(
            "loss.nll_on_probs",
            "critical",
            exam.step,
            symptom=f"{told['op']} is given {what} instead of log-probabilities: {share:.0%} of its input is above 0",
            cause=f"log_softmax is missing between the scores and {told['op']}",
            remedy="cross_entropy(logits, target), or log_softmax before nll_loss",
            sure=0.97,
            stage="loss",
            where=Where(module=told.get("made_in") or None, op=told["op"]),
            evidence=[("share of its input above 0", round(share, 3), 0.0)],
            trial=RemedyTrial("scores_for_probabilities"),
            explains=("opt.lr_too_low", "opt.lr_too_high", "grad.*"),
        )
        return


@check
def broadcast_target(case: Case) -> Iterator[Finding]:
    """A column of predictions against a row of as many targets: each is held against all.

    Pairs of samples on purpose (ranking, contrast) are made with an explicit new dimension, or from one tensor on both
    sides; here one side comes from outside, and the shapes differ in the number of dimensions alone.
    """
    for exam in case.exams("loss"):
        for told in exam.values.get("outer", ())[:1]:
            shapes = " and ".join(str(tuple(shape)) for shape in told["shapes"])
            yield finding(
                "loss.broadcast_target",
                "critical",
                exam.step,
                symptom=f"{told['op']} of shapes {shapes} gives {told['terms']} terms for {told['samples']} samples",
                cause="prediction and target differ by a dimension and broadcast: each prediction is drawn to every "
                "target, and the best it can learn is their mean",
                remedy="make the shapes the same: prediction.squeeze(1), or target.unsqueeze(1)",
                sure=0.97,
                stage="loss",
                where=Where(op=told["op"]),
                evidence=[("terms of the loss", told["terms"], told["samples"]), ("shapes", told["shapes"])],
                trial=RemedyTrial("same_shape"),
                explains=("opt.lr_too_low", "opt.lr_too_high", "data.target_*", "data.label_*", "model.*", "init.*"),
            )
            return


@check
def wrong_sign(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """What backward is given gets better where a loss gets worse that has a least value and no greatest one.

    It must be the only thing wanted, always, from data and not from the model's own draws (a policy), and not a game of
    two models. Then a few updates on one batch must make that loss rise, also at a tenth of the rate, and rise less or
    fall with the sign turned. At a tenth, a rate that is too high does no harm; the negative loss of a density falls.
    """
    exams = [e for e in case.exams("loss") if any(g.get("wants") for g in e.values.get("given", ()))]
    for exam in exams:
        wants = {g["wants"] for g in exam.values["given"] if g.get("wants")}
        if wants != {-1} or exam.values["rivals"] or exam.values["drawn"]:
            return
    if not exams:
        return
    asked = [e for e in case.exams("sign") if "blind" not in e.values]
    if not asked:
        yield ExperimentRequest("sign", exams[-1].step)
    for seen in asked[:1]:
        was, tenth, turned = (seen.values[key] for key in ("as_it_was", "tenth", "turned"))
        if min(len(was), len(tenth), len(turned)) < 2 or not (was[-1] > was[0] and turned[-1] < tenth[-1] > tenth[0]):
            return
        op = next(g["op"] for g in exams[0].values["given"] if g.get("wants"))
        op = "negative log-likelihood" if op == "log_softmax" else op
        yield finding(
            "loss.wrong_sign",
            "critical",
            seen.step,
            symptom=f"every update makes {op} larger: {was[0]:.4g} -> {was[-1]:.4g} in {len(was) - 1} on one batch",
            cause=f"backward is given {op} with its sign turned, so it is maximised",
            remedy="drop the minus in front of the loss",
            sure=0.97,
            stage="loss",
            where=Where(op=op),
            evidence=[
                (f"{op} over updates", [was[0], was[-1]], "falls"),
                ("at a tenth of the learning rate", [tenth[0], tenth[-1]], "falls"),
                ("with the sign turned", [turned[0], turned[-1]], None),
            ],
            trial=RemedyTrial("turned_sign"),
            explains=("opt.lr_too_*", "grad.exploding", "data.*", "init.*"),
        )


@check
def graph_cut_at_loss(case: Case) -> Iterator[Finding]:
    """After backward no parameter has a gradient, none was dropped since, and the loss leads to none of the model's.

    The last is known where backward ran from a tensor without a history, or from one that was not made of what the
    model returned, or where a replay gives no parameter a gradient. An optimizer of another model's parameters has none
    either, and the replay tells.
    """
    unreached = {e.step for e in case.exams("loss") if e.values.get("reached") == 0}
    for watched in case.watched:
        backward = [value for kind, value in watched.events if kind == "backward"]
        reached, owned = watched.values.get("grads", (1, 1))
        cut = any(value.get("cut") for value in backward) or watched.step in unreached
        strange = watched.values.get("blind") == "the loss is not made of what the watched model returned"
        if not backward or reached or not owned or not (cut or strange) or _dropped(watched):
            continue
        yield finding(
            "grad.graph_cut_at_loss",
            "critical",
            watched.step,
            symptom=f"after backward none of the {owned} parameters has a gradient",
            cause="the loss leads to no parameter: it was made anew from a number, or of detached outputs",
            remedy="keep the tensors that the model and the loss function return: no .item(), .detach(), .data or "
            "torch.tensor(...) on the way to backward",
            sure=0.98 if cut else 0.9,
            stage="loss",
            evidence=[("parameters with a gradient", reached, owned)],
            explains=("opt.*", "grad.*", "data.label_*", "loop.*"),
        )
        return


def _dropped(watched: Watched) -> bool:
    """Whether zero_grad came between the last backward pass and the update."""
    kinds = [kind for kind, _ in watched.events]
    return "zero_grad" in kinds[len(kinds) - kinds[::-1].index("backward") :]


@check
def term_dominates(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One term's gradient is a thousand times another's, in the parameters that both reach, at two early steps.

    Who makes a term small on purpose (a penalty) gives it a weight below 1. A small term counts only if it has none and
    is a loss against targets, not something the model made with a weight inside, or a divergence that begins at 0.
    Early, because a term that is solved rightly has no gradient.
    """
    several = [e for e in case.exams("loss") if e.values.get("terms", 0) > 1 and e.step <= 8]
    asked = [e for e in case.exams("terms") if "terms" in e.values and e.step <= 8]
    if several and len(case.exams("terms")) < 2 and several[-1].step == case.last_step:
        yield ExperimentRequest("terms", several[-1].step)
    pairs = [pair for exam in asked if (pair := _unbalanced(exam.values["terms"])) is not None]
    if len(pairs) < 2 or len(pairs) < len(asked):
        return
    large, small = pairs[-1]
    ratio = large["shared"] / small["shared"]
    yield finding(
        "loss.term_dominates",
        "warning",
        asked[-1].step,
        symptom=f"the gradient of {large['name']} is {ratio:.0f} times that of {small['name']} in weights of both",
        cause=f"{large['name']} counts {abs(large['weight'] / small['weight']):.4g} times as much as {small['name']}; "
        f"a clipped or adaptive update has no room left for the other",
        remedy=f"weigh {large['name']} so that both gradients are of one size: by {1 / ratio:.2g} of its weight",
        sure=0.9,
        stage="loss",
        where=Where(op=large["name"]),
        evidence=[
            (f"gradient norm of {large['name']}", large["shared"], small["shared"]),
            ("ratio", round(ratio, 1), f"< {RATIO:.0f}"),
        ],
        trial=RemedyTrial("balanced_terms"),
        explains=("grad.exploding", "opt.lr_too_*", "grad.clip*"),
    )


_AGAINST_TARGETS = (
    "_loss",
    "cross_entropy",
    "_with_logits",
    "of pow",
    "of square",
    "of abs",
    "of gather",
    "of getitem",
)
"""Ends of the names of terms that compare with something: standard losses, and those that are written by hand."""


def _unbalanced(terms: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The largest term and the smallest of those that were not made small by their weight."""
    large = max(terms, key=lambda term: term["shared"])
    whole = [t for t in terms if t is not large and 0.5 <= abs(t["own"]) <= abs(large["own"]) and t["shared"] > 0]
    small = [t for t in whole if t["name"].endswith(_AGAINST_TARGETS)]
    least = min(small, key=lambda term: term["shared"], default=None)
    return (large, least) if least and large["shared"] > RATIO * least["shared"] else None
