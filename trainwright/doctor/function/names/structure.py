"""Checks of how a model is built and initialised, from its first steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding, in_words, listed
from trainwright.doctor.function.laws import FELT
from trainwright.doctor.vitals.standing import is_left_as_it_is, standing
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Where

GAINED, LEARNED = 0.7, 0.02
"""Of the loss that is left on one batch: with activations at most so much of it; below that nothing is left to gain."""
BEYOND_CHANCE = 4.0
"""Standard errors: a mean that is as far off by chance comes once in ten thousand times."""


def missing_nonlinearity(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The output of one linear layer is the input of another, with nothing between them and no other use.

    It is a warning where the model learns its batch far better with activations there: not where the task is linear,
    or where the layers behind them do as well alone.

    A narrow middle (fewer outputs than both ends) is a factorisation on purpose; so are depthwise convolutions, frozen
    layers and factors of a kernel (1 x k after k x 1).
    """
    exam = case.newest("structure")
    if exam is None:
        return
    chains = [each for each in exam.values.get("chains", ()) if _adds_nothing(*each["of"])]
    if not chains:
        return
    tried = case.newest("activation_between")
    if tried is None:
        yield ExperimentRequest("activation_between", exam.step)
        return
    was, activated = (tried.values.get(name) for name in ("as_it_was", "activated"))
    pair = chains[0]
    yield finding(
        "model.missing_nonlinearity",
        "warning" if was is not None and activated < GAINED * was and was > LEARNED else "info",
        exam.step,
        symptom=f"the input of {pair['second']} is the output of {pair['first']}, unchanged",
        cause="with nothing between them, two linear layers are equivalent to one: the depth adds nothing",
        remedy="put an activation (ReLU, GELU) between them",
        sure=0.9,
        stage="forward",
        where=Where(module=pair["first"].rpartition(".")[0]),
        evidence=[
            ("pairs of linear layers in a row", len(chains), 0),
            ("loss after updates on this batch, as it is and with activations", [was, activated]),
        ],
        trial=RemedyTrial("activation_between", {"weights": [each["first"] for each in chains]}),
    )


def _adds_nothing(first: list[int], second: list[int]) -> bool:
    """Whether two linear layers are equivalent to one; both are given as ``[outputs, inputs, *kernel]``."""
    wide = first[0] >= min(first[1], second[0])
    pointwise = all(size == 1 for size in first[2:]) and all(size == 1 for size in second[2:])
    square = all(len(set(each[2:])) <= 1 for each in (first, second))
    return wide and (pointwise or (len(first) > 2 and len(second) > 2 and square and first[2:] == second[2:]))


def params_not_registered(case: Case) -> Iterator[Finding]:
    """Autograd reaches tensors that a module holds in a list, a dict or an attribute, and ``parameters()`` does not.

    Inputs that require a gradient, and the weights of other models, are held by no watched module.
    """
    exam = case.newest("structure")
    held = exam.values.get("unregistered", []) if exam else []
    if exam is None or not held:
        return
    names = sorted({each["held"] for each in held})
    num = sum(math.prod(each["shape"]) for each in held)
    yield finding(
        "opt.params_not_registered",
        "critical",
        exam.step,
        symptom=f"{len(held)} tensors in {listed(names)} get gradients but are not parameters of the model",
        cause="layers in a Python list, dict or plain attribute are not registered: no optimizer, no .to(device), no "
        "checkpoint sees them",
        remedy="nn.ModuleList, nn.ModuleDict or nn.ParameterList in place of the list; nn.Parameter for a tensor; then "
        "make the optimizer",
        sure=0.95,
        stage="update",
        where=Where(module=names[0]),
        evidence=[("values that autograd reaches and parameters() does not", num, 0)],
        trial=RemedyTrial("register"),
    )


def nothing_trainable(case: Case) -> Iterator[Finding]:
    """No weight is trained, or only the scales and shifts of normalisations; everything else is frozen."""
    exam = case.newest("structure")
    if exam is None or "trained" not in exam.values:
        return
    facts = exam.values
    if facts["trained_beside_norms"] or not facts["frozen_beside_norms"]:
        return
    what = "the scales and shifts of normalisations" if facts["trained"] else "nothing"
    yield finding(
        "opt.nothing_trainable",
        "warning",
        exam.step,
        symptom=f"{what} can be trained; {facts['frozen_beside_norms']} other weights are frozen",
        cause="requires_grad is False for every weight that could learn the task",
        remedy="requires_grad_(True) for the layers that are to learn, at least the head; then make the optimizer",
        sure=0.9,
        stage="update",
        evidence=[("trained weights that belong to no normalisation", 0, "the head at least")],
        trial=RemedyTrial("unfreeze"),
    )


def graph_cut(case: Case) -> Iterator[Finding]:
    """A tensor inside the model loses its graph, and the optimizer holds weights below it that no gradient reaches.

    A detach for a target or a log leaves another path to the loss. A head that is not used gets no gradient either, but
    nothing was cut there. It is an info where what lies above the cut enters no weight that is trained (the answer of a
    teacher, a fixed random network), or where the weights below were trained before. Weights that change from step to
    step all the same are updated otherwise: the codes of a quantiser follow a moving average, a hidden layer has a loss
    of its own that is taken where it is computed.
    """
    exam = case.newest("structure")
    cuts = exam.values.get("cuts", []) if exam else []
    if exam is None or not cuts:
        return
    known = [(each, standing(case, each["behind"], exam.step)) for each in cuts]
    cut, behind = next(((each, names) for each, names in known if names), (cuts[0], []))
    if not behind:
        return
    is_most = 2 * len(behind) >= case.facts("structure")["trained"]
    yield finding(
        "grad.graph_cut",
        "info" if is_left_as_it_is(case, behind) else "critical" if is_most else "warning",
        exam.step,
        symptom=f"{len(behind)} weights that the optimizer holds get no gradient: {listed(behind)}",
        cause=f"{cut['how']} in {cut['in'] or 'the model'} ends the graph above {cut['last'] or 'them'}",
        remedy=f"remove the {cut['how']}, or leave these weights out of the optimizer if they are not to be trained",
        sure=0.95,
        stage="backward",
        where=Where(module=cut["last"], op=cut["how"]),
        evidence=[("weights behind the cut", len(behind), 0)],
        trial=RemedyTrial("keep_graph", {"behind": behind}),
    )


def mixes_samples(case: Case) -> Iterator[Finding]:
    """In eval mode the outputs for other samples change when one sample is replaced.

    That is certain where a view swapped dimensions. Otherwise it counts only where the loader tells what a sample is:
    the nodes of one graph, or time steps, may well depend on each other. What one sample hardly changes is an info: a
    statistic of the batch may be a feature on purpose. So is a module that gets all samples as one set.
    """
    exam = case.newest("isolation")
    if exam is None or exam.values.get("others", 0.0) <= 1e-3:
        return
    facts = exam.values
    shuffles = [s for s in case.facts("structure").get("shuffles", []) if facts["size"] in (s["from"][0], s["to"][0])]
    if not shuffles and not facts["is_batch"]:
        return
    shuffle = shuffles[0] if shuffles else None
    is_meant = facts["others"] < FELT or facts.get("one_set", False)
    how = f"a view of {shuffle['from']} as {shuffle['to']} in {in_words(shuffle['module'])}" if shuffle else None
    yield finding(
        "model.mixes_samples",
        "critical" if shuffle else "info" if is_meant else "warning",
        exam.step,
        symptom=f"with sample {facts['changed']} of a batch replaced, the outputs for {facts['samples']} others change",
        cause=f"{how or 'an operation'} puts values of one sample into others",
        remedy="transpose or permute in place of view and reshape; softmax, mean and norm over a dimension of the "
        "sample, not over the batch",
        sure=0.95 if shuffle else 0.7,
        stage="forward",
        where=Where(module=shuffle["module"] if shuffle else None, op="view" if shuffle else None),
        evidence=[("change of the others' outputs, in standard deviations", facts["others"], 0.0)],
        trial=RemedyTrial("transpose_for_view") if shuffle else None,
    )


def saved_tensor_modified(case: Case) -> Iterator[Finding]:
    """A tensor that was saved for backward has other values when the backward pass reads it."""
    exam = case.newest("integrity")
    changed = exam.values.get("modified", []) if exam else []
    if exam is None or not changed:
        return
    yield finding(
        "grad.saved_tensor_modified",
        "critical",
        exam.step,
        symptom=f"{len(changed)} tensors saved for the backward pass were changed before it read them",
        cause=f"something writes to a tensor of {in_words(changed[0]['module'])} behind autograd: .data, numpy",
        remedy="work on a clone, or out of place: x = x * mask in place of x.data.mul_(mask)",
        sure=0.98,
        stage="backward",
        where=Where(module=changed[0]["module"]),
        evidence=[("shape of a changed tensor", str(changed[0]["shape"]), "unchanged")],
        trial=RemedyTrial("keep_saved"),
    )


def recompute_mismatch(case: Case) -> Iterator[Finding]:
    """Under activation checkpointing a module gives other values in the backward pass than in the forward pass."""
    exam = case.newest("integrity")
    path = exam.values.get("differs") if exam else None
    if exam is None or path is None:
        return
    kind = exam.values.get("kind") or "a module"
    yield finding(
        "grad.recompute_mismatch",
        "critical",
        exam.step,
        symptom=f"{path} ({kind}), checkpointed, gives other values in the backward pass than in the forward pass",
        cause="the checkpointed part draws random numbers, and the random state is not restored for the backward pass"
        if "ropout" in kind
        else "the checkpointed part does not repeat itself: it draws random numbers, or its forward changes a state",
        remedy="checkpoint(..., preserve_rng_state=True), which is the default",
        sure=0.97,
        stage="backward",
        where=Where(module=path),
        evidence=[("first module that differs", path, "none")],
        trial=RemedyTrial("preserve_rng"),
    )


def wrong_backward(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The backward of a custom Function disagrees with a difference quotient of its forward.

    Three kinds disagree by design: a forward that is the identity (gradient reversal), one that is constant nearly
    everywhere (rounding, a step function) with a surrogate gradient, and a backward that goes through an argument of
    which the forward makes nothing (feedback alignment). One that passes the gradient straight through (a clamp or a
    rounding that is not to stop it), or that deviates only where the forward stands still, is an info. A backward that
    draws random numbers of its own is compared in the mean over many drawings.
    """
    exam = case.newest("structure")
    if exam is None or not exam.values.get("custom"):
        return
    tested = case.newest("custom_functions")
    if tested is None:
        yield ExperimentRequest("custom_functions", exam.step)
        return
    found = [_no_derivative(tested.step, each) for each in tested.values.get("functions", ()) if _deviates(each)]
    yield from sorted(found, key=lambda each: each.found.severity != "critical")[:1]


def _deviates(each: Facts) -> bool:
    if each.get("error") is None or each["error"] < 0.02 or each["unsteady"] > 0.2 * each["error"]:
        return False
    return not (each["constant"] or each.get("own_way") or (each["identity"] and each["factor"] < 0))


def _no_derivative(step: int, each: Facts) -> Finding:
    bias, noise = each.get("bias"), each.get("noise", 0.0)
    is_estimate = bias is not None and bias <= max(0.02, BEYOND_CHANCE * noise)
    is_surrogate = each.get("moving", 1.0) < 0.02
    is_info = each["identity"] or is_estimate or is_surrogate or bool(each.get("straight"))
    symptom = f"the backward of {each['function']} is off by {each['error']:.0%} from a difference quotient"
    cause = "it is not the derivative of its forward" + (", which is the identity" if each["identity"] else "")
    cause += ": it passes the gradient on as it is, on purpose in a straight-through estimator" * bool(
        each.get("straight")
    )
    cause += ", but only for elements that its forward does not depend on" * is_surrogate
    if bias is not None:
        symptom = f"the backward of {each['function']}, which draws random numbers, is off by {bias:.0%} in the mean"
    if is_estimate:
        symptom += f", and by {each['error']:.0%} in one drawing"
        cause = "it draws by itself what its forward has drawn: meant in Shake-Shake or where gradients are rounded at "
        cause += "random, a mask that is drawn twice elsewhere"
    return finding(
        "grad.wrong_backward",
        "info" if is_info else "critical",
        step,
        symptom=symptom,
        cause=cause,
        remedy="keep what the forward has drawn (ctx.save_for_backward), unless it is meant"
        if is_estimate
        else "test it with torch.autograd.gradcheck, or leave it out and let autograd differentiate the forward",
        sure=0.5 if is_info else 0.97,
        stage="backward",
        where=Where(module=each["module"], op=each["function"]),
        evidence=[("relative error of its gradient", each["error"], 0.0), ("best factor", each["factor"], 1.0)]
        + ([] if bias is None else [("relative error in the mean", bias, f"chance: {noise:.2g}")]),
        trial=RemedyTrial("derived_backward", {"function": each["function"]}),
    )


def symmetric(case: Case) -> Iterator[Finding]:
    """Units have equal weights and get equal gradients for any loss.

    Weights of 0 alone are no fault: those of an adapter or a last layer get gradients that differ from row to row.
    """
    exam = case.newest("twins")
    alike = [each for each in exam.values.get("alike", []) if each["share"] >= 0.5] if exam else []
    if exam is None or not alike:
        return
    names = [each["weight"] for each in alike]
    yield finding(
        "init.symmetric",
        "critical",
        exam.step,
        symptom=f"the units of {listed(names)} have equal weights and get equal gradients",
        cause="they were initialised with a constant: all units of a layer stay equal for ever",
        remedy="random weights: nn.init.kaiming_uniform_ or xavier_uniform_; only biases may be constant",
        sure=0.95,
        stage="forward",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("share of units that equal the first", alike[0]["share"], 0.0)],
        trial=RemedyTrial("random_weights", {"weights": names}),
        explains=("grad.vanishing", "data.label_feature_misaligned"),
    )


def too_large(case: Case) -> Iterator[Finding]:
    """The first loss is far above chance with inputs of normal size, and near chance with weights of the usual size."""
    exam = case.newest("initial")
    if exam is None or exam.step > 4 or not exam.values.get("large"):
        return
    facts = exam.values
    loss, smaller, size = facts["loss"], facts["rescaled"], facts["input_size"]
    if not math.isfinite(loss) or smaller is None or (size is not None and size > 10):
        return
    chance = math.log(facts["classes"][0]) if facts["classes"] and facts["classes"][0] > 1 else None
    if chance is None or loss < 1.5 * chance + 0.5 or smaller > chance + 0.3 * (loss - chance):
        return
    names = sorted(facts["large"], key=facts["large"].__getitem__, reverse=True)
    yield finding(
        "init.too_large",
        "critical" if loss > 3 * chance else "warning",
        exam.step,
        symptom=f"the first loss is {loss:.3g}, chance is {chance:.3g}",
        cause=f"weights are up to {facts['large'][names[0]]:.1f} times the usual size: {listed(names)}",
        remedy="Xavier or Kaiming initialisation, or normal_(0, 0.02) as GPT does",
        sure=0.9,
        stage="forward",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("first loss", loss, chance), ("with weights of the usual size", smaller, chance)],
        trial=RemedyTrial("smaller_weights", {"gains": facts["large"]}),
        explains=("model.attention_logit_growth", "opt.lr_too_high", "grad.exploding"),
    )


def reinitialised(case: Case) -> Iterator[Finding]:
    """Weights were loaded, and nearly all have changed when the first batch comes. A new head alone is a fine-tune."""
    exam = case.newest("loaded")
    if exam is None or exam.values["share"] < 0.8:
        return
    gone = exam.values["gone"]
    yield finding(
        "ckpt.reinitialised",
        "critical",
        exam.step,
        symptom=f"{len(gone)} of {exam.values['weights']} loaded weights were overwritten before the first step",
        cause="the model was initialised after load_state_dict: it starts from scratch",
        remedy="initialise first, load_state_dict last",
        sure=0.97,
        stage="loop",
        evidence=[("share of loaded values that were replaced", exam.values["share"], 0.0)],
    )


NAMES: tuple[OldCheck, ...] = (
    missing_nonlinearity,
    params_not_registered,
    nothing_trainable,
    graph_cut,
    mixes_samples,
    saved_tensor_modified,
    recompute_mismatch,
    wrong_backward,
    symmetric,
    too_large,
    reinitialised,
)
