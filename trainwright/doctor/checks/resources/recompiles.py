from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.resources import CompilationFacts

MIN_TIMES = 3  # torch compiles once for the first size, once for any size, and once for a size of 1


@check(stage="loop", confidence=0.95)
def recompiles(run: RunContext, facts: CompilationFacts) -> Results:
    """torch.compile compiles the same function again and again during the training.

    Each compilation takes seconds. After eight of them torch stops compiling the function and runs it uncompiled.

    How it is detected: torch records each compilation with the guard that failed. After the first 4 steps, one function
    was recompiled three times or more.

    Exceptions: one or two recompilations, for a short last batch or sequences of another length.

    Usual cause: a number that changes is an attribute of the model or an argument, such as a step counter or a list
    that grows; or the input has many different ranks or dtypes.

    Fix: keep the number in the failed guard outside of the compiled function, or in a tensor. For sizes that vary, use
    `torch._dynamo.mark_dynamic`, `torch.compile(dynamic=True)`, or pad to a few sizes. `model.compile: blocks` compiles
    smaller parts.

    Sources: docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html (recompilation).
    """
    worst = next((each for each in facts.again if each.times >= MIN_TIMES), None)
    if worst is None:
        return
    outcome = "; torch has stopped compiling it, and new inputs run uncompiled" if worst.gave_up else ""
    yield run.finding(
        symptom=f"torch.compile has compiled {worst.name} again {worst.times} times, in {worst.seconds:.3g} s{outcome}",
        where=Where(source=worst.source),
        evidence=[
            ("compiled again after the first 4 steps", worst.times, f"below {MIN_TIMES}"),
            ("failed guards", list(worst.reasons), "none"),
        ],
    )
