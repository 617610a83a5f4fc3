"""Checks of how a model is built, wired and initialised: what one look at its first steps shows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, check, finding
from trainwright.runlog.records import Where


def _first(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@check
def missing_nonlinearity(case: Case) -> Iterator[Finding]:
    """The very output of one linear layer enters another, and no one else uses it.

    A narrow middle (fewer outputs than both ends) is a factorisation and has a purpose; depthwise convolutions and
    frozen layers are no such pair, and neither are factors of a kernel: 1 x k after k x 1.
    """
    exam = case.exam("structure")
    if exam is None:
        return
    chains = [each for each in exam.values.get("chains", ()) if _adds_nothing(*each["of"])]
    if not chains:
        return
    pair = chains[0]
    yield finding(
        "model.missing_nonlinearity",
        "warning",
        exam.step,
        symptom=f"{pair['second']} takes the very output of {pair['first']}",
        cause="with nothing between them, two linear layers are one: the depth is paid for and gives nothing",
        remedy="put an activation (ReLU, GELU) between them",
        sure=0.9,
        stage="forward",
        where=Where(module=pair["first"].rpartition(".")[0]),
        evidence=[("pairs of linear layers in a row", len(chains), 0)],
        trial=RemedyTrial("activation_between", {"weights": [each["first"] for each in chains]}),
    )


def _adds_nothing(first: list[int], second: list[int]) -> bool:
    """``[outputs, inputs, *kernel]`` of both."""
    wide = first[0] >= min(first[1], second[0])
    pointwise = all(size == 1 for size in first[2:]) and all(size == 1 for size in second[2:])
    square = all(len(set(each[2:])) <= 1 for each in (first, second))
    return wide and (pointwise or (len(first) > 2 and len(second) > 2 and square and first[2:] == second[2:]))


@check
def params_not_registered(case: Case) -> Iterator[Finding]:
    """Autograd reaches tensors that a module holds in a list, a dict or an attribute, and ``parameters()`` does not.

    Inputs that ask for a gradient, and the weights of other models, are held by no watched module.
    """
    exam = case.exam("structure")
    held = exam.values.get("unregistered", []) if exam else []
    if exam is None or not held:
        return
    names = sorted({each["held"] for each in held})
    num = sum(math.prod(each["shape"]) for each in held)
    yield finding(
        "opt.params_not_registered",
        "critical",
        exam.step,
        symptom=f"{len(held)} tensors in {_first(names)} get gradients but are no parameters of the model",
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


@check
def nothing_trainable(case: Case) -> Iterator[Finding]:
    """Only the scales and shifts of normalisations are trained while everything else is frozen."""
    exam = case.exam("structure")
    if exam is None or "trained" not in exam.values:
        return
    told = exam.values
    if told["trained_beside_norms"] or not told["frozen_beside_norms"]:
        return
    what = "the scales and shifts of normalisations" if told["trained"] else "nothing"
    yield finding(
        "opt.nothing_trainable",
        "warning",
        exam.step,
        symptom=f"{what} can be trained; {told['frozen_beside_norms']} other weights are frozen",
        cause="requires_grad is False for every weight that could learn the task",
        remedy="requires_grad_(True) for the layers that are to learn, at least the head; then make the optimizer",
        sure=0.9,
        stage="update",
        evidence=[("trained weights that belong to no normalisation", 0, "the head at least")],
        trial=RemedyTrial("unfreeze"),
    )


@check
def graph_cut(case: Case) -> Iterator[Finding]:
    """A tensor loses its graph on the way, and below it lie weights of the optimizer that no gradient reaches.

    A detach for a target or a log cuts off nothing that has no other way to the loss. A head that was not used gets no
    gradient either, but there nothing was cut.
    """
    exam = case.exam("structure")
    cuts = exam.values.get("cuts", []) if exam else []
    if exam is None or not cuts:
        return
    cut = cuts[0]
    yield finding(
        "grad.graph_cut",
        "critical" if 2 * len(cut["behind"]) >= case.about("structure")["trained"] else "warning",
        exam.step,
        symptom=f"{len(cut['behind'])} weights that the optimizer holds get no gradient: {_first(cut['behind'])}",
        cause=f"{cut['how']} in {cut['in'] or 'the model'} ends the graph above {cut['last'] or 'them'}",
        remedy=f"remove the {cut['how']}, or do not give these weights to the optimizer if they are meant to stay",
        sure=0.95,
        stage="backward",
        where=Where(module=cut["last"], op=cut["how"]),
        evidence=[("weights behind the cut", len(cut["behind"]), 0)],
        trial=RemedyTrial("keep_graph", {"behind": cut["behind"]}),
    )


@check
def mixes_samples(case: Case) -> Iterator[Finding]:
    """In eval mode the outputs for other samples change when one sample is replaced.

    Direct evidence where a view turned the sizes around. Otherwise it counts only where the loader says what a sample
    is: the nodes of one graph, or time steps, may well depend on each other.
    """
    exam = case.exam("isolation")
    if exam is None or exam.values.get("others", 0.0) <= 1e-3:
        return
    told = exam.values
    shuffles = [s for s in case.about("structure").get("shuffles", []) if told["size"] in (s["from"][0], s["to"][0])]
    if not shuffles and not told["is_batch"]:
        return
    shuffle = shuffles[0] if shuffles else None
    how = f"a view of {shuffle['from']} as {shuffle['to']} in {shuffle['module'] or 'the model'}" if shuffle else None
    yield finding(
        "model.mixes_samples",
        "critical" if shuffle else "warning",
        exam.step,
        symptom=f"with sample {told['changed']} of a batch replaced, the outputs for {told['samples']} others change",
        cause=f"{how or 'an operation'} puts values of one sample into others",
        remedy="transpose or permute in place of view and reshape; softmax, mean and norm over a dimension of the "
        "sample, not of the batch",
        sure=0.95 if shuffle else 0.7,
        stage="forward",
        where=Where(module=shuffle["module"] if shuffle else None, op="view" if shuffle else None),
        evidence=[("change of the others' outputs, in standard deviations", told["others"], 0.0)],
        trial=RemedyTrial("transpose_for_view") if shuffle else None,
    )


@check
def positions_low_precision(case: Case) -> Iterator[Finding]:
    """Neighbouring positions have the very same angles: they were rounded to 16 bit before the sine was taken."""
    exam = case.exam("structure")
    aliases = exam.values.get("aliases", []) if exam else []
    if exam is None or not aliases:
        return
    seen = aliases[0]
    yield finding(
        "prec.positions_low_precision",
        "warning",
        exam.step,
        symptom=f"{seen['same']} of {seen['far']} positions above 256 have the angles of their neighbour",
        cause="positions or angles pass through a 16-bit type, which cannot tell whole numbers above 256 apart (bf16)",
        remedy="positions and angles in float32, outside of autocast; cast the sine and cosine afterwards",
        sure=0.95,
        stage="forward",
        where=Where(module=seen["module"], op="sin", dtype=seen["dtype"]),
        evidence=[("positions with the angles of their neighbour", seen["same"], 0)],
        trial=RemedyTrial("positions_in_fp32"),
    )


@check
def saved_tensor_modified(case: Case) -> Iterator[Finding]:
    """A tensor that the graph saved in the forward pass holds something else when the backward pass reads it."""
    exam = case.exam("integrity")
    changed = exam.values.get("modified", []) if exam else []
    if exam is None or not changed:
        return
    yield finding(
        "grad.saved_tensor_modified",
        "critical",
        exam.step,
        symptom=f"{len(changed)} tensors saved for the backward pass were changed before it read them",
        cause=f"something writes into a tensor of {changed[0]['module'] or 'the model'} past autograd: .data, numpy",
        remedy="work on a clone, or out of place: x = x * mask in place of x.data.mul_(mask)",
        sure=0.98,
        stage="backward",
        where=Where(module=changed[0]["module"] or None),
        evidence=[("shape of a changed tensor", str(changed[0]["shape"]), "unchanged")],
        trial=RemedyTrial("keep_saved"),
    )


@check
def recompute_mismatch(case: Case) -> Iterator[Finding]:
    """A module that is run again in the backward pass gives something else there than in the forward pass."""
    exam = case.exam("integrity")
    path = exam.values.get("differs") if exam else None
    if exam is None or path is None:
        return
    kind = exam.values.get("kind") or "a module"
    yield finding(
        "grad.recompute_mismatch",
        "critical",
        exam.step,
        symptom=f"{path} ({kind}), computed again in the backward pass, gives other values than in the forward pass",
        cause="the checkpointed part draws random numbers and the generator is not put back for the recomputation"
        if "ropout" in kind
        else "the checkpointed part is not the same function twice: random numbers, or a state that the forward moves",
        remedy="checkpoint(..., preserve_rng_state=True), which is the default",
        sure=0.97,
        stage="backward",
        where=Where(module=path),
        evidence=[("first module that differs", path, "none")],
        trial=RemedyTrial("preserve_rng"),
    )


@check
def wrong_backward(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The backward of a custom Function disagrees with a difference quotient of its forward.

    A forward that is the identity exists for its backward alone (gradient reversal), and one that is constant nearly
    everywhere (rounding, a step) has a surrogate on purpose: both disagree by design.
    """
    exam = case.exam("structure")
    if exam is None or not exam.values.get("custom"):
        return
    tested = case.exam("custom_functions")
    if tested is None:
        yield ExperimentRequest("custom_functions", exam.step)
        return
    for each in tested.values.get("functions", ()):
        if each.get("error") is None or each["error"] < 0.02 or each["unsteady"] > 0.2 * each["error"]:
            continue
        if each["constant"] or (each["identity"] and each["factor"] < 0):
            continue
        yield finding(
            "grad.wrong_backward",
            "info" if each["identity"] else "critical",
            tested.step,
            symptom=f"the backward of {each['function']} is off by {each['error']:.0%} from a difference quotient",
            cause="it is not the derivative of its forward" + (", which is the identity" if each["identity"] else ""),
            remedy="torch.autograd.gradcheck in a test; leave it out and let autograd differentiate the forward",
            sure=0.5 if each["identity"] else 0.97,
            stage="backward",
            where=Where(module=each["module"], op=each["function"]),
            evidence=[("relative error of its gradient", each["error"], 0.0), ("best factor", each["factor"], 1.0)],
            trial=RemedyTrial("derived_backward", {"function": each["function"]}),
        )
        return


@check
def symmetric(case: Case) -> Iterator[Finding]:
    """Units have equal weights and get equal gradients whatever the loss.

    Zeros alone are no fault: those of an adapter or of a last layer get gradients that differ from row to row.
    """
    exam = case.exam("twins")
    alike = [each for each in exam.values.get("alike", []) if each["share"] >= 0.5] if exam else []
    if exam is None or not alike:
        return
    names = [each["weight"] for each in alike]
    yield finding(
        "init.symmetric",
        "critical",
        exam.step,
        symptom=f"the units of {_first(names)} have equal weights and get equal gradients",
        cause="they were initialised with a constant: all units of a layer stay one unit for ever",
        remedy="random weights: nn.init.kaiming_uniform_ or xavier_uniform_; only biases may be constant",
        sure=0.95,
        stage="forward",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("share of units that equal the first", alike[0]["share"], 0.0)],
        trial=RemedyTrial("random_weights", {"weights": names}),
        explains=("grad.vanishing", "data.label_feature_misaligned"),
    )


@check
def too_large(case: Case) -> Iterator[Finding]:
    """The first loss is far above chance, inputs are normal, and weights of the usual size bring it there."""
    exam = case.exam("initial")
    if exam is None or exam.step > 4 or not exam.values.get("large"):
        return
    told = exam.values
    loss, smaller, size = told["loss"], told["rescaled"], told["input_size"]
    if not math.isfinite(loss) or smaller is None or (size is not None and size > 10):
        return
    chance = math.log(told["classes"][0]) if told["classes"] and told["classes"][0] > 1 else None
    if chance is None or loss < 1.5 * chance + 0.5 or smaller > chance + 0.3 * (loss - chance):
        return
    names = sorted(told["large"], key=told["large"].__getitem__, reverse=True)
    yield finding(
        "init.too_large",
        "critical" if loss > 3 * chance else "warning",
        exam.step,
        symptom=f"the first loss is {loss:.3g}, chance is {chance:.3g}",
        cause=f"weights are up to {told['large'][names[0]]:.1f} times the size that keeps signals: {_first(names)}",
        remedy="Xavier or Kaiming initialisation, or normal_(0, 0.02) as GPT does",
        sure=0.9,
        stage="forward",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("first loss", loss, chance), ("with weights of the usual size", smaller, chance)],
        trial=RemedyTrial("smaller_weights", {"gains": told["large"]}),
        explains=("model.attention_logit_growth", "opt.lr_too_high", "grad.exploding"),
    )


@check
def reinitialised(case: Case) -> Iterator[Finding]:
    """Weights were loaded, and nearly all are others when the first batch comes. A new head alone is a fine-tune."""
    exam = case.exam("loaded")
    if exam is None or exam.values["share"] < 0.8:
        return
    gone = exam.values["gone"]
    yield finding(
        "ckpt.reinitialised",
        "critical",
        exam.step,
        symptom=f"{len(gone)} of {exam.values['weights']} loaded weights are gone before the first step",
        cause="the model was initialised after load_state_dict: it starts from scratch",
        remedy="initialise first, load_state_dict last",
        sure=0.97,
        stage="loop",
        evidence=[("share of loaded values that were replaced", exam.values["share"], 0.0)],
    )
