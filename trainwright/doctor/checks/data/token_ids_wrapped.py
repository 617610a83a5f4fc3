from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, TargetsFacts

INTEGER_RANGES = {255: "uint8", 32767: "int16", 65535: "uint16"}
"""Largest ids of small integer types. 127 is left out because it is also the largest ASCII code."""
MIN_OUTPUTS_BEYOND = 32  # Outputs beyond the range. Fewer may be special tokens, or a vocabulary padded to a multiple.
MIN_TARGETS_PER_ID = 20  # Targets per id of the small integer type after which larger ids would have appeared


@check(stage="label", confidence=0.85)
def token_ids_wrapped(run: RunContext, facts: TargetsFacts, batch: BatchFacts) -> Results:
    """Token ids wrap around: they were stored in an integer dtype that is too small for the vocabulary.

    Why it matters: ids above the largest value of the dtype become other tokens. The model trains on wrong text, and
    no error is raised.

    How it is detected: the largest target so far is exactly 255, 32767 or 65535, among at least 20 targets per id of
    that dtype, although the model has more than 32 outputs beyond it.

    Exceptions: 127, the largest code of ASCII.

    Usual cause: the ids were cast to uint8 or uint16 to save space: `ids.astype(np.uint16)` for over 65,536 tokens.

    Fix: store ids as int32, and assert `ids.max() <= np.iinfo(dtype).max` before the cast.

    Sources: huggingface/transformers#2825, princeton-nlp/LLM-Shearing#65.
    """
    if batch.classes is None:
        yield NotApplicable("the targets are no classes")
        return
    kind = INTEGER_RANGES.get(facts.largest)
    is_certain = facts.targets >= MIN_TARGETS_PER_ID * facts.largest
    if kind is None or not is_certain or batch.classes <= facts.largest + MIN_OUTPUTS_BEYOND:
        return
    yield run.finding(
        symptom=f"no token id above {facts.largest} occurs among {facts.targets} targets, and the vocabulary has "
        f"{batch.classes}: ids wrap at the range of {kind}",
        evidence=[("largest target", facts.largest, f"up to {batch.classes - 1}"), ("targets", facts.targets)],
    )
