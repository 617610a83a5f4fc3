"""Checks of the loss: its arguments, its sign, whether its gradient reaches the model, and the balance of its terms."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.facts.updates import UpdateFacts
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding, in_words
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Watched, Where

LASTING = 2
"""Steps after one without gradients which have none either: there is more to it than a batch."""
RATIO = 1000.0
"""Between the gradients of two terms: above it the smaller one has practically no effect."""


def _used(case: Case) -> Iterator[tuple[Examined, Facts]]:
    """Every call of a loss function or a softmax in every examined step, with the outcome it is from."""
    for exam in case.outcomes("loss"):
        for used in exam.values.get("given", ()):
            yield exam, used


def softmax_before_ce(case: Case) -> Iterator[Finding]:
    """cross_entropy applies a softmax itself, and every row of its input is one already: none negative, the sum is 1.

    Logits that happen to be positive do not sum to 1 in each row; log-probabilities, which a second log_softmax leaves
    as they are, are negative. A sigmoid before a loss with logits is the same fault, known from the autograd graph.
    """
    for exam, used in _used(case):
        twice = used["op"] in ("cross_entropy", "log_softmax") and used.get("simplex") and used.get("wants") == 1
        if not twice and not used.get("squashed"):
            continue
        first = "sigmoid" if used.get("squashed") else "softmax"
        seen = "probabilities between 0 and 1" if used.get("squashed") else "rows that sum to 1, none negative"
        yield finding(
            "loss.softmax_before_ce",
            "critical",
            exam.step,
            symptom=f"the input of {used['op']} is probabilities: {seen}",
            cause=f"the {first}{_in(used)} comes before {used['op']}, which takes logits and applies its own",
            remedy=f"leave the {first} out of the model in training and pass its input (the logits) to {used['op']}",
            sure=0.97,
            stage="loss",
            where=Where(module=_made_in(used), op=used["op"]),
            evidence=[("sum of each row of its input" if first == "softmax" else "input", seen, "logits")],
            trial=RemedyTrial("scores_for_probabilities"),
            explains=("loss.softmax_twice", "optim.lr_too_low", "optim.lr_too_high", "grad.vanishing", "data.label_*"),
        )
        return


def _in(used: Facts) -> str:
    made_in = used.get("made_in")
    return "" if made_in is None else f" in {in_words(made_in)}"


def _made_in(used: Facts) -> str | None:
    """The module that made the probabilities; where none did, the one that takes them."""
    made_in: str | None = used["module"] if used.get("made_in") is None else used["made_in"]
    return made_in


def softmax_twice(case: Case) -> Iterator[Finding]:
    """A softmax is applied to a softmax: the result is nearly uniform, as probabilities differ by 1 at most."""
    for exam, used in _used(case):
        if used["op"] == "cross_entropy" or not used.get("simplex") or "softmax" not in used["op"]:
            continue
        if used["op"] == "log_softmax" and used.get("wants") == 1:
            continue  # a likelihood: softmax_before_ce
        place = f"in {in_words(used['module'])}"
        yield finding(
            "loss.softmax_twice",
            "warning",
            exam.step,
            symptom=f"the input of a {used['op']} {place} is probabilities, so its output is nearly uniform",
            cause=f"a softmax{_in(used)} has already been applied to the logits: the second one flattens them",
            remedy="pass the logits to the second softmax, or leave it out",
            sure=0.9,
            stage="loss",
            where=Where(module=_made_in(used), op=used["op"]),
            evidence=[("sum of each row of its input", 1.0, "scores"), ("shape", used["shape"])],
            trial=RemedyTrial("second_softmax"),
        )
        return


def nll_on_probs(case: Case) -> Iterator[Finding]:
    """nll_loss and kl_div take log-probabilities, which are never above 0, and their input is above 0.

    The logarithm of a density may be above 0, but a loss over classes takes no density; a weighted log-probability
    (focal loss) stays below 0.
    """
    for exam, used in _used(case):
        probs = used["op"] in ("nll_loss", "kl_div") and used.get("simplex")
        if not probs and used.get("above_0", 0.0) < 0.1:
            continue
        what = "probabilities" if probs else "logits"
        share = used.get("above_0", 1.0)
        yield finding(
            "loss.nll_on_probs",
            "critical",
            exam.step,
            symptom=f"the input of {used['op']} is {what}, not log-probabilities: {share:.0%} of it is above 0",
            cause=f"log_softmax is missing between the logits and {used['op']}",
            remedy="cross_entropy(logits, target), or log_softmax before nll_loss",
            sure=0.97,
            stage="loss",
            where=Where(module=used.get("made_in"), op=used["op"]),
            evidence=[("share of its input above 0", round(share, 3), 0.0)],
            trial=RemedyTrial("scores_for_probabilities"),
            explains=("optim.lr_too_low", "optim.lr_too_high", "grad*.*"),
        )
        return


def broadcast_target(case: Case) -> Iterator[Finding]:
    """A column of predictions meets a row of as many targets: broadcasting compares each prediction with all targets.

    Pairs of samples on purpose (ranking, contrastive losses) are made with an explicit new dimension, or from one
    tensor on both sides. Here one side is not of the model, and the shapes differ only in the number of dimensions.
    """
    for exam in case.outcomes("loss"):
        for outer in exam.values.get("outer", ())[:1]:
            shapes = " and ".join(str(tuple(shape)) for shape in outer["shapes"])
            yield finding(
                "loss.broadcast_target",
                "critical",
                exam.step,
                symptom=f"{outer['op']} of shapes {shapes} gives {outer['terms']} terms for {outer['samples']} samples",
                cause="prediction and target differ by a dimension and broadcast: each prediction is compared with "
                "every target, and the best it can learn is their mean",
                remedy="make the shapes the same: prediction.squeeze(1), or target.unsqueeze(1)",
                sure=0.97,
                stage="loss",
                where=Where(op=outer["op"]),
                evidence=[("terms of the loss", outer["terms"], outer["samples"]), ("shapes", outer["shapes"])],
                trial=RemedyTrial("same_shape"),
                explains=(
                    "optim.lr_too_low",
                    "optim.lr_too_high",
                    "data.target_*",
                    "data.label_*",
                    "model.*",
                    "init.*",
                ),
            )
            return


def _is_turned_again(case: Case) -> bool:
    """Whether the loop itself negates all gradients before the update: a replay does not."""
    return any(facts.is_turned for _, facts in case.every(UpdateFacts))


def wrong_sign(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The argument of backward falls where a loss that is bounded below, and not above, rises.

    That must hold for every loss of every examined step, on data and not on samples of the model's own (a policy), and
    not in a game of two models. Then a few updates on one batch must make that loss rise, also at a tenth of the
    learning rate, and rise less or fall with the sign turned. A learning rate that is too high does no harm at a tenth;
    the negative log-likelihood of a density may be negative, but it falls.
    """
    exams = [e for e in case.outcomes("loss") if any(g.get("wants") for g in e.values.get("given", ()))]
    for exam in exams:
        wants = {g["wants"] for g in exam.values["given"] if g.get("wants")}
        if wants != {-1} or exam.values["rivals"] or exam.values["drawn"]:
            return
    if not exams or _is_turned_again(case):
        return
    outcomes = [e for e in case.outcomes("sign") if "blind" not in e.values]
    if not outcomes:
        yield ExperimentRequest("sign", exams[-1].step)
    for outcome in outcomes[:1]:
        recorded, tenth, turned = (outcome.values[key] for key in ("as_it_was", "tenth", "turned"))
        if min(len(recorded), len(tenth), len(turned)) < 2 or not (
            recorded[-1] > recorded[0] and turned[-1] < tenth[-1] > tenth[0]
        ):
            return
        op = next(g["op"] for g in exams[0].values["given"] if g.get("wants"))
        op = "negative log-likelihood" if op == "log_softmax" else op
        yield finding(
            "loss.wrong_sign",
            "critical",
            outcome.step,
            symptom=f"every update makes {op} larger: {recorded[0]:.4g} -> {recorded[-1]:.4g} on one batch",
            cause=f"backward() is called on {op} with its sign turned, so it is maximised",
            remedy="drop the minus in front of the loss",
            sure=0.97,
            stage="loss",
            where=Where(op=op),
            evidence=[
                (f"{op} over updates", [recorded[0], recorded[-1]], "falls"),
                ("at a tenth of the learning rate", [tenth[0], tenth[-1]], "falls"),
                ("with the sign turned", [turned[0], turned[-1]], None),
            ],
            trial=RemedyTrial("turned_sign"),
            explains=("optim.lr_too_*", "gradient.exploding", "data.*", "init.*"),
        )


def graph_cut_at_loss(case: Case) -> Iterator[Finding]:
    """After backward no parameter has a gradient, none was dropped since, and the graph of the loss reaches none.

    The last is known where backward ran from a tensor without a graph, or from one that does not depend on the model's
    outputs, or where a replay gives no parameter a gradient. With an optimizer of another model's parameters there are
    no gradients either; the replay tells the two apart. Where other steps have gradients, and the next ones too, a
    batch had nothing to learn from (no pair, no match): an info.
    """
    cut = [each for each in case.watched if _is_cut(case, each)]
    reaching = [each.step for each in case.watched if each.values.get("grads", (0, 0))[0]]
    lasting = [each for each in cut if not any(step > each.step for step in reaching)]
    if not cut:
        return
    later = [each for each in case.watched if lasting and each.step > lasting[0].step]
    if lasting and reaching and len(later) < LASTING:
        return
    watched = (lasting or cut)[0]
    reached, owned = watched.values.get("grads", (1, 1))
    yield finding(
        "grad.graph_cut_at_loss",
        "critical" if lasting else "info",
        watched.step,
        symptom=f"after backward none of the {owned} parameters has a gradient",
        cause="the graph of the loss reaches no parameter: it was made from a number, or from detached outputs"
        if lasting
        else "this batch has nothing to learn from: other steps have gradients",
        remedy="keep the tensors that the model and the loss function return: no .item(), .detach(), .data or "
        "torch.tensor(...) on the way to backward()",
        sure=0.98 if any(value.get("cut") for kind, value in watched.events if kind == "backward") else 0.9,
        stage="loss",
        evidence=[("parameters with a gradient", reached, owned)],
        explains=("opt*.*", "grad*.*", "data.label_*", "loop.*") if lasting else (),
    )


def _is_cut(case: Case, watched: Watched) -> bool:
    """Whether the loss of a step is known to reach no parameter."""
    backward = [value for kind, value in watched.events if kind == "backward"]
    reached, owned = watched.values.get("grads", (1, 1))
    if not backward or reached or not owned or _dropped(watched):
        return False
    unreached = any(e.step == watched.step and e.values.get("reached") == 0 for e in case.outcomes("loss"))
    strange = watched.values.get("blind") == "the loss is not made of what the watched model returned"
    return unreached or strange or any(value.get("cut") for value in backward)


def _dropped(watched: Watched) -> bool:
    """Whether zero_grad came between the last backward pass and the update."""
    kinds = [kind for kind, _ in watched.events]
    return "zero_grad" in kinds[len(kinds) - kinds[::-1].index("backward") :]


def term_dominates(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One term's gradient is a thousand times another's, in the parameters that both reach, at two early steps.

    A term that is small on purpose (a penalty) has a weight below 1. A small term counts only if it has no such weight
    and compares with targets: a penalty may carry a weight inside, and a divergence begins at 0. Only early steps
    count, because a term that has been learned rightly has no gradient.
    """
    several = [e for e in case.outcomes("loss") if e.values.get("terms", 0) > 1 and e.step <= 8]
    outcomes = [e for e in case.outcomes("terms") if "terms" in e.values and e.step <= 8]
    if several and len(case.outcomes("terms")) < 2 and several[-1].step == case.last_step:
        yield ExperimentRequest("terms", several[-1].step)
    pairs = [pair for exam in outcomes if (pair := _unbalanced(exam.values["terms"])) is not None]
    if len(pairs) < 2 or len(pairs) < len(outcomes):
        return
    large, small = pairs[-1]
    ratio = large["shared"] / small["shared"]
    yield finding(
        "loss.term_dominates",
        "warning",
        outcomes[-1].step,
        symptom=f"the gradient of {large['name']} is {ratio:.0f} times that of {small['name']} in weights of both",
        cause=f"{large['name']} weighs {abs(large['weight'] / small['weight']):.4g} times as much as {small['name']}; "
        f"a clipped or adaptive update leaves the other no effect",
        remedy=f"multiply the weight of {large['name']} by {1 / ratio:.2g}, so that both gradients are of one size",
        sure=0.9,
        stage="loss",
        where=Where(op=large["name"]),
        evidence=[
            (f"gradient norm of {large['name']}", large["shared"], small["shared"]),
            ("ratio", round(ratio, 1), f"< {RATIO:.0f}"),
        ],
        trial=RemedyTrial("balanced_terms"),
        explains=("gradient.exploding", "optim.lr_too_*", "gradient.clip*"),
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
"""How the names of terms end that compare with targets: standard losses, and losses that are written by hand."""


def _unbalanced(terms: list[Facts]) -> tuple[Facts, Facts] | None:
    """The largest term and the smallest of those that no weight makes small; None where they are balanced."""
    large = max(terms, key=lambda term: term["shared"])
    whole = [t for t in terms if t is not large and 0.5 <= abs(t["own"]) <= abs(large["own"]) and t["shared"] > 0]
    small = [t for t in whole if t["name"].endswith(_AGAINST_TARGETS)]
    least = min(small, key=lambda term: term["shared"], default=None)
    return (large, least) if least and large["shared"] > RATIO * least["shared"] else None


NAMES: tuple[OldCheck, ...] = (
    softmax_before_ce,
    softmax_twice,
    nll_on_probs,
    broadcast_target,
    wrong_sign,
    graph_cut_at_loss,
    term_dominates,
)
