"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts
from trainwright.runlog.records import Where

MIN_STEPS = 3
"""Examined steps in which the term had no graph."""


@check(stage="loss", confidence=0.85, needs=LossFacts)
def term_without_gradient(run: RunContext) -> Iterator[Result]:
    """A term of the loss has no gradient: it is in the number that is printed, and nothing is learned from it.

    How it is detected: the loop adds a scalar without a graph, computed from outputs of the model, to one that has a
    graph, in at least 3 examined steps.

    Exceptions: a scalar on which `detach()` was called itself, as surrogate losses and baselines do; a term made of
    detached values that also weigh what has a gradient.

    Usual cause: what the term is made of was detached or computed under `no_grad`; a gradient penalty calls
    `torch.autograd.grad` without `create_graph=True`.

    Looks like: loss.term_dominates, where the term has a gradient and another is far larger.

    Fix: keep the graph of what the term is made of (`create_graph=True` for a gradient penalty), or leave it out of the
    loss.

    Sources: ooples/AiDotNet#1844, LixiangHan/GANs-for-1D-Signal#7, junyanz/pytorch-CycleGAN-and-pix2pix#1201.
    """
    facts = run.latest(LossFacts)
    for sign in facts.signs if facts is not None else ():
        if sign.kind == "no_gradient" and sign.steps >= MIN_STEPS:
            yield run.finding(
                run.last_step,
                symptom=f"a term of the loss, made by {sign.op}, has no gradient",
                since_step=1,
                where=Where(op=sign.op, source=sign.line),
                evidence=[("examined steps in which it has no graph", sign.steps, 0)],
            )
            return
