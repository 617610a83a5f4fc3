from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import has_closure, optimizers_of
from trainwright.doctor.facts.loss import AccumulationFacts
from trainwright.runs.records import Watched


@check(
    points_at="zero_grad",
    stage="backward",
    severity="critical",
    confidence=0.95,
    explains=("optim.lr_too_low", "gradient.accumulation_not_normalised", "optim.missing_zero_grad"),
)
def accumulation_discarded(run: RunContext) -> Results:
    """Gradients are cleared between the micro-batches of a step, so only the last ones reach the update.

    Why it matters: the update uses fewer micro-batches than configured, but its gradient is divided by the full number.

    How it is detected: in at least two steps, and at least half of all, `zero_grad()` comes between two backward passes
    of the step, and each backward pass has its own batch.

    Exceptions: loops that use the gradients by hand before they clear them (extragradient); several losses on one
    batch.

    Usual cause: `zero_grad()` is in the loop over micro-batches, before the `if` that steps.

    Looks like: optim.zero_grad_before_step, where all gradients of the step are cleared.

    Fix: call `optimizer.zero_grad()` only right after `optimizer.step()`, in the same `if`.

    Sources: RAE#67.
    """
    steps = [each for each in run.steps if not has_closure(each) and not each.values.get("used_by_hand")]
    if len(optimizers_of(steps)) != 1:
        return
    examined = any(facts.is_plain and facts.discarded for _, facts in run.every(AccumulationFacts))
    # each backward pass has a batch of its own
    apart = [e for e in steps if examined or _num_backward(e) == len(e.values.get("ids") or ())]
    counts = [(each, lost) for each in apart if (lost := _lost(each))]
    if len(counts) < 2 or 2 * len(counts) < len(steps):
        return
    step, lost = counts[-1]
    total = _num_backward(step)
    yield run.finding(
        step.step,
        symptom=f"the gradients of {lost} out of {total} micro-batches are cleared before the update",
        since_step=counts[0][0].step,
        evidence=[("backward passes whose gradients are dropped", lost, 0)],
    )


def _num_backward(step: Watched) -> int:
    return sum(kind == "backward" for kind, _ in step.events)


def _lost(step: Watched) -> int:
    """Returns the number of backward passes that zero_grad() discards before the update, if others remain."""
    lost = since = 0
    for kind, _ in step.events:
        if kind == "backward":
            since += 1
        elif kind == "zero_grad":
            lost, since = lost + since, 0
        elif kind in ("step", "scaler_skipped"):
            return lost if since else 0
    return 0
