"""Checks of the size of updates: learning rate, warm-up, weight decay, clipping, exploding gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding
from trainwright.doctor.program.names.contract import kinds
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where

Losses = Sequence[float]


def single(case: Case) -> list[Examined]:
    """The outcomes for updates by a single optimizer: in a game of several (a GAN) no loss has to fall."""
    return [e for e in case.outcomes("update") if e.values.get("optimizers") == 1 and "ratio" in e.values]


def recovered(case: Case) -> bool:
    """Whether the run has recovered: the loss is well below its first value, and near its lowest."""
    losses = [record.loss for record in case.watched]
    if len(losses) < 12:
        return False
    first, now = losses[0], mean(losses[-4:])
    low = min(mean(losses[i : i + 4]) for i in range(len(losses) - 3))
    return now < first - 0.2 * abs(first) and now - low < 0.3 * (first - low)


def mean(losses: Losses) -> float:
    """The mean of losses; infinity where one is NaN."""
    total = sum(losses) / max(1, len(losses))
    return math.inf if math.isnan(total) else total


def last_quarter(losses: Losses) -> float:
    """The mean of the last quarter of losses."""
    return mean(losses[-max(1, len(losses) // 4) :])


def overshoots(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """An update raises the loss of its own batch by far, and so do more updates like it; smaller ones make it fall.

    All are on the same batch, so neither other samples nor noise explain it.
    """
    exams = [e for e in single(case) if _worse(e.values)][:3]
    for exam in exams:
        yield ExperimentRequest("smaller_steps", exam.step)
    if recovered(case) or warm(case) is not None:
        return
    for exam in exams:
        facts = next((e.values for e in case.outcomes("smaller_steps") if e.step == exam.step), None)
        if facts and facts.get("falls") is not None and last_quarter(facts["as_it_was"]) > exam.values["loss"]:
            yield _too_high(case, exam, facts["falls"])
            return


def _worse(values: Facts) -> bool:
    before, after = values["loss"], values["after"]
    worse = not math.isfinite(after) or after > before + 0.5 * abs(before)
    return math.isfinite(before) and values["ratio"] > 0 and worse


def _too_high(case: Case, exam: Examined, factor: float) -> Finding:
    values = exam.values
    first = case.watched[0].loss if case.watched else values["loss"]
    lost = any(not r.loss < first + abs(first) for r in case.watched) or not values["after"] < first + abs(first)
    normal = (values.get("input_rms") or 1.0) < 30
    return finding(
        "opt.lr_too_high",
        "critical" if lost else "warning",
        exam.step,
        symptom=f"an update takes the loss of its own batch from {values['loss']:.4g} to {values['after']:.4g}",
        cause=f"the learning rate of {max(values['lr'], default=0.0):g} is too high for this model and batch",
        remedy=f"a learning rate of {max(values['lr'], default=0.0) * factor:g} or less",
        sure=0.85 if normal else 0.5,
        stage="update",
        evidence=[("update / weights", values["ratio"], "below 0.1"), ("lr at which it falls", factor)],
        trial=RemedyTrial("other_lr", {"factor": factor}),
        explains=("opt.weight_decay_too_high", "grad.exploding"),
    )


def no_progress(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The first steps make no progress with large updates, and the same steps at a tenth or with a warm-up do.

    The batches are the same, so noise does not explain the difference. A warm-up that helps ends at the full learning
    rate, which is then not too high in itself.
    """
    facts = [e for e in case.outcomes("along_the_way") if _lost_way(e.values)]
    for exam in [e for e in single(case) if e.step in (12, 16, 32) and not facts]:
        losses = [r.loss for r in case.watched if r.step <= exam.step]
        low = min((mean(losses[i : i + 4]) for i in range(max(1, len(losses) - 3))), default=0.0)
        nowhere = mean(losses[-4:]) > min(losses[0] - 0.1 * abs(losses[0]), low + 0.1 * abs(low))
        if nowhere and max(e.values["ratio"] for e in single(case) if e.step <= exam.step) > 0.02:
            yield ExperimentRequest("along_the_way", exam.step)
    if not facts or recovered(case):
        return
    if (lost := warm(case)) is not None:
        yield _no_warmup(lost)
    else:
        yield _on_the_way(case, facts[-1])


def _lost_way(values: Facts) -> bool:
    """The recorded losses rise, or hardly fall, and at a tenth of the learning rate they fall in the same steps.

    Of an objective that is above 0 in some steps and below it in others (a policy's) no rise is large or small.
    """
    was, tenth = values.get("as_it_was") or [], values.get("tenth") or []
    if len(was) < 12 or len(tenth) != len(was) or not all(map(math.isfinite, tenth)) or min(was) < 0 < max(was):
        return False
    margin = 0.07 * abs(was[0])
    quarter = max(1, len(was) // 4)
    best = min(mean(was[i : i + quarter]) for i in range(len(was) - quarter + 1))
    end, fallen = last_quarter(was), was[0] - last_quarter(tenth)
    stuck = was[0] - end < 0.4 * fallen or end > best + margin
    half = len(was) // 2
    above = sum(not a <= b for a, b in zip(was[half:], tenth[half:])) / max(1, len(was) - half)
    return stuck and fallen > margin and end > last_quarter(tenth) + margin and above > 0.7


def warm(case: Case) -> Examined | None:
    """The newest outcome that shows that a warm-up is missing; None if there is none."""
    for exam in reversed(case.outcomes("along_the_way")):
        if not _lost_way(exam.values):
            continue
        was, tenth, ramped = (exam.values[name] for name in ("as_it_was", "tenth", "warm"))
        start, half = was[0], exam.values["warm_steps"]
        gained, possible = start - mean(ramped[half:]), start - mean(tenth[half:])
        if len(ramped) == len(was) and gained > max(0.5 * possible, 2 * (start - mean(was[half:])), 0.1 * abs(start)):
            return exam
    return None


def _no_warmup(exam: Examined) -> Finding:
    was, ramped, steps = exam.values["as_it_was"], exam.values["warm"], exam.values["warm_steps"]
    return finding(
        "sched.no_warmup",
        "warning",
        exam.step,
        symptom=f"the first {exam.values['length']} steps at the full learning rate make no progress: loss "
        f"{was[0]:.3g} -> {last_quarter(was):.3g}",
        cause="the learning rate is right for later steps and too high for the first ones",
        remedy="let the learning rate rise from near 0 in the first steps (a warm-up), or use a pre-norm model",
        sure=0.8,
        stage="update",
        since_step=exam.values["first"],
        evidence=[
            (f"loss with a warm-up of {steps} steps", last_quarter(ramped), last_quarter(was)),
            ("loss at a tenth of it", last_quarter(exam.values["tenth"])),
        ],
        trial=RemedyTrial("warm_up", {}),
        explains=("opt.lr_too_high", "model.attention_logit_growth", "gradient.vanishing"),
    )


def _on_the_way(case: Case, exam: Examined) -> Finding:
    was, tenth = exam.values["as_it_was"], exam.values["tenth"]
    lr = case.watched[-1].lr if case.watched else 0.0
    return finding(
        "opt.lr_too_high",
        "warning",
        exam.step,
        symptom=f"the loss does not keep falling: {min(was):.3g} at best, then {last_quarter(was):.3g}",
        cause=f"the learning rate of {lr:g} is too high: at a tenth of it the same steps reach "
        f"{last_quarter(tenth):.3g}",
        remedy=f"a learning rate of {0.1 * lr:g}",
        sure=0.8,
        stage="update",
        since_step=exam.values["first"],
        evidence=[("loss at a tenth of the learning rate, same steps", last_quarter(tenth), last_quarter(was))],
        trial=RemedyTrial("other_lr", {"factor": 0.1, "recorded": True}),
    )


def lr_too_low(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Gradients are normal and updates negligible; with updates a thousand times as large the loss falls.

    At the beginning of a warm-up and at the end of a schedule small updates are usual.
    """
    exams = [e for e in single(case) if e.values["lr"] and max(e.values["lr"]) > 0.0]
    if len(exams) < 2 or any(not e.values["ratio"] < 2e-6 for e in exams) or _rises(case):
        return
    last = exams[1] if len(exams) < 8 else exams[-1]
    values = last.values
    pull = values["grad_norm"] * values["weight_norm"] / max(abs(values["loss"]), 1e-12)
    clipped = (values["norm_at_clip"] or 0.0) > 100 * values["grad_norm"]
    if clipped or pull < 1e-3:
        return
    yield ExperimentRequest("larger_lr", exams[1].step)
    facts = case.facts("larger_lr")
    was = facts.get("as_it_was") or [1.0]
    better = [factor for factor, losses in facts.get("larger") or () if _falls(losses)]
    if better and abs(was[-1] - was[0]) < 1e-4 * abs(was[0]):
        yield finding(
            "opt.lr_too_low",
            "critical",
            exams[1].step,
            symptom=f"an update changes the weights by {values['ratio']:.1g} of their size, and the loss not at all",
            cause=f"the learning rate of {max(values['lr']):g} is too low; gradients are normal",
            remedy="a learning rate thousands of times as large",
            sure=0.93,
            stage="update",
            evidence=[
                ("update / weights", values["ratio"], "1e-4 .. 1e-2"),
                ("norm of gradients", values["grad_norm"]),
            ],
            trial=RemedyTrial("other_lr", {"factor": better[-1]}),
            explains=("sched.*", "init.*", "model.*"),
        )


def _falls(losses: Losses) -> bool:
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.01 * abs(losses[0])


def _rises(case: Case) -> bool:
    """Whether the learning rate is rising, or has a schedule whose base is more than 3 times as high."""
    rates = [record.lr for record in case.watched]
    groups = [g for o in case.facts("contract").get("optimizers") or () for g in o["groups"]]
    return rates[-1] > 1.0001 * rates[0] or any(g.get("initial_lr", 0.0) > 3 * g.get("lr", 0.0) for g in groups)


def decay_too_high(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Weight decay is a large part of the update, or of the gradient, and without it the same steps learn far more."""
    exams = [e for e in single(case) if e.step in (16, 32)]
    for exam in exams:
        losses = [r.loss for r in case.watched if r.step <= exam.step]
        if _decays(exam.values) and mean(losses[-4:]) > losses[0] - 0.25 * abs(losses[0]):
            yield ExperimentRequest("decay", exam.step)
    for exam in case.outcomes("decay"):
        was, without = exam.values.get("as_it_was") or [], exam.values.get("without") or []
        if len(was) < 12 or len(without) != len(was):
            continue
        fallen, possible = was[0] - last_quarter(was), without[0] - last_quarter(without)
        if possible > 2 * max(fallen, 0.0) and possible - fallen > 0.04 * abs(was[0]):
            update = next(e.values for e in exams if e.step == exam.step)
            first = single(case)[0].values["weight_norm"]
            yield finding(
                "opt.weight_decay_too_high",
                "warning",
                exam.step,
                symptom=f"the weights shrink and the loss falls by {fallen:.2g} in {len(was)} steps",
                cause=f"a weight decay of {max(update['weight_decay']):g} changes the weights more than the loss does",
                remedy="a weight decay of 0.01 to 0.1",
                sure=0.85,
                stage="update",
                evidence=[
                    ("fall of the loss in the same steps without it", possible, fallen),
                    ("norm of the weights", update["weight_norm"], first),
                    ("share of the update", exam.values["share"]),
                ],
                trial=RemedyTrial("weight_decay", {"to": 0.01}),
                explains=("opt.lr_too_low", "model.*"),
            )
            return


def _decays(values: Facts) -> bool:
    """Whether weight decay is strong: decoupled, by what it shrinks the weights in a step (lr times decay); coupled, as
    a part of the gradient.
    """
    decay, lr = max(values["weight_decay"], default=0.0), max(values["lr"], default=0.0)
    if values["decoupled"]:
        return bool(decay * lr > 2e-3)
    return bool(decay * values["weight_norm"] > 0.5 * values["grad_norm"] > 0.0)


def clip_always_active(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Every clip makes the gradients over a hundred times smaller, and without it the loss falls."""
    clips = [(r.step, c["norm"] / max(c["at"], 1e-30)) for r in case.watched for _, c in kinds(r, "clip") if c["norm"]]
    if len(clips) < 4 or not all(math.isfinite(ratio) and ratio > 100 for _, ratio in clips):
        return
    exams = [e for e in single(case) if e.step >= 4]
    if exams:
        yield ExperimentRequest("without_clip", exams[0].step)
    facts = case.facts("without_clip")
    was, at_one = facts.get("as_it_was") or [1.0], facts.get("at_one") or [1.0]
    if _falls(at_one) and was[0] - was[-1] < 0.1 * (at_one[0] - at_one[-1]):
        typical = sorted(ratio for _, ratio in clips)[len(clips) // 2]
        yield finding(
            "grad.clip_always_active",
            "critical",
            exams[0].step,
            symptom=f"every step's gradients are made {typical:.3g} times smaller, and the loss does not fall",
            cause="the clip's threshold is far below the norm that gradients normally have",
            remedy="a threshold near the usual norm, such as 1.0",
            sure=0.92,
            stage="clip",
            since_step=clips[0][0],
            evidence=[("norm / threshold", typical, "around 1"), ("loss after 8 updates", was[-1], at_one[-1])],
            trial=RemedyTrial("clip_at", {"at": 1.0}),
            explains=("opt.lr_too_low",),
        )


def exploding(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Gradients grow by a factor with every step back through time, to many times their size at the last step.

    With a learning rate that is too high the first gradients are normal; here they are large before any update. Where
    they are clipped, the remedy is there already.
    """
    for exam in [e for e in case.outcomes("update") if _pulls(e.values)][:2]:
        yield ExperimentRequest("through_time", exam.step)
    for exam in case.outcomes("through_time"):
        grown = [c for c in exam.values.get("chains") or () if c["factor"] > 1.02 and c["fit"] < -0.8]
        worst = max(grown, key=lambda c: c["factor"] ** c["length"], default=None)
        if worst is None or worst["factor"] ** (worst["length"] - 1) < 50:
            continue
        largest = exam.values["largest"]
        yield finding(
            "grad.exploding",
            "info" if any(kinds(each, "clip") for each in case.watched) else "critical",
            exam.step,
            symptom=f"the norm of gradients is {exam.values['grad_norm']:.3g}",
            cause=f"back through {worst['length']} uses of the same weights the gradient grows by a factor of "
            f"{worst['factor']:.3g} at each",
            remedy="clip the gradients, and start from recurrent weights of spectral norm 1 (orthogonal)",
            sure=0.92,
            stage="backward",
            where=Where(module=largest.rpartition(".")[0] if largest else None),
            evidence=[("gradient at the first use / at the last", worst["first"] / max(worst["last"], 1e-30), 1.0)],
            trial=RemedyTrial("clip_at", {"at": 1.0}),
            explains=("opt.lr_too_high", "sched.no_warmup", "init.*"),
        )
        return


def _pulls(values: Facts) -> bool:
    """Whether a change of the weights by a hundredth would change the loss by more than 3 times its value."""
    if "grad_norm" not in values:
        return False
    return bool(values["grad_norm"] * values["weight_norm"] > 300 * max(abs(values["loss"]), 1e-6))


NAMES: tuple[OldCheck, ...] = (
    overshoots,
    no_progress,
    lr_too_low,
    decay_too_high,
    clip_always_active,
    exploding,
)
