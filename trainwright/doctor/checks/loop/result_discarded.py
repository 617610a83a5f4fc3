from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.wiring import StatementsFacts


@check(stage="loop", confidence=0.95, since_step=1)
def result_discarded(run: RunContext, facts: StatementsFacts) -> Results:
    """A statement has no effect: the result of a function is discarded, or a method is named and not called.

    Why it matters: a mask is not applied, an augmentation does not happen, or a mode does not change, without an error.

    How it is detected: in the source of the loop, the models, the data sets and their functions. A statement calls a
    tensor method that also exists with an underscore (`masked_fill` and `masked_fill_`), a layer without state, or a
    function of the user that returns a value and changes nothing else. Or it names `eval`, `train`, `step`, `zero_grad`
    or `backward` without parentheses. A statement in a condition counts if it was executed in steps 2 to 6. This is
    traced with `sys.settrace` unless a debugger or coverage is active.

    Usual cause: `scores.masked_fill(mask, float("-inf"))` without an assignment, or `model.eval` for `model.eval()`.

    Fix: assign the result, `x = x.masked_fill(mask, 0)`, or use the function with an underscore,
    `x.masked_fill_(mask, 0)`. Add missing parentheses: `model.eval()`.

    Sources: facebookresearch/ParlAI PR 3068, lucidrains/flamingo-pytorch#10, opendilab/DI-engine#333, xmed-lab/DHC#8.
    """
    for each in facts.idle:
        is_call = each.kind == "discarded"
        yield run.finding(
            symptom=f"{each.call}{'(...)' if is_call else ''} in {each.function} has no effect",
            cause=f"the result of {each.call} is discarded: it is not assigned, so the transformed value is not used"
            if is_call
            else f"{each.call} is named and not called: the parentheses are missing",
            where=Where(source=f"{each.file}:{each.line}"),
            evidence=[("statements without an effect", len(facts.idle), 0)],
        )
