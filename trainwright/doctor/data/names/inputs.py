"""Checks of the model's inputs: their scale, whether they vary, whether they contain the target."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding
from trainwright.runlog.json_values import Facts

LARGE, SMALL = 10.0, 0.02
"""Root mean square above which inputs may be too large; standard deviation below which they may be too small."""


def constant_input(case: Case) -> Iterator[Finding]:
    """All samples of a batch are equal in every input of the model, and their targets differ.

    An input that is constant on purpose (positions, a mask) comes with another one that varies.
    """
    facts = case.facts("batch")
    inputs = facts.get("inputs") or ()
    if not inputs or not all(i["constant"] for i in inputs) or not facts["targets_vary"] or inputs[0]["shape"][0] < 4:
        return
    zeros = all(i.get("absmax") == 0 for i in inputs)
    is_dummy = all(
        math.prod(i["shape"][1:]) == 1 for i in inputs
    )  # of a model that has no inputs but must be given one
    yield finding(
        "data.constant_input",
        "info" if is_dummy else "critical",
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
        explains=("model.*", "gradient.vanishing", "optim.lr_too_low", "data.label_*", "model.init_symmetric"),
    )  # fmt: skip


def badly_scaled(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Inputs are far from mean 0 and deviation 1, and a replay with standardised inputs does much better.

    Too large: the first loss is far above chance, and near it with standardised inputs; weights that are too large
    would keep it high. Too small: hardly any variation around an offset, as normalising twice gives; with standardised
    inputs the same updates learn several times as much. A model that normalises its inputs gains nothing.
    """
    first = next((e for e in case.outcomes("batch") if e.values.get("inputs")), None)
    if first is None or first.step > 4:
        return
    floats = [i for i in first.values["inputs"] if "mean" in i and len(i["shape"]) > 1 and not i["constant"]]
    large = [i for i in floats if math.hypot(i["mean"], i["std"]) > LARGE]
    small = [i for i in floats if i["std"] < SMALL and (abs(i["mean"]) > 5 * i["std"] or i["std"] < SMALL / 4)]
    if not (large or small) or (len(small) < len(floats) and not large):
        return
    trials = [e for e in case.outcomes("standardised") if e.step == first.step]
    if not trials:
        yield ExperimentRequest("standardised", first.step)
        return
    trial = trials[0].values
    if "blind" not in trial:
        yield from _too_large(case, first.values, large[0], trial) if large else _too_small(case, small[0], trial)


def _too_large(case: Case, batch: Facts, x: Facts, trial: Facts) -> Iterator[Finding]:
    recorded, standardised = trial["as_it_was"], trial["standardised"]
    chance = math.log(batch["classes"]) if (batch["classes"] or 0) > 1 else None
    if chance is not None:
        if not (recorded[0] > 1.5 * chance and standardised[0] < 1.5 * chance and standardised[0] < 0.6 * recorded[0]):
            return
    elif not (recorded[0] > 5 * abs(standardised[0]) and recorded[-1] > 2 * abs(standardised[-1])):
        return
    yield finding(
        "data.unnormalised_input",
        "warning",
        case.last_step,
        symptom=f"the loss is {recorded[0]:.3g} before any update" + (f", chance is {chance:.3g}" if chance else ""),
        cause=f"inputs are not normalised: mean {x['mean']:.3g}, deviation {x['std']:.3g}, up to {x['absmax']:.3g}",
        remedy="standardise the inputs" + (": x / 255 at the least" if x["whole"] and x["absmax"] <= 255 else ""),
        sure=0.9,
        stage="input",
        evidence=[
            ("mean and deviation of the inputs", [x["mean"], x["std"]], [0, 1]),
            ("first loss, as it was and standardised", [recorded[0], standardised[0]], chance),
        ],
        trial=RemedyTrial("standardised_inputs"),
        explains=("model.init_too_large", "optim.lr_too_high", "gradient.exploding", "model.dead_relu"),
    )


def _too_small(case: Case, x: Facts, trial: Facts) -> Iterator[Finding]:
    recorded, standardised = trial["as_it_was"], trial["standardised"]
    fell, would = recorded[0] - recorded[-1], standardised[0] - standardised[-1]
    if not (would > 2 * fell and would > 0.03 * abs(standardised[0])):
        return
    yield finding(
        "data.double_normalised",
        "warning",
        case.last_step,
        symptom=f"inputs hardly vary: deviation {x['std']:.2g} around {x['mean']:.3g}",
        cause="the data is normalised twice, in the data set and again in the loop or the model",
        remedy="normalise once; print one sample right before the call of the model",
        sure=0.9,
        stage="input",
        evidence=[
            ("deviation of the inputs", x["std"], 1),
            (f"fall of the loss in {len(recorded)} updates, as it was and standardised", [fell, would], None),
        ],
        trial=RemedyTrial("standardised_inputs"),
        explains=("optim.lr_too_low", "gradient.vanishing", "init.*", "model.dead*"),
    )


def target_leak(case: Case) -> Iterator[Finding]:
    """One column of the input determines the target: it is constant within each class and differs between classes.

    It is seen twice, on enough samples to rule out chance. A strong feature still varies within a class.
    """
    exams = [e.values for e in case.outcomes("batch") if e.values.get("leaks")]
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
        "warning" if exact else "info",
        case.last_step,
        symptom=f"column {leak['column']} of the input alone tells the target of all {leak['samples']} samples seen",
        cause="the target, or a copy of it, was left among the features",
        remedy=f"drop column {leak['column']}",
        sure=0.9 if exact else 0.7,
        stage="input",
        evidence=[("variance of the column left within classes", leak["within"], "> 0"), ("column", leak["column"])],
        trial=RemedyTrial("without_column", {"column": leak["column"]}),
    )


def pad_in_loss(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """One id pads rows of different length, and the loss has a gradient at outputs whose targets are only that id.

    A loss that ignores padding, by ignore_index, weights or a mask, has a gradient of exactly 0 there.
    """
    padded = next((e for e in case.outcomes("batch") if e.values.get("pad")), None)
    if padded is None:
        return
    outcomes = [e for e in case.outcomes("padding_in_loss") if e.step == padded.step]
    if not outcomes:
        yield ExperimentRequest("padding_in_loss", padded.step)
        return
    facts = outcomes[0].values
    if "blind" in facts or facts["at_padding"] <= 1e-6 * facts["elsewhere"] or not facts["at_padding"]:
        return
    yield finding(
        "data.pad_in_loss",
        "warning",
        case.last_step,
        symptom=f"{facts['share']:.0%} of the tokens are padding, and the loss counts them as targets",
        cause=f"{facts['id']} is padding, and the loss does not ignore it",
        remedy=f"ignore_index={facts['id']} in the loss, or labels of -100 at padding",
        sure=0.9,
        stage="label",
        evidence=[
            ("gradient of the loss at outputs within padding", facts["at_padding"], 0),
            ("gradient elsewhere", facts["elsewhere"]),
            ("rows that end with it" if facts["side"] == "end" else "rows that start with it", round(facts["rows"], 2)),
        ],
        trial=RemedyTrial("ignore_padding", {"pad": facts["id"]}),
    )


def label_feature_misaligned(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The loss stays at the entropy of the class frequencies, and the inputs hold no information about the labels.

    Simple classifiers find none in hundreds of samples, at least thirty of each class, while the model does memorise a
    single batch: so it can learn, and there is nothing to learn. Where only some labels are wrong, the others can be
    learned; a model that cannot learn does not memorise either.
    """
    batch = case.newest("batch")
    losses = [w.loss for w in case.watched if w.step > case.last_step - 16]
    facts = batch.values if batch else {}
    if batch is None or batch.step < 24 or not facts.get("classes") or "entropy" not in facts or len(losses) < 16:
        return
    if facts["samples"] < max(256, 30 * facts["classes"]) or sum(losses) / len(losses) < 0.9 * facts["entropy"]:
        return
    outcomes = [e.values for e in case.outcomes("label_signal") if "blind" not in e.values]
    if not case.outcomes("label_signal"):
        yield ExperimentRequest("label_signal", batch.step)
    for signal in outcomes[-1:]:
        memorised = signal["memorised"]
        if signal["deviations"] > 2.5 or not memorised[-1] < 0.8 * memorised[0]:
            continue
        yield finding(
            "data.label_feature_misaligned",
            "warning",
            case.last_step,
            symptom=f"the loss after {case.last_step} steps is {sum(losses) / len(losses):.3g}; to know only the "
            f"frequency of each class gives {signal['entropy']:.3g}",
            cause="inputs and labels do not belong together: one of them was shuffled, sorted or shifted alone",
            remedy="index both by the same order, and look at ten samples with their labels",
            sure=0.7,
            stage="label",
            evidence=[
                (
                    f"how far {signal['samples']} samples predict labels above chance, in deviations",
                    round(signal["deviations"], 1),
                    "> 3",
                ),
                ("loss when one batch is repeated", [memorised[0], memorised[-1]], None),
            ],
            explains=("optim.lr_too_low", "data.label_noise"),
        )


NAMES: tuple[OldCheck, ...] = (
    constant_input,
    badly_scaled,
    target_leak,
    pad_in_loss,
    label_feature_misaligned,
)
