import re

from trainwright.doctor import Finding, Results, RunContext, Where, check
from trainwright.doctor.facts.data import BatchFacts, TargetsFacts
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Examined

DEFAULT_IGNORE_INDEX = -100
ERROR = re.compile(
    r"(?:Target|label) (-?\d+) is out of (?:bounds|range)|"
    r"Class values must be (?:smaller than num_classes|non-negative)"
)


@check(stage="label", severity="critical", confidence=0.98, explains=("loop.*",))
def label_out_of_range(run: RunContext) -> Results:
    """A label is not a valid class, or a target of a binary loss is outside of 0 to 1.

    Why it matters: on a CPU a class out of range is an IndexError; on CUDA it is an assertion that names no sample. For
    a binary target outside of 0 to 1 there is no best score, so the loss falls without bound.

    How it is detected: from the error that the loss function raised, with its labels; from the targets of binary
    losses.

    Exceptions: the label `ignore_index` (default: -100) is legal.

    Usual cause: labels are counted from 1, the last layer has too few outputs, or labels of a binary loss are -1 and 1
    or 0 to 255.

    Fix: correct the samples if a few labels are wrong. Otherwise subtract 1 from the labels, or give the last layer
    `int(y.max()) + 1` outputs. Use the label -100 for targets to ignore, and 0 and 1 for a binary loss.

    Sources: pytorch/pytorch#18014, pytorch/pytorch#1204.
    """
    exams = [each for each in run.records if isinstance(each, Examined) and each.experiment == "unfinished"]
    unfinished = exams[-1].values if exams else {}
    if (match := ERROR.search(unfinished.get("error") or "")) is not None:
        yield _out_of_range(run, unfinished, int(match.group(1)) if match.group(1) else None)
    facts = run.latest(TargetsFacts)
    if facts is not None and (facts.lowest < -1e-6 or facts.highest > 1 + 1e-6):
        yield run.finding(
            symptom=f"targets of a binary loss are between {facts.lowest:.4g} and {facts.highest:.4g}",
            cause="labels are -1 and 1, or 0 to 255: the loss falls without bound",
            sure=0.95,
            evidence=[("targets", [facts.lowest, facts.highest], "0 to 1")],
            explains=("loss.*", "optim.*"),
        )


def _out_of_range(run: RunContext, unfinished: Facts, named: int | None) -> Finding:
    failed = unfinished.get("failed") or {}
    op = failed.get("op") or "cross_entropy"
    integers = [a for a in failed.get("arguments", ()) if isinstance(a, dict) and "int" in a["dtype"]]
    labels = integers[0] if integers else {}
    batch = run.latest(BatchFacts)
    classes = batch.classes if batch else None
    least = classes if classes is not None else named if named is not None and named >= 0 else None
    values: list[int] = labels.get("values", [])
    ids: list[int] = next((each for each in reversed(unfinished.get("ids", ())) if each), [])
    bad = [
        n for n, v in enumerate(values) if (least is not None and v >= least) or (v < 0 and v != DEFAULT_IGNORE_INDEX)
    ]
    span = f"{labels['min']:.0f} to {labels['max']:.0f}" if "min" in labels else str(named)
    by_one = least is not None and labels.get("min") == 1 and labels.get("max") == least
    samples = tuple(ids[n] for n in bad) if len(ids) == len(values) else tuple(unfinished.get("samples", ()))
    label = named if named is not None else "a label"
    return run.finding(
        symptom=f"{op} raised an error: {label} is not a class; the labels of the batch are {span}",
        cause="labels are counted from 1" if by_one else "a label is wrong, or the model has too few outputs",
        where=Where(op=op, sample_ids=samples, source=failed.get("line")),
        evidence=[
            ("labels", span, "valid classes" if classes is None else f"0 to {classes - 1}"),
            ("labels of this batch that are not a class", len(bad), 0),
        ],
    )
