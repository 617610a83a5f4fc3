from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import has_closure, kinds
from trainwright.runs.records import Watched


@check(
    points_at="zero_grad",
    stage="update",
    severity="critical",
    confidence=0.98,
    explains=("optim.*", "gradient.*", "model.*", "loss.*", "schedule.learning_rate_zero"),
)
def zero_grad_before_step(run: RunContext) -> Results:
    """`zero_grad()` runs between `backward()` and `step()`, so every update is made with empty gradients.

    Why it matters: no weight changes. The loss is computed and printed as usual.

    How it is detected: the order of calls in at least half of the recorded steps, and no gradient at the update.

    Usual cause: `zero_grad()` was put right before `optimizer.step()`.

    Looks like: gradient.graph_cut, where no gradients are computed; gradient.accumulation_discarded, where those of the
    last micro-batch survive.

    Fix: `optimizer.zero_grad(); loss.backward(); optimizer.step()`, in this order.
    """
    bad = [each for each in run.steps if not has_closure(each) and _dropped_before_step(each)]
    if bad and 2 * len(bad) >= len(run.steps):
        order = " ".join(kind for kind, _ in kinds(bad[-1], "backward", "zero_grad", "step"))
        yield run.finding(
            bad[-1].step,
            symptom="zero_grad() clears the gradients before step(), so no weight changes",
            since_step=bad[0].step,
            evidence=[
                ("order of the calls", order),
                ("parameters with a gradient at the update", str(bad[-1].values.get("grads"))),
            ],
        )


def _dropped_before_step(step: Watched) -> bool:
    numbers = {value["optimizer"] for _, value in kinds(step, "step")}
    had_backward = dropped = False
    for kind, value in step.events:
        if kind == "backward":
            had_backward, dropped = True, False
        elif kind == "zero_grad" and had_backward and len(numbers) == 1 and value in (-1, *numbers):
            dropped = True
        elif kind == "step":
            return dropped and ((step.values.get("grads") or [1])[0] == 0 or step.grad_norm == 0.0)
    return False
