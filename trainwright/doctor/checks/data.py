"""Whether what the model is fed can be learned from: its scale, whether it varies, what it gives away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, check, finding

LARGE, SMALL = 10.0, 0.02
"""Root mean square from which on inputs are looked at as too large, deviation below which as too small."""


@check
def constant_input(case: Case) -> Iterator[Finding]:
    """All samples of a batch are the same to the model, in all that it is given, and their targets are not.

    An input that is meant to be constant (positions, a mask) comes with one that is not.
    """
    seen = case.about("batch")
    inputs = seen.get("inputs") or ()
    if not inputs or not all(i["constant"] for i in inputs) or not seen["targets_vary"] or inputs[0]["shape"][0] < 4:
        return
    zeros = all(i.get("absmax") == 0 for i in inputs)
    yield finding(
        "data.constant_input",
        "critical",
        case.last_step,
        symptom=f"all {inputs[0]['shape'][0]} samples of the batch are " + ("zeros" if zeros else "one and the same")
        + ", with different targets",
        cause="fractions were stored as integers: (x / 255).to(torch.uint8) is 0 almost everywhere"
        if zeros or all(i.get("whole") for i in inputs)
        else "something between the data and the model makes all samples the same",
        remedy="turn the data into floats before dividing: x.float() / 255",
        sure=0.95,
        stage="input",
        evidence=[("variance across the batch", 0.0, "> 0")],
        trial=RemedyTrial("varied_inputs"),
        explains=("model.*", "grad.vanishing", "opt.lr_too_low", "data.label_*", "init.symmetric"),
    )  # fmt: skip


@check
def badly_scaled(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Inputs far from mean 0 and deviation 1, and a replay with such inputs does much better.

    Too large: the first loss is far above that of a guess, and is near it with standardised inputs; weights that are
    too large would keep it high. Too small: hardly any variation around an offset, as normalising twice gives; with
    standardised inputs the same updates learn several times as much. A model that normalises by itself gains nothing.
    """
    first = next((e for e in case.exams("batch") if e.values.get("inputs")), None)
    if first is None or first.step > 4:
        return
    floats = [i for i in first.values["inputs"] if i["float"] and len(i["shape"]) > 1 and not i["constant"]]
    large = [i for i in floats if math.hypot(i["mean"], i["std"]) > LARGE]
    small = [i for i in floats if i["std"] < SMALL and (abs(i["mean"]) > 5 * i["std"] or i["std"] < SMALL / 4)]
    if not (large or small) or (len(small) < len(floats) and not large):
        return
    trials = [e for e in case.exams("standardised") if e.step == first.step]
    if not trials:
        yield ExperimentRequest("standardised", first.step)
        return
    seen = trials[0].values
    if "blind" not in seen:
        yield from _too_large(case, first.values, large[0], seen) if large else _too_small(case, small[0], seen)


def _too_large(case: Case, batch: dict[str, Any], x: dict[str, Any], seen: dict[str, Any]) -> Iterator[Finding]:
    now, then = seen["as_it_was"], seen["standardised"]
    guess = math.log(batch["classes"]) if (batch["classes"] or 0) > 1 else None
    if guess is not None:
        if not (now[0] > 1.5 * guess and then[0] < 1.5 * guess and then[0] < 0.6 * now[0]):
            return
    elif not (now[0] > 5 * abs(then[0]) and now[-1] > 2 * abs(then[-1])):
        return
    yield finding(
        "data.unnormalised_input",
        "warning",
        case.last_step,
        symptom=f"the loss is {now[0]:.3g} before any update" + (f", a guess has {guess:.3g}" if guess else ""),
        cause=f"inputs are not normalised: mean {x['mean']:.3g}, deviation {x['std']:.3g}, up to {x['absmax']:.3g}",
        remedy="standardise the inputs" + (": x / 255 at the least" if x["whole"] and x["absmax"] <= 255 else ""),
        sure=0.9,
        stage="input",
        evidence=[
            ("mean and deviation of the inputs", [x["mean"], x["std"]], [0, 1]),
            ("first loss, as it was and standardised", [now[0], then[0]], guess),
        ],
        trial=RemedyTrial("standardised_inputs"),
        explains=("init.too_large", "opt.lr_too_high", "grad.exploding", "model.dead_relu"),
    )


def _too_small(case: Case, x: dict[str, Any], seen: dict[str, Any]) -> Iterator[Finding]:
    now, then = seen["as_it_was"], seen["standardised"]
    fell, would = now[0] - now[-1], then[0] - then[-1]
    if not (would > 2 * fell and would > 0.03 * abs(then[0])):
        return
    yield finding(
        "data.double_normalised",
        "warning",
        case.last_step,
        symptom=f"inputs hardly vary: deviation {x['std']:.2g} around {x['mean']:.3g}",
        cause="the data is normalised twice, in the data set and again in the loop or the model",
        remedy="normalise once: look at one sample right before the model is called",
        sure=0.9,
        stage="input",
        evidence=[
            ("deviation of the inputs", x["std"], 1),
            (f"fall of the loss in {len(now)} updates, as it was and standardised", [fell, would], None),
        ],
        trial=RemedyTrial("standardised_inputs"),
        explains=("opt.lr_too_low", "grad.vanishing", "init.*", "model.dead*"),
    )


@check
def target_leak(case: Case) -> Iterator[Finding]:
    """One column of the input gives the target away: constant within each class, another for another class.

    Seen twice, on samples enough that chance cannot do it. A strong feature still varies within a class.
    """
    exams = [e.values for e in case.exams("batch") if e.values.get("leaks")]
    if len(exams) < 2 and not (exams and exams[0]["leaks"][0]["samples"] >= 256):
        return
    last = {leak["column"]: leak for leak in exams[-1]["leaks"]}
    both = [leak for leak in exams[0]["leaks"] if leak["column"] in last]
    if not both:
        return
    leak = last[both[0]["column"]]
    exact = leak["within"] < 1e-12
    yield finding(
        "data.target_leak",
        "critical" if exact else "warning",
        case.last_step,
        symptom=f"column {leak['column']} of the input alone says the target of all {leak['samples']} samples seen",
        cause="the target, or a copy of it, was left among the features",
        remedy=f"drop column {leak['column']}",
        sure=0.9 if exact else 0.7,
        stage="input",
        evidence=[("variance of the column left within classes", leak["within"], "> 0"), ("column", leak["column"])],
        trial=RemedyTrial("without_column", {"column": leak["column"]}),
    )


@check
def pad_in_loss(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One id fills rows of different length up, and the loss has a gradient where targets are nothing but that id.

    That gradient is exactly 0 where the loss ignores it, whichever way: ignore_index, weights or a mask.
    """
    exam = next((e for e in case.exams("batch") if e.values.get("pad")), None)
    if exam is None:
        return
    asked = [e for e in case.exams("padding_in_loss") if e.step == exam.step]
    if not asked:
        yield ExperimentRequest("padding_in_loss", exam.step)
        return
    seen = asked[0].values
    if "blind" in seen or seen["at_padding"] <= 1e-6 * seen["elsewhere"] or not seen["at_padding"]:
        return
    yield finding(
        "data.pad_in_loss",
        "warning",
        case.last_step,
        symptom=f"{seen['share']:.0%} of the tokens fill rows up, and the loss counts them as targets",
        cause=f"{seen['id']} is padding, and the loss does not ignore it",
        remedy=f"ignore_index={seen['id']} in the loss, or labels of -100 at padding",
        sure=0.9,
        stage="label",
        evidence=[
            ("gradient of the loss at outputs within padding", seen["at_padding"], 0),
            ("gradient elsewhere", seen["elsewhere"]),
            ("rows that end with it" if seen["side"] == "end" else "rows that start with it", round(seen["rows"], 2)),
        ],
        trial=RemedyTrial("ignore_padding", {"pad": seen["id"]}),
    )


@check
def label_feature_misaligned(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The loss stays where it is for whoever knows only how frequent each class is, and the data says no more.

    Plain learners find nothing in hundreds of samples, at least thirty for each class, while the model does
    memorise a single batch: so it learns, and there is nothing to be learned. Labels of which some are wrong leave a
    part that can be; a model that cannot learn does not memorise either.
    """
    batch = case.exam("batch")
    losses = [w.loss for w in case.watched if w.step > case.last_step - 16]
    told = batch.values if batch else {}
    if batch is None or batch.step < 24 or not told.get("classes") or "entropy" not in told or len(losses) < 16:
        return
    if told["samples"] < max(256, 30 * told["classes"]) or sum(losses) / len(losses) < 0.9 * told["entropy"]:
        return
    asked = [e.values for e in case.exams("label_signal") if "blind" not in e.values]
    if not case.exams("label_signal"):
        yield ExperimentRequest("label_signal", batch.step)
    for seen in asked[-1:]:
        memorised = seen["memorised"]
        if seen["deviations"] > 2.5 or not memorised[-1] < 0.8 * memorised[0]:
            continue
        yield finding(
            "data.label_feature_misaligned",
            "warning",
            case.last_step,
            symptom=f"the loss after {case.last_step} steps, {sum(losses) / len(losses):.3g}, is that of knowing "
            f"nothing but how frequent each class is: {seen['entropy']:.3g}",
            cause="inputs and labels do not belong together: one of them was shuffled, sorted or shifted alone",
            remedy="index both by the same order, and look at ten samples with their labels",
            sure=0.7,
            stage="label",
            evidence=[
                (f"what {seen['samples']} samples say of labels, over chance", round(seen["deviations"], 1), "> 3"),
                ("loss when one batch is repeated", [memorised[0], memorised[-1]], None),
            ],
            explains=("opt.lr_too_low", "data.label_noise"),
        )
