"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.function import FunctionFacts
from trainwright.doctor.finding import RemedyTrial, in_words
from trainwright.runlog.records import Where


@check(stage="forward", severity="critical", confidence=0.9, needs=FunctionFacts, explains=("data.target_leak",))
def future_leak(run: RunContext) -> Iterator[Result]:
    """The model sees the inputs that it has to predict.

    Why it matters: the loss falls far too low, and the model cannot generate.

    How it is detected: where the target is the next input, the second half of a row is replaced in eval mode, and the
    outputs of the first half change by more than rounding.

    Usual cause: a causal mask is missing or off by one; a bidirectional layer, symmetric padding, or a norm over time.

    Fix: `F.scaled_dot_product_attention(q, k, v, is_causal=True)`; pad convolutions on the left only.
    """
    facts = run.latest(FunctionFacts)
    if facts is None or facts.future is None:
        yield NotApplicable("no target is the next input")
    elif facts.future.is_real:
        found = facts.future
        yield run.finding(
            run.last_step,
            symptom=f"outputs change when only later inputs do, first in {in_words(found.module)}",
            where=Where(module=found.module),
            since_step=1,
            evidence=[("change of early outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
            trial=RemedyTrial("causal_mask"),
        )
