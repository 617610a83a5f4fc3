from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, Where, check
from trainwright.doctor.facts.gradient import CustomFunctionsFacts, FunctionTest
from trainwright.doctor.facts.wiring import WiringFacts


@check(stage="backward", severity="critical", confidence=0.97)
def wrong_backward(run: RunContext, facts: WiringFacts, exams: Every[WiringFacts]) -> Results:
    """The backward of a custom autograd Function is not the derivative of its forward.

    How it is detected: a difference quotient of the forward in float64 along the gradient, on a replay.

    Exceptions: gradient reversal, straight-through estimators, surrogate gradients, and a backward that draws random
    numbers and is correct in expectation. These are intended, so they are reported only with -v.

    Usual cause: the formula misses a factor or an inner derivative.

    Looks like: gradient.saved_tensor_modified, where the formula is right.

    Fix: `torch.autograd.gradcheck(F.apply, (x.double().requires_grad_(),))` in a test, or let autograd differentiate.
    """
    if facts.custom and not run.was_tried(CustomFunctionsFacts):
        yield ExperimentRequest(CustomFunctionsFacts.experiment, exams[-1][0])
    for step, tested in run.every(CustomFunctionsFacts)[-1:] if facts.custom else ():
        for each in sorted(filter(_deviates, tested.functions), key=_is_meant):
            is_meant = _is_meant(each)
            yield run.finding(
                step,
                symptom=f"the backward of {each.function} is off by {each.error:.0%} from a difference quotient",
                severity="info" if is_meant else "critical",
                sure=0.5 if is_meant else 0.97,
                where=Where(module=each.module, op=each.function),
                evidence=[("relative error of its gradient", each.error, 0.0), ("best factor", each.factor, 1.0)],
            )


def _deviates(each: FunctionTest) -> bool:
    if each.error is None or each.error < 0.02 or each.unsteady > 0.2 * each.error:
        return False
    return not (each.constant or each.own_way or (each.identity and each.factor < 0))


def _is_meant(each: FunctionTest) -> bool:
    return each.identity or each.straight or each.moving < 0.02
