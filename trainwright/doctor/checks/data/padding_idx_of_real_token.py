"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.data import TargetsFacts
from trainwright.runlog.records import Where

OFTEN = 0.02
"""Fraction of the ids that stand between others, and of the targets, which no padding has."""


@check(stage="forward", needs=TargetsFacts)
def padding_idx_of_real_token(run: RunContext) -> Iterator[Result]:
    """The padding_idx of an embedding is the number of a real, frequent token.

    Why it matters: the row of padding_idx is zeros and gets no gradient, so the model never sees that token.

    How it is detected: at least 2 % of the ids are padding_idx and stand between other ids of their row, where padding
    does not stand, and as many targets of the loss are padding_idx.

    Usual cause: `padding_idx=0` although the tokens are numbered from 0, or padding and a token share a number.

    Looks like: data.pad_in_loss, where the id stands at the ends of rows only.

    Fix: number real tokens from 1, or add a token for padding: `nn.Embedding(vocab + 1, dim, padding_idx=vocab)`.

    Sources: FGA-DIKU/BONSAI#168, NVIDIA-NeMo/Speech#5726, huggingface/transformers PR 10200.
    """
    facts = run.latest(TargetsFacts)
    if facts is None or facts.embedding is None:
        yield NotApplicable("no embedding has a padding_idx")
    elif min(facts.inside, facts.padding_targets) < OFTEN:
        yield Passed(f"the ids that {facts.embedding} gets")
    else:
        yield run.finding(
            run.last_step,
            symptom=f"{facts.inside:.0%} of the ids that {facts.embedding} gets are its padding_idx {facts.padding}, "
            "between other ids",
            where=Where(module=facts.embedding),
            evidence=[
                ("fraction of ids that are padding_idx, between others", round(facts.inside, 3), 0.0),
                ("fraction of the targets that are padding_idx", round(facts.padding_targets, 3), 0.0),
            ],
        )
