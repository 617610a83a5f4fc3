"""Checks of train mode in training and of eval mode in evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.facts.data import RowsFacts
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, RemedyTrial, finding, in_words
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Where


def trained_in_eval_mode(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The model, or a part of it, is in eval mode in the training passes.

    It is a mistake where a whole container is in eval mode, as after ``eval()``, and its weights are trained. It is a
    choice where only BatchNorm, or one kind of layer, is in eval mode, or a part whose weights are frozen.
    """
    facts = case.facts("modes")
    rows: list[Facts] = facts.get("eval", [])
    whole = bool(facts.get("roots_in_eval")) and all(facts["roots_in_eval"])
    trained = [row for row in rows if row["depends"] and row["trained"]]
    left = [row for row in trained if row["left"]]
    if not trained:
        return
    if whole and (left or not all(row["norm"] for row in trained)):
        yield _whole(case, left or trained, bool(left))
    elif not whole:
        inside = _of_containers([row for row in rows if row["container"] and row["left"]], left)
        early = _of_containers([row for row in rows if row["container"]], [row for row in trained if not row["norm"]])
        if inside or early:
            yield _partly(case, inside or early, bool(inside))


def _of_containers(containers: list[Facts], rows: list[Facts]) -> list[Facts]:
    return [row for row in rows if any(row["module"].startswith(f"{each['module']}.") for each in containers)]


def _whole(case: Case, rows: list[Facts], left: bool) -> Finding:
    since = max(row["since"] for row in rows)
    return finding(
        "mode.eval_during_training",
        "critical" if left else "warning",
        case.last_step,
        symptom=f"the model has been training in eval mode since step {since}",
        cause="model.eval() was called for an evaluation and model.train() was not called afterwards"
        if left
        else "the model was loaded in eval mode (as pretrained models are) and model.train() was never called",
        remedy="call model.train() before each epoch of training",
        sure=0.95 if left else 0.7,
        since_step=since,
        where=Where(module=rows[0]["module"]),
        evidence=[("modules without their train behaviour", [row["module"] for row in rows[:8]], [])],
        explains=("model.excess_dropout",),
    )


def _partly(case: Case, rows: list[Facts], left: bool) -> Finding:
    since, names = max(row["since"] for row in rows), [row["module"] for row in rows]
    return finding(
        "mode.partial_eval",
        "critical" if left else "warning",
        case.last_step,
        symptom=f"{len(names)} modules have been training in eval mode since step {since}: {', '.join(names[:8])}",
        cause="a part of the model was set to eval mode and not back; the rest is in train mode"
        if left
        else "a part of the model was loaded in eval mode (as pretrained models are) and its weights are trained",
        remedy="call model.train() before each epoch of training",
        sure=0.95 if left else 0.6,
        since_step=since,
        where=Where(module=names[0]),
        evidence=[("modules in eval mode", names[:16], [])],
    )


def evaluated_in_train_mode(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Between steps the model was run without gradients on other data in train mode, and never in eval mode.

    Passes without gradients that belong to each step (pseudo labels, targets) are not an evaluation. Several of
    the same rows are samples of what dropout makes of them (Gal and Ghahramani 2016), and an info.
    """
    facts = case.facts("modes")
    bursts: int = facts.get("num_evaluated_in_train", 0)
    steps = facts.get("steps", 0)
    if not bursts or facts["evaluated_in_eval"] or steps < 5 or bursts > 0.25 * steps:
        return
    rows = case.newest(RowsFacts)
    is_sampled = not facts["norms"] and rows is not None and any(e.rows >= 2 * e.distinct > 0 for e in rows.evaluations)
    norms = f"; it updates the running statistics of {facts['norms']} normalisations" if facts["norms"] else ""
    yield finding(
        "mode.train_during_eval",
        "info" if is_sampled else "warning",
        case.last_step,
        symptom=f"an evaluation before step {facts['evaluated_in_train'][0]} ran in train mode{norms}",
        cause="model.eval() is not called before evaluating",
        remedy="call model.eval() before and model.train() after an evaluation",
        sure=0.9,
        since_step=facts["evaluated_in_train"][0],
        evidence=[
            ("evaluations in train mode, before these steps", facts["evaluated_in_train"], []),
            ("evaluations in eval mode", 0, bursts),
            ("modules that behave differently in eval mode", facts["depends"], 0),
        ],
    )


def functional_dropout(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A dropout ran although every module was in eval mode: the function was not passed ``training``.

    Other noise (a sampled latent, diffusion) is no dropout and is not reported.
    """
    drops = case.facts("in_eval_mode").get("drops", [])
    if not drops:
        return
    by_name = [each for each in drops if "dropout" in each["op"] or each["op"] == "scaled_dot_product_attention"]
    first = (by_name or drops)[0]
    yield finding(
        "mode.functional_dropout",
        "warning",
        case.last_step,
        symptom=f"in eval mode {first['op']} still drops values in {in_words(first['module'])}",
        cause=f"{first['op']} is called in the same way in both modes"
        if by_name
        else "the model masks values at random in eval mode too",
        remedy="pass training=self.training (dropout_p=self.p if self.training else 0.0 in attention), or nn.Dropout",
        sure=0.95 if by_name else 0.6,
        stage="forward",
        where=Where(module=first["module"], op=first["op"]),
        evidence=[("dropout in eval mode", [f"{each['module']}: {each['op']}" for each in drops[:8]], [])],
        trial=RemedyTrial("dropout_follows_mode"),
    )


NAMES: tuple[OldCheck, ...] = (
    trained_in_eval_mode,
    evaluated_in_train_mode,
    functional_dropout,
)
