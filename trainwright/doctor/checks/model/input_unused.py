from trainwright.doctor import ExperimentRequest, NotApplicable, Passed, Results, RunContext, check
from trainwright.doctor.facts.function import FunctionFacts, InputsFacts


@check(names_cause=False, stage="forward", confidence=0.8, needs=FunctionFacts)
def input_unused(run: RunContext) -> Results:
    """An input that varies from sample to sample has no effect on any output or on the loss.

    How it is detected: a replay gives all samples the input of the first one, and neither outputs nor loss change to
    the last bit; twice, 8 steps or more apart.

    Exceptions: an input that is not the first one is reported only with -v.

    Usual cause: it is sliced away, overwritten, rounded to one value, multiplied by zero, or not used.

    Looks like: model.output_same_for_all_samples, model.dead_relu.

    Fix: follow it through the forward pass, or leave it out.
    """
    every = run.every(InputsFacts)
    may_recover = bool(every) and bool(every[-1][1].unused) and len(every) < 2
    if not every or (may_recover and run.last_step >= every[0][0] + 8):
        yield ExperimentRequest(InputsFacts.experiment)
        return
    facts = every[-1][1]
    if not facts.tensors:
        yield NotApplicable("no input varies from sample to sample")
    elif facts.unused and not may_recover:
        yield run.finding(
            run.last_step,
            symptom=f"{'the input' if facts.tensors == 1 else f'input {facts.unused[0]}'} has no effect on any output",
            severity="warning" if 0 in facts.unused else "info",
            since_step=every[0][0],
            evidence=[("change of the outputs", 0.0, "> 0")],
        )
    else:
        yield Passed(f"{facts.tensors} inputs")
