from trainwright.doctor import Every, ExperimentRequest, Finding, Results, RunContext, Where, check
from trainwright.doctor.facts.wiring import WiringFacts
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Examined

MIN_STANDARD_ERRORS = 4.0  # A mean deviates this much by chance once in ten thousand times


@check(stage="backward", severity="critical", confidence=0.97)
def wrong_backward(run: RunContext, facts: WiringFacts, exams: Every[WiringFacts]) -> Results:
    """The backward of a custom autograd Function is not the derivative of its forward.

    How it is detected: a difference quotient of the forward in float64 along the gradient, on a replay.

    Exceptions: gradient reversal, straight-through estimators, surrogate gradients, and a backward that draws random
    numbers and is right in the mean: on purpose, reported only with -v.

    Usual cause: the formula misses a factor or an inner derivative.

    Looks like: gradient.saved_tensor_modified, where the formula is right.

    Fix: `torch.autograd.gradcheck(F.apply, (x.double().requires_grad_(),))` in a test, or let autograd differentiate.
    """
    tested = _newest_test(run)
    if not facts.custom:
        return
    if tested is None:
        yield ExperimentRequest("custom_functions", exams[-1][0])
        return
    found = [_finding(run, tested.step, each) for each in tested.values.get("functions", ()) if _deviates(each)]
    yield from sorted(found, key=lambda each: each.found.severity != "critical")[:1]


def _newest_test(run: RunContext) -> Examined | None:
    """Returns the newest measurement of the custom Functions; None without one."""
    found = [each for each in run.records if isinstance(each, Examined) and each.experiment == "custom_functions"]
    return found[-1] if found else None


def _deviates(each: Facts) -> bool:
    if each.get("error") is None or each["error"] < 0.02 or each["unsteady"] > 0.2 * each["error"]:
        return False
    return not (each["constant"] or each.get("own_way") or (each["identity"] and each["factor"] < 0))


def _finding(run: RunContext, step: int, each: Facts) -> Finding:
    bias, noise = each.get("bias"), each.get("noise", 0.0)
    is_estimate = bias is not None and bias <= max(0.02, MIN_STANDARD_ERRORS * noise)
    is_meant = each["identity"] or is_estimate or each.get("moving", 1.0) < 0.02 or bool(each.get("straight"))
    error = each["error"] if bias is None else bias
    return run.finding(
        step,
        symptom=f"the backward of {each['function']} is off by {error:.0%} from a difference quotient"
        + (" in the mean" if bias is not None else ""),
        severity="info" if is_meant else "critical",
        sure=0.5 if is_meant else 0.97,
        where=Where(module=each["module"], op=each["function"]),
        evidence=[("relative error of its gradient", each["error"], 0.0), ("best factor", each["factor"], 1.0)],
    )
