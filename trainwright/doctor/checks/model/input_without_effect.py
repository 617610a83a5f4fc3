from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.layers import InputsFacts


@check(stage="forward", confidence=0.85, since_step=1)
def input_without_effect(run: RunContext, exams: Every[InputsFacts]) -> Results:
    """The output of the model does not depend on one of its arguments.

    Why it matters: the information of this input (noise level, class, mask, condition) is never used.

    How it is detected: in replays of the forward pass with two seeds, the rows of the argument are exchanged. No bit of
    the outputs changes, although other arguments change them. Weights that are all 0 are first filled with small
    numbers.

    Exceptions: arguments whose rows are equal, such as a mask of ones; arguments that are used in some steps only.
    Reported only with -v: parts of a batch that the model gets as a whole, such as ids and labels in a dict.

    Usual cause: the embedding of the input is computed and not added; the argument is overwritten or not passed on.

    Fix: use it where the layers are called, or remove it from the signature.

    Sources: hustvl/4DGaussians#20, samb-t/unleashing-transformers#10.
    """
    step, newest = exams[-1]
    unused = set(newest.without_effect).intersection(*(each.without_effect for _, each in exams if each.arguments > 1))
    if unused and len(unused) < newest.arguments:
        names = ", ".join(name for name in newest.without_effect if name in unused)
        yield run.finding(
            step,
            symptom=f"the outputs of the model do not depend on its argument {names}",
            severity="info" if all("[" in name for name in unused) else None,
            evidence=[("arguments without effect", names, "none")],
        )
