from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import ModulesFacts


@check(
    names_cause=False,
    stage="forward",
    severity="critical",
    confidence=0.95,
    explains=("loss.never_changes", "loss.no_better_than_constant", "optim.weights_never_move"),
    since_step=1,
)
def output_same_for_all_samples(run: RunContext, facts: ModulesFacts) -> Results:
    """The output of the model is the same for every sample, though the inputs differ.

    Why it matters: nothing that the model learns can depend on the input.

    How it is detected: from the first rows of inputs and outputs of every module, in the training passes of a few steps
    until step 8 or later. The finding names the first module whose output does not vary although its input does.

    Usual cause: a normalization over a single value, which is constant (GroupNorm or InstanceNorm of 1x1 maps,
    LayerNorm over one feature); a softmax over one unit, which is always 1; dead units; a layer of zeros.

    Fix: normalize over more values (fewer groups, or before the pooling); use a sigmoid for one unit.

    Sources: pytorch/pytorch#19250, #45687.
    """
    if facts.constant is None or facts.last < 8:
        return
    kind, what = facts.constant_kind, "removes the differences between samples"
    if "Norm" in kind:
        what = "normalizes over a single value, so its output is constant"
    elif kind == "Softmax":
        what = "is a softmax over one unit, which is always 1"
    yield run.finding(
        facts.last,
        symptom=f"{'the output is the same for every sample' if facts.is_whole else 'some outputs are constant'}: "
        f"{in_words(facts.constant)} ({kind}) is the first whose output does not vary",
        cause=f"{kind} {what}",
        severity="critical" if facts.is_whole else "warning",
        where=Where(module=facts.constant),
        evidence=[("steps in which the outputs do not vary", facts.looks, 0)],
    )
