from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.precision import FormatFacts


@check(stage="forward", confidence=0.95)
def positions_low_precision(run: RunContext, exams: Every[FormatFacts]) -> Results:
    """Neighbouring positions have equal angles: positions or angles pass through a 16-bit type.

    Why it matters: bfloat16 cannot tell whole numbers above 256 apart, so rotary or sinusoidal embeddings are wrong in
    long sequences only.

    How it is detected: the arguments of `sin` and `cos` in a replayed forward pass, and tables of sines and cosines in
    16 bits that a module holds: a tenth of the rows above 256 equal their neighbour.

    Usual cause: positions in the dtype of the model, or their product (`@`, `einsum`, `outer`) under autocast.

    Fix: positions and angles in float32, outside of autocast; cast the sine and cosine afterwards.

    Sources: huggingface/transformers#25681, huggingface/diffusers PR 13922, EleutherAI/gpt-neox#1003.
    """
    for step, facts in exams[-1:]:
        for first in facts.aliased[:1]:
            yield run.finding(
                step,
                symptom=f"{first.same} of {first.far} positions above 256 have the same angles as their neighbour",
                where=Where(module=first.module, op="sin", dtype=first.dtype),
                evidence=[("positions with the angles of their neighbour", first.same, 0)],
            )
