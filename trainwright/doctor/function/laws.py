"""Judges of the laws of ``laws.md``: pure functions of a Case."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.facts.data import SAME, RowsFacts
from trainwright.doctor.finding import ExperimentRequest, finding, in_words, listed
from trainwright.doctor.function.facts import FunctionFacts, GapFacts, InputsFacts, TiesFacts
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

LATER = 8
"""Steps after the first look at which an effect is looked for again: what starts at zero has none at first."""
FELT = 0.02
"""Standard deviations of the outputs: what one sample does to the others where they are mixed. A statistic of the batch
that is one feature of many, on purpose, does less."""
TRAINED = 40
"""Steps after which running statistics have followed the weights: 0.9 to the power of 40 is 1.5 %."""


def samples_are_independent(case: Case) -> Iterator[Verdict]:
    """The output for a sample does not depend on the samples beside it, nor on how many there are."""
    facts = case.newest(FunctionFacts)
    if facts is None:
        yield from _blind(case)
        return
    found = next((each for each in (facts.neighbours, facts.alone) if each is not None and each.is_real), None)
    rows = case.newest(RowsFacts)
    if found is not None and facts.written:
        yield NotApplicable(f"an evaluation changes {listed(facts.written)}, which all samples meet")
        return
    if found is facts.neighbours is not None and rows is not None and rows.same + 1 >= rows.steps:
        if rows.steps >= SAME or case.finished:
            yield NotApplicable("every step has the same rows: they may be one thing, such as the nodes of a graph")
        return
    if found is None:
        if facts.neighbours is None and facts.alone is None:
            yield NotApplicable(facts.related or "no output can be told from the next")
        else:
            yield Holds(f"{facts.size} samples")
        return
    by_size = found is facts.alone
    yield finding(
        "law.function.samples_are_independent",
        "info" if by_size or found.amount < FELT else "warning",
        case.last_step,
        symptom="in eval mode the outputs of two samples alone are not those that they have in the batch"
        if by_size
        else f"in eval mode another sample in the batch changes the outputs of the others, first in "
        f"{in_words(found.module)}",
        cause="the model computes with the size of the batch"
        if by_size
        else "an operation mixes the samples: a softmax, mean, norm or attention over the dimension of the batch, or a "
        "view that swaps dimensions",
        remedy="let every operation keep the dimension of the batch: dim=, batch_first=, transpose for view",
        sure=0.85,
        stage="forward",
        where=Where(module=found.module),
        evidence=[("change of the outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
    )


def evaluation_repeats(case: Case) -> Iterator[Verdict]:
    """In eval mode the same input gives the same output each time, and a pass changes no buffer."""
    facts = case.newest(FunctionFacts)
    if facts is None:
        yield from _blind(case)
        return
    carried, noise = facts.carried, facts.noise
    if facts.written or (carried is not None and carried.is_real and not (noise is not None and noise.is_real)):
        what = f"{listed(facts.written)} change" if facts.written else "the outputs of a second call are others"
        yield finding(
            "law.function.evaluation_repeats",
            "warning" if any(_is_of_a_norm(name) for name in facts.written) else "info",
            case.last_step,
            symptom=f"an evaluation changes the model: in eval mode {what}",
            cause="running statistics are updated in eval mode too"
            if facts.written
            else "a state is kept in the model from one call to the next",
            remedy="update buffers only where self.training is True"
            if facts.written
            else "reset the state before each evaluation, or pass it as an argument",
            sure=0.9,
            stage="buffers",
            where=Where(module=facts.written[0].rpartition(".")[0] if facts.written else None),
            evidence=[
                ("buffers written in eval mode", list(facts.written), []),
                ("change of the outputs of a second call", carried.amount if carried else None, 0.0),
            ],
        )
    elif noise is not None and noise.is_real:
        yield finding(
            "law.function.evaluation_repeats",
            "info",
            case.last_step,
            symptom="in eval mode the outputs depend on random numbers",
            cause="noise or dropout that knows nothing of the mode; or samples that are drawn on purpose",
            remedy="draw only where self.training is True, unless the outputs are meant to be samples",
            sure=0.7,
            stage="forward",
            evidence=[("change of the outputs, in standard deviations", noise.amount, f"<= {noise.limit:.2g}")],
        )
    else:
        yield Holds("two calls, and one with other random numbers")


def _is_of_a_norm(name: str) -> bool:
    """Whether these are running statistics: a count of calls, codes or a cache may be kept on purpose."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def padding_is_not_seen(case: Case) -> Iterator[Verdict]:
    """The outputs of a row do not depend on how much padding follows it."""
    facts = case.newest(FunctionFacts)
    if facts is None:
        yield from _blind(case)
        return
    found = facts.padding
    if found is None:
        yield NotApplicable("no input has padding at its ends")
    elif not found.is_real:
        yield Holds("the row with the most padding")
    else:
        yield finding(
            "law.function.padding_is_not_seen",
            "warning" if facts.pad else "info",
            case.last_step,
            symptom="the outputs of a row change when the padding at its end is cut off",
            cause="attention, a mean, or the last state of a recurrent layer takes the padding in",
            remedy="pass the mask to every layer that looks along the row; take a mean, or the last state, without the "
            "padding",
            sure=0.8,
            stage="forward",
            evidence=[
                ("change of the outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}"),
                ("what says that it is padding", facts.pad or "nothing"),
            ],
        )


def past_does_not_see_the_future(case: Case) -> Iterator[Verdict]:
    """Where the target is the next input, the outputs do not depend on later inputs."""
    facts = case.newest(FunctionFacts)
    if facts is None:
        yield from _blind(case)
        return
    found = facts.future
    if found is None:
        yield NotApplicable("no target is the next input")
    elif not found.is_real:
        yield Holds("the first half of a row, with another second half")
    else:
        yield finding(
            "law.function.past_does_not_see_the_future",
            "critical",
            case.last_step,
            symptom=f"outputs change when only later inputs do, first in {in_words(found.module)}; the target is the "
            "next input",
            cause="the model sees what it has to predict: a causal mask is missing, or is off by one",
            remedy="is_causal=True in the attention; no bidirectional layer, symmetric padding or norm over time",
            sure=0.9,
            stage="forward",
            where=Where(module=found.module),
            evidence=[("change of early outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
        )


def inputs_matter(case: Case) -> Iterator[Verdict]:
    """Every input that varies from sample to sample has an effect on some output."""
    looked = case.newest(FunctionFacts)
    every = case.every(InputsFacts)
    if looked is None:
        yield from _blind(case)
        return
    if not every or (_is_idle(every[-1][1]) and case.last_step >= every[0][0] + LATER and len(every) < 2):
        yield ExperimentRequest(InputsFacts.experiment)
        return
    facts = every[-1][1]
    if not facts.tensors:
        yield NotApplicable("no input varies from sample to sample")
    elif not _is_idle(facts):
        yield Holds(f"{facts.tensors} inputs" + (f", {facts.columns} columns" if facts.columns else ""))
    elif len(every) > 1:
        what = (
            f"columns {listed([str(n) for n in facts.idle_columns], 8)} of the input"
            if facts.idle_columns
            else "the input"
            if facts.tensors == 1
            else f"input {facts.idle[0]}"
        )
        yield finding(
            "law.function.inputs_matter",
            "warning" if 0 in facts.idle else "info",
            case.last_step,
            symptom=f"{what} can be that of the first sample in all of them, and no output changes",
            cause="it is sliced away, overwritten, rounded to one value or multiplied by zero, or it is not used",
            remedy="follow it through the forward pass; leave it out if it is not to be used",
            sure=0.8 if facts.idle else 0.6,
            stage="forward",
            since_step=every[0][0],
            evidence=[("change of the outputs", 0.0, "> 0"), ("columns that vary", facts.columns)],
        )


def _is_idle(facts: InputsFacts) -> bool:
    return bool(facts.idle or facts.idle_columns)


def evaluated_is_what_is_trained(case: Case) -> Iterator[Verdict]:
    """With the same weights the loss of a batch is not much higher in eval mode than in train mode."""
    every = case.every(GapFacts)
    losses = [each.loss for each in case.watched if each.loss == each.loss]
    if not case.facts("modes").get("depends"):
        if case.facts("modes"):
            yield NotApplicable("no module behaves differently in eval mode")
        return
    if len(losses) < 4 or case.last_step < TRAINED:
        return
    if not every or every[-1][0] <= case.last_step - TRAINED:
        yield ExperimentRequest(GapFacts.experiment)
    learned = [(step, facts, _share(facts, max(losses[:4]))) for step, facts in every]
    if not learned:
        return
    bad = [(step, facts, share) for step, facts, share in learned if share is not None and share > 0.5]
    # what does not last may be statistics that lag behind fast weights
    is_sure = bool(bad) and (bad[-1][0] - bad[0][0] >= TRAINED or not math.isfinite(bad[-1][1].eval))
    if not is_sure or learned[-1][2] is None or learned[-1][2] <= 0.5:
        yield Holds(f"the loss of step {every[-1][0]} in both modes")
        return
    step, facts, share = bad[-1]
    yield finding(
        "law.function.evaluated_is_what_is_trained",
        "warning" if _is_explained(facts) else "info",
        step,
        symptom=f"the loss of one batch is {facts.train:.4g} in train mode and {facts.eval:.4g} in eval mode",
        cause="running statistics do not follow the activations (momentum, batches that are too small or unlike each "
        "other), or a module does another thing in eval mode",
        remedy="look at the module named here: its momentum, its statistics, what it does with self.training",
        sure=0.8,
        stage="buffers",
        where=Where(module=facts.module),
        evidence=[
            ("share of what was learned that eval mode loses", round(share, 3), "<= 0.5"),
            (f"loss in eval mode with {in_words(facts.module)} alone in train mode", facts.without, facts.train),
        ],
    )


def _is_explained(facts: GapFacts) -> bool:
    """Whether one module of torch's takes half of the difference: what else is done in eval mode, is on purpose."""
    return facts.without is not None and not facts.without - facts.train > 0.5 * (facts.eval - facts.train)


def _share(facts: GapFacts, first: float) -> float | None:
    """The share of the fall of the loss since the first steps that is lost in eval mode; None where none has fallen."""
    fallen = first - facts.train
    return (facts.eval - facts.train) / fallen if fallen > 0.05 * abs(first) else None


def ties_hold(case: Case) -> Iterator[Verdict]:
    """Weights that two modules share stay one parameter, and no two parameters share memory."""
    facts = case.newest(TiesFacts)
    if facts is None:
        return
    pairs = facts.broken or facts.split
    if not pairs:
        yield Holds(f"{facts.tied} ties") if facts.tied else NotApplicable("no weights are shared")
        return
    names = listed(pairs[0])
    yield finding(
        "law.function.ties_hold",
        "warning",
        case.last_step,
        symptom=f"{names} were one parameter when the watch began and are several now"
        if facts.broken
        else f"{names} are several parameters over the same memory",
        cause="one of them was replaced: by load_state_dict(assign=True), a new layer, or .to() of a part"
        if facts.broken
        else "they were tied through .data: each has a gradient of its own, and the optimizer updates the memory twice",
        remedy="tie them again, by assigning the parameter itself: head.weight = embedding.weight",
        sure=0.95,
        stage="update",
        where=Where(module=pairs[0][0].rpartition(".")[0]),
        evidence=[("names of one weight", list(pairs[0]), "one parameter")],
    )


def _blind(case: Case) -> Iterator[Verdict]:
    """Why nothing was measured, where it was tried."""
    if (why := case.blind(FunctionFacts)) is not None:
        yield NotApplicable(why)
