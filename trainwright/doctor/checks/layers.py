"""Checks of what layers do while they learn: activations, depth, attention, routers, BatchNorm, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, check, finding
from trainwright.runlog.records import Examined, Where


def _looks(case: Case) -> list[Examined]:
    return [exam for exam in case.exams("layers") if "loss" in exam.values]


@check
def dead_relu(case: Case) -> Iterator[Finding]:
    """Units of a ReLU whose inputs lie below 0 by more than four of their own standard deviations.

    Sparse activity has inputs that reach 0 now and then; a layer whose inputs do not vary has an input at fault, not
    a bias.
    """
    looks = _looks(case)
    if not looks:
        return
    now, first = looks[-1], looks[0]
    worst = max(now.values["relus"].items(), key=lambda item: float(item[1]["dead"]), default=None)
    if worst is None or worst[1]["dead"] < 0.4 or worst[1]["varies"] < 0.9 or worst[1]["rows"] < 16:
        return
    path, seen = worst
    from_start = first.values["relus"].get(path, {}).get("dead", 0.0) >= 0.4
    yield finding(
        "model.dead_relu",
        "critical" if seen["dead"] >= 0.9 and from_start else "warning",
        now.step,
        symptom=f"{seen['dead']:.0%} of the units of {path or 'the ReLU'} are 0 for every sample",
        cause="their inputs lie far below 0" + ("" if from_start else ": updates have driven them there"),
        remedy="bias 0 at the start" if from_start else "a smaller learning rate, LeakyReLU, or a norm before it",
        sure=0.9 if from_start else 0.6,
        stage="forward",
        where=Where(module=path or None, op="relu"),
        evidence=[("share of dead units", seen["dead"], 0.0), ("lowest mean input", seen["furthest"], 0.0)],
        trial=RemedyTrial("revived", {"module": path}),
        explains=("grad.vanishing", "grad.graph_cut"),
    )


@check
def vanishing(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Gradients fall from the last layer to the first by a factor for each layer, to 1e-5 and less.

    A slope that was not there at the start is what updates have done: rather their fault than that of the layers.
    With the loss (one batch learned by heart) all layers fall together. In 16 bit it is asked again in fp32. A single
    layer that lets nothing through makes zeros, not a slope.
    """
    looks = _looks(case)
    if not looks or not _falls(looks[-1].values["depth"]):
        return
    now = looks[-1]
    depth = now.values["depth"]
    if now.values["narrow"]:
        again = [exam for exam in case.exams("depth_in_fp32") if exam.step == now.step]
        if not again:
            yield ExperimentRequest("depth_in_fp32", now.step)
            return
        if not _falls(depth := again[-1].values.get("depth", [])):
            return
    ratio = depth[0][1] / max(each[1] for each in depth)
    from_start = looks[0].step <= 4 and _falls(looks[0].values["depth"])
    yield finding(
        "grad.vanishing",
        "critical" if from_start else "warning",
        now.step,
        symptom=f"the gradient of {depth[0][0]} is {ratio:.0e} of that of {depth[-1][0]}",
        cause=f"it shrinks from layer to layer over {len(depth)} layers: saturating activations or small weights"
        + ("" if from_start else ", and updates have made it so"),
        remedy="ReLU or GELU for sigmoid and tanh, residual connections with a normalisation",
        sure=0.9 if from_start else 0.5,
        stage="backward",
        where=Where(module=depth[0][0]),
        evidence=[("gradient of the first layer over the largest", ratio, 1.0)],
        trial=RemedyTrial("relu_for_sigmoid"),
    )


def _falls(depth: Sequence[Sequence[Any]]) -> bool:
    """Whether gradients go down towards the input steadily, in most pairs of layers, and far."""
    sizes = [max(each[1], 1e-320) for each in depth]
    if len(sizes) < 4 or not all(map(math.isfinite, sizes)) or sizes[len(sizes) // 2] <= 1e-300:
        return False
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
    rising = sum(a < b for a, b in pairs) / len(pairs)
    return bool(sizes[0] <= 1e-5 * max(sizes)) and rising >= 0.85


@check
def bn_tiny_batch(case: Case) -> Iterator[Finding]:
    """BatchNorm, in training mode, takes its statistics from one or two samples, or from four values, more than once.

    A short last batch is tiny once in an epoch; frozen statistics use none of the batch.
    """
    looks = _looks(case)[-2:]
    tiny = [{path for path, seen in exam.values["norms"].items() if _is_tiny(seen)} for exam in looks]
    if len(looks) < 2 or not tiny[0] & tiny[1]:
        return
    path, now = sorted(tiny[0] & tiny[1])[-1], looks[-1]
    seen = now.values["norms"][path]
    yield finding(
        "model.bn_tiny_batch",
        "warning",
        now.step,
        symptom=f"{path} normalises by the statistics of {seen['samples']} samples, {seen['values']} values a channel",
        cause="a variance of so few is noise, and in evaluation another one is used",
        remedy="GroupNorm or LayerNorm; SyncBatchNorm over several devices; a larger batch",
        sure=0.85,
        stage="forward",
        where=Where(module=path, op="batch_norm"),
        evidence=[("values for each channel", seen["values"], "32 or more")],
        trial=RemedyTrial("group_norm"),
    )


def _is_tiny(seen: dict[str, Any]) -> bool:
    return bool(seen["samples"] <= 2 or seen["values"] <= 4)


@check
def bn_double_update(case: Case) -> Iterator[Finding]:
    """Running statistics move more often than the forward pass ran: also when it is recomputed in the backward pass.

    A momentum of 1 - sqrt(0.9) is how one makes up for it.
    """
    looks = _looks(case)
    if not looks:
        return
    now = looks[-1]
    twice = [
        path
        for path, seen in now.values["norms"].items()
        if seen.get("updates", 0) > seen["calls"] > 0
        and seen["again"] > 0
        and abs((seen.get("momentum") or 0.0) - (1 - math.sqrt(0.9))) > 5e-3
    ]
    if not twice:
        return
    seen = now.values["norms"][twice[0]]
    yield finding(
        "model.bn_double_update",
        "warning",
        now.step,
        symptom=f"the statistics of {twice[0]} are moved {seen['updates']} times by {seen['calls']} forward passes",
        cause="its forward is run again in the backward pass, under activation checkpointing, and counts again",
        remedy="leave BatchNorm out of what is checkpointed, or set momentum to 1 - sqrt(1 - momentum)",
        sure=0.95,
        stage="buffers",
        where=Where(module=twice[0], op="batch_norm"),
        evidence=[("updates of its statistics in a step", seen["updates"], seen["calls"])],
        trial=RemedyTrial("momentum_root", {"modules": twice}),
    )


@check
def excess_dropout(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Dropout of 0.7 or more, and over several draws the same batch has a clearly lower loss without it.

    Not before some steps are made: nothing has been learned yet that dropout could take away.
    """
    looks = _looks(case)
    if not looks or not looks[-1].values["dropout"] or looks[-1].step < 8:
        return
    step, (path, p) = looks[-1].step, max(looks[-1].values["dropout"].items(), key=lambda item: float(item[1]))
    told = next((exam.values for exam in case.exams("dropout_gap") if exam.step == step), None)
    if told is None:
        yield ExperimentRequest("dropout_gap", step)
        return
    if "with" not in told or not told["with"] * (1 - (0.04 if p >= 0.8 else 0.15)) > told["without"] >= 0:
        return
    yield finding(
        "model.excess_dropout",
        "warning",
        step,
        symptom=f"the loss of a batch is {told['with']:.3g} with dropout, {told['without']:.3g} without",
        cause=f"{path or 'the model'} drops {p:.0%} of its values: too little is left to learn from",
        remedy="a smaller p: 0.1 to 0.3",
        sure=0.85,
        stage="forward",
        where=Where(module=path or None, op="dropout"),
        evidence=[("loss with dropout", told["with"], told["without"]), ("p", p, "0.5 at most")],
        trial=RemedyTrial("less_dropout"),
    )


@check
def attention_logit_growth(case: Case) -> Iterator[Finding]:
    """The largest attention score rises from look to look, to many times what it was.

    Where the scores were wide before anything was learned, the scale is at fault, and not the learning rate.
    """
    looks = _looks(case)
    for path, now in looks[-1].values["attention"].items() if len(looks) >= 3 else ():
        way = [exam.values["attention"][path]["highest"] for exam in looks if path in exam.values["attention"]]
        if len(way) < 3 or way[-1] < 50 or way[-1] < 4 * way[0] or not way[-3] < way[-2] < way[-1]:
            continue
        unscaled = looks[0].step <= 2 and looks[0].values["attention"].get(path, now)["spread"] > 1.5
        yield finding(
            "model.attention_logit_growth",
            "warning",
            looks[-1].step,
            symptom=f"the largest score of {path or 'attention'} has grown from {way[0]:.3g} to {way[-1]:.3g}",
            cause="queries and keys grow without bound: softmax turns into a choice of one, and spikes follow",
            remedy="scale by 1 / sqrt(d), normalise queries and keys, or a smaller learning rate",
            sure=0.85,
            stage="forward",
            where=Where(module=path or None, op="softmax"),
            evidence=[("largest score", way[-1], way[0]), ("evenness of the weights, 0 to 1", now["evenness"])],
            trial=RemedyTrial("scaled_scores"),
            explains=("opt.lr_too_high",) if unscaled else (),
        )
        return


@check
def router_collapse(case: Case) -> Iterator[Finding]:
    """A router's choices come down to ever fewer experts. A load that is uneven and stays so is no collapse."""
    looks = _looks(case)
    for path, now in looks[-1].values["routers"].items() if len(looks) >= 4 else ():
        way = [exam.values["routers"][path]["effective"] for exam in looks if path in exam.values["routers"]]
        few = max(1.5, 0.5 * now["experts"])
        last = sorted(way[-3:])
        if len(way) < 4 or now["experts"] < 3 or last[1] > few or last[1] > 0.75 * max(way[:3]):
            continue
        yield finding(
            "model.router_collapse",
            "warning",
            looks[-1].step,
            symptom=f"{path or 'the router'} sends {now['most']:.0%} of its load to one of {now['experts']} experts",
            cause="nothing balances the load: who is chosen learns, and is chosen more",
            remedy="a balancing loss, a bias for each expert that evens the load, or noise in the router",
            sure=0.85,
            stage="forward",
            where=Where(module=path or None),
            evidence=[("experts that share the load", last[1], max(way[:3]))],
            trial=RemedyTrial("balanced_router", {"experts": now["experts"]}),
        )
        return
