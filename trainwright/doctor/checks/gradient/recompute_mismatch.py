from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.wiring import SavedFacts


@check(stage="backward", severity="critical", confidence=0.97, needs=SavedFacts)
def recompute_mismatch(run: RunContext) -> Results:
    """Under activation checkpointing a module gives other values in backward than in forward.

    How it is detected: checksums of the outputs of every module in both passes, on a replay.

    Usual cause: the checkpointed part draws random numbers (dropout) and the random state is not restored, or its
    forward changes a state.

    Fix: `checkpoint(..., preserve_rng_state=True)`, which is the default; no counters and caches inside.

    Sources: OLMo-core#828.
    """
    facts = run.measured(SavedFacts)
    if facts.differs is not None:
        yield run.finding(
            run.every(SavedFacts)[-1][0],
            symptom=f"{facts.differs} ({facts.kind}), checkpointed, gives other values in backward than in forward",
            where=Where(module=facts.differs),
            evidence=[("first module that differs", facts.differs, "none")],
        )
