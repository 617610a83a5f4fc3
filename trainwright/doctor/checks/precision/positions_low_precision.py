from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.precision import FormatFacts


@check(stage="forward", confidence=0.95)
def positions_low_precision(run: RunContext, exams: Every[FormatFacts]) -> Results:
    """Neighbouring positions have equal position embeddings, because positions or angles are in a 16-bit dtype.

    Why it matters: bfloat16 cannot represent all whole numbers above 256, so rotary or sinusoidal embeddings are wrong
    in long sequences only.

    How it is detected: in the arguments of `sin` and `cos` of a replayed forward pass, or in 16-bit tables of sines and
    cosines that a module holds, at least a tenth of the rows from position 256 on equal their neighbour.

    Usual cause: positions in the dtype of the model, or their product (`@`, `einsum`, `outer`) under autocast.

    Fix: compute positions and angles in float32, outside of autocast; convert only the sine and cosine to 16 bits.

    Sources: huggingface/transformers#25681, huggingface/diffusers PR 13922, EleutherAI/gpt-neox#1003.
    """
    for step, facts in exams[-1:]:
        for first in facts.aliased[:1]:
            yield run.finding(
                step,
                symptom=f"{first.same} of {first.far} positions from 256 on have the same angles as their neighbour",
                where=Where(module=first.module, op="sin", dtype=first.dtype),
                evidence=[("positions with the angles of their neighbour", first.same, 0)],
            )
