from trainwright.doctor import Passed, Results, RunContext, check
from trainwright.doctor.facts.resources import MIN_RISING_READINGS, GrowthFacts, has_grown

MIN_FILES = 16
MIN_THREADS = 4


@check(names_cause=False, stage="loop", confidence=0.85, needs=GrowthFacts)
def files_or_threads_grow(run: RunContext) -> Results:
    """Open files or threads grow from step to step, until the process may have no more.

    How it is detected: they are counted every 16 steps, later less often; four readings in a row rise, by 16 files or
    by four threads in all.

    Usual cause: files, sockets or executors that are opened in the loop and not closed; batches of loader workers, or
    iterators of such a loader, that are kept.

    Looks like: data.workers_restarted_each_step, where the workers end and are started again.

    Fix: open with a `with` statement; one executor for the whole run; `persistent_workers=True`.

    Sources: pytorch/pytorch #11201.
    """
    facts = run.measured(GrowthFacts)
    held = facts.held
    kinds = (
        ("files", [each.files for each in held], MIN_FILES),
        ("threads", [each.threads for each in held], MIN_THREADS),
    )
    for name, counts, least in kinds:
        if has_grown(counts, least):
            yield run.finding(
                held[-1].step,
                symptom=f"open {name} grow: {counts[-MIN_RISING_READINGS]} after step "
                f"{held[-MIN_RISING_READINGS].step}, {counts[-1]} "
                f"after step "
                f"{held[-1].step}",
                evidence=[(f"{name}, by step", [[h.step, n] for h, n in zip(held, counts)][-8:], "constant")],
            )
            return
    if held:
        yield Passed(f"{held[-1].files} files and {held[-1].threads} threads after step {held[-1].step}")
