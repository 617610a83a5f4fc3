from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.wiring import SavedFacts


@check(stage="backward", severity="critical", confidence=0.97)
def recompute_mismatch(run: RunContext, facts: SavedFacts) -> Results:
    """Under activation checkpointing a module returns different values in backward than in forward.

    How it is detected: a replay compares checksums of the outputs of every module in both passes.

    Usual cause: the checkpointed part draws random numbers (dropout) and the random state is not restored, or its
    forward changes a buffer or an attribute.

    Fix: `checkpoint(..., preserve_rng_state=True)`, which is the default; move counters and caches out of the
    checkpointed part.

    Sources: OLMo-core#828.
    """
    if facts.differs is not None:
        yield run.finding(
            symptom=f"{facts.differs} ({facts.kind}), checkpointed, gives other values in backward than in forward",
            where=Where(module=facts.differs),
            evidence=[("first module that differs", facts.differs, "none")],
        )
