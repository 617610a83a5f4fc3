import statistics

from trainwright.doctor import NotApplicable, Results, RunContext, check

MIN_WAIT_FRACTION = 0.5
MIN_WAIT_S = 0.01  # Collating a batch of small samples takes less


@check(stage="input", severity="info")
def waits_for_data(run: RunContext) -> Results:
    """A large part of each step is spent waiting for data.

    How it is detected: in the median of the last 64 steps, the wait for the loader is at least half of the step time
    and at least 10 ms.

    Usual cause: the loader reads or prepares batches slower than the model computes.

    Fix: time `for batch in loader: pass`, with `num_workers=0` and with more. If `num_workers=0` is faster, sending
    batches from workers costs more than it saves. Else add workers or preprocess the data in advance.

    Sources: Mohan et al. 2021, Analyzing and mitigating data stalls in DNN training.
    """
    steps = [each for each in run.steps if each.step > 8 and "step_s" in each.values and "lines" not in each.values][
        -64:
    ]
    waits = [each.values["wait_s"] for each in steps if each.values.get("wait_s")]
    if len(steps) < 16 or len(waits) < len(steps) // 2:
        yield NotApplicable("no DataLoader was waited for in 16 steps")
        return
    wait, step = statistics.median(waits), statistics.median(each.values["step_s"] for each in steps)
    if wait < MIN_WAIT_FRACTION * step or wait < MIN_WAIT_S:
        return
    yield run.finding(
        symptom=f"a step of {1000 * step:.3g} ms waits {1000 * wait:.3g} ms for data",
        evidence=[("fraction of a step spent waiting", round(wait / step, 2), f"below {MIN_WAIT_FRACTION:g}")],
    )
