"""Checks of layers in training: dead activations, vanishing gradients, attention, routers, BatchNorm, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding, in_words
from trainwright.doctor.trend import FALLS, slope_in_errors
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where

MANY = 32
"""Values of a channel that have a mean."""
HARD = 0.8
"""A rate of dropout that leaves less than a fifth."""


def _looks(case: Case) -> list[Examined]:
    return [exam for exam in case.outcomes("layers") if "loss" in exam.values]


def dead_relu(case: Case) -> Iterator[Finding]:
    """The inputs of many units of a ReLU lie below 0 by more than four of their own standard deviations.

    The inputs of a sparsely active unit reach 0 now and then. Where the inputs do not vary at all, the data is at
    fault. Where a part of them died in training and the loss has fallen since, it is an info: the others do.
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
    harmless = seen["dead"] < 0.9 and not from_start and _learned_since_alive(case, path)
    yield finding(
        "model.dead_relu",
        "critical" if seen["dead"] >= 0.9 and from_start else "info" if harmless else "warning",
        now.step,
        symptom=f"{seen['dead']:.0%} of the units of {in_words(path)} are 0 for every sample",
        cause="their inputs lie far below 0" + ("" if from_start else ": updates have driven them there"),
        remedy="bias 0 at the start" if from_start else "a smaller learning rate, LeakyReLU, or a norm before it",
        sure=0.9 if from_start else 0.6,
        stage="forward",
        where=Where(module=path, op="relu"),
        evidence=[("share of dead units", seen["dead"], 0.0), ("lowest mean input", seen["furthest"], 0.0)],
        trial=RemedyTrial("revived", {"module": path}),
        explains=("grad.vanishing", "grad.graph_cut"),
    )


def _learned_since_alive(case: Case, path: str) -> bool:
    """Whether the loss has fallen, by more than its noise, since the units of ``path`` were last seen alive."""
    alive = max(exam.step for exam in _looks(case) if exam.values["relus"].get(path, {}).get("dead", 0.0) < 0.4)
    return slope_in_errors([(each.step, each.loss) for each in case.watched if each.step > alive]) < FALLS


def vanishing(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Gradients shrink from the last layer to the first by a factor for each layer, to 1e-5 and less.

    A slope that was not there at the start comes from the updates rather than from the layers. Where one batch was
    memorised, the gradients of all layers are small together. In 16 bit it is measured again in fp32. A single layer
    that blocks the gradient makes zeros, not a slope.
    """
    looks = _looks(case)
    if not looks or not _falls(looks[-1].values["depth"]):
        return
    now = looks[-1]
    depth = now.values["depth"]
    if now.values["narrow"]:
        again = [exam for exam in case.outcomes("depth_in_fp32") if exam.step == now.step]
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
        + ("" if from_start else ", caused by the updates"),
        remedy="ReLU or GELU in place of sigmoid and tanh; residual connections with normalisation",
        sure=0.9 if from_start else 0.5,
        stage="backward",
        where=Where(module=depth[0][0]),
        evidence=[("gradient of the first layer over the largest", ratio, 1.0)],
        trial=RemedyTrial("relu_for_sigmoid"),
    )


def _falls(depth: Sequence[Sequence[float]]) -> bool:
    """Whether gradients shrink towards the input in most pairs of layers, and by 1e-5 in all."""
    sizes = [max(each[1], 1e-320) for each in depth]
    if len(sizes) < 4 or not all(map(math.isfinite, sizes)) or sizes[len(sizes) // 2] <= 1e-300:
        return False
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
    rising = sum(a < b for a, b in pairs) / len(pairs)
    return bool(sizes[0] <= 1e-5 * max(sizes)) and rising >= 0.85


def bn_tiny_batch(case: Case) -> Iterator[Finding]:
    """BatchNorm in training mode computes its statistics from at most two samples or four values, in two looks.

    A short last batch is tiny once in an epoch; frozen statistics use no batch. An image or two have enough values for
    statistics of their own, so that is an info.
    """
    looks = _looks(case)[-2:]
    tiny = [{path for path, seen in exam.values["norms"].items() if _is_tiny(seen)} for exam in looks]
    if len(looks) < 2 or not tiny[0] & tiny[1]:
        return
    path, now = sorted(tiny[0] & tiny[1])[-1], looks[-1]
    seen = now.values["norms"][path]
    yield finding(
        "model.bn_tiny_batch",
        "info" if seen["values"] >= MANY else "warning",
        now.step,
        symptom=f"{in_words(path)} normalises by the statistics of {seen['samples']} samples, "
        f"{seen['values']} values a channel",
        cause="the variance of so few values is noise, and evaluation uses the running average instead",
        remedy="GroupNorm or LayerNorm; SyncBatchNorm over several devices; a larger batch",
        sure=0.85,
        stage="forward",
        where=Where(module=path, op="batch_norm"),
        evidence=[("values for each channel", seen["values"], "32 or more")],
        trial=RemedyTrial("group_norm"),
    )


def _is_tiny(seen: Facts) -> bool:
    return bool(seen["samples"] <= 2 or seen["values"] <= 4)


def bn_double_update(case: Case) -> Iterator[Finding]:
    """Running statistics are updated more often than the forward pass ran: again by activation checkpointing.

    A momentum of 1 - sqrt(0.9) compensates for it.
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
        symptom=f"{seen['calls']} forward passes update the statistics of {twice[0]} {seen['updates']} times",
        cause="activation checkpointing runs its forward again in the backward pass, which updates them once more",
        remedy="leave BatchNorm out of the checkpointed part, or set momentum to 1 - sqrt(1 - momentum)",
        sure=0.95,
        stage="buffers",
        where=Where(module=twice[0], op="batch_norm"),
        evidence=[("updates of its statistics in a step", seen["updates"], seen["calls"])],
        trial=RemedyTrial("momentum_root", {"modules": twice}),
    )


def excess_dropout(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Dropout is high, and over several draws the same batch has a clearly lower loss without it.

    Not examined in the first steps: nothing has been learned yet that dropout could take away. A rate below 0.8 may be
    meant for data that are few: an info.
    """
    looks = _looks(case)
    if not looks or not looks[-1].values["dropout"] or looks[-1].step < 8:
        return
    step, (path, p) = looks[-1].step, max(looks[-1].values["dropout"].items(), key=lambda item: float(item[1]))
    facts = next((exam.values for exam in case.outcomes("dropout_gap") if exam.step == step), None)
    if facts is None:
        yield ExperimentRequest("dropout_gap", step)
        return
    if "with" not in facts or not facts["with"] * (1 - (0.04 if p >= 0.8 else 0.15)) > facts["without"] >= 0:
        return
    yield finding(
        "model.excess_dropout",
        "warning" if p >= HARD else "info",
        step,
        symptom=f"the loss of a batch is {facts['with']:.3g} with dropout, {facts['without']:.3g} without",
        cause=f"{in_words(path)} drops {p:.0%} of its values: too little is left to learn from",
        remedy="a smaller p: 0.1 to 0.3",
        sure=0.85,
        stage="forward",
        where=Where(module=path, op="dropout"),
        evidence=[("loss with dropout", facts["with"], facts["without"]), ("p", p, "0.5 at most")],
        trial=RemedyTrial("less_dropout"),
    )


def attention_logit_growth(case: Case) -> Iterator[Finding]:
    """The largest attention score rises from look to look, to many times its first value.

    Where the scores were widely spread before anything was learned, their scale is at fault, not the learning rate.
    """
    looks = _looks(case)
    for path, now in looks[-1].values["attention"].items() if len(looks) >= 3 else ():
        history = [exam.values["attention"][path]["highest"] for exam in looks if path in exam.values["attention"]]
        if (
            len(history) < 3
            or history[-1] < 50
            or history[-1] < 4 * history[0]
            or not history[-3] < history[-2] < history[-1]
        ):
            continue
        unscaled = looks[0].step <= 2 and looks[0].values["attention"].get(path, now)["spread"] > 1.5
        yield finding(
            "model.attention_logit_growth",
            "warning",
            looks[-1].step,
            symptom=f"the largest attention score in {in_words(path)} has grown from {history[0]:.3g} to "
            f"{history[-1]:.3g}",
            cause="queries and keys grow without bound: softmax selects a single key, and loss spikes follow",
            remedy="scale by 1 / sqrt(d), normalise queries and keys, or use a smaller learning rate",
            sure=0.85,
            stage="forward",
            where=Where(module=path, op="softmax"),
            evidence=[("largest score", history[-1], history[0]), ("evenness of the weights, 0 to 1", now["evenness"])],
            trial=RemedyTrial("scaled_scores"),
            explains=("optim.lr_too_high",) if unscaled else (),
        )
        return


def router_collapse(case: Case) -> Iterator[Finding]:
    """A router chooses ever fewer experts. A load that is uneven and stays so is no collapse."""
    looks = _looks(case)
    for path, now in looks[-1].values["routers"].items() if len(looks) >= 4 else ():
        history = [exam.values["routers"][path]["effective"] for exam in looks if path in exam.values["routers"]]
        few = max(1.5, 0.25 * now["experts"])
        last = sorted(history[-3:])
        if len(history) < 4 or now["experts"] < 3 or last[1] > few or last[1] > 0.75 * max(history[:3]):
            continue
        yield finding(
            "model.router_collapse",
            "warning",
            looks[-1].step,
            symptom=f"{in_words(path)} sends {now['most']:.0%} of its load to one of {now['experts']} experts",
            cause="nothing balances the load: an expert that is chosen learns, and is chosen more",
            remedy="a load-balancing loss, a bias for each expert that evens the load, or noise in the router",
            sure=0.85,
            stage="forward",
            where=Where(module=path),
            evidence=[("experts that share the load", last[1], max(history[:3]))],
            trial=RemedyTrial("balanced_router", {"experts": now["experts"]}),
        )
        return


NAMES: tuple[OldCheck, ...] = (
    dead_relu,
    vanishing,
    bn_tiny_batch,
    bn_double_update,
    excess_dropout,
    attention_logit_growth,
    router_collapse,
)
