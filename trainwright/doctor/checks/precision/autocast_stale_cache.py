from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.precision import MixedPrecisionFacts


@check(
    stage="forward",
    severity="critical",
    confidence=0.99,
    explains=("gradient.*", "optim.*", "resources.not_reproducible"),
)
def autocast_stale_cache(run: RunContext, facts: MixedPrecisionFacts) -> Results:
    """One `torch.autocast` block spans several steps, so its cache still holds the weights of the first step.

    How it is detected: at an update inside of autocast, a small test weight is cast and then changed. At the next
    update, the cache of autocast still returns its old value.

    Usual cause: `with torch.autocast(...)` is around the loop instead of inside each step.

    Looks like: optim.lr_too_low, where the weights hardly move.

    Fix: enter autocast in each step, around forward and loss only. If the block must be long:
    `torch.autocast("cuda", cache_enabled=False)`.

    Sources: PyTorch documentation of automatic mixed precision.
    """
    if facts.stale_since is not None:
        yield run.finding(
            max(facts.stale_since, 1),
            symptom="the model computes with weights of an earlier step, which autocast has cached",
            since_step=facts.stale_since,
        )
