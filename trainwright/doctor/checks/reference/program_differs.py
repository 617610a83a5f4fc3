from trainwright.doctor import Results, RunContext, check, listed
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, differ, differences, differing, traits_of

MIN_SCALE = 0.5  # Relative difference between the standard deviations of an input. Batches differ by less.


@check(stage="loop", confidence=0.8, names_cause=False)
def program_differs(run: RunContext, reference: ReferenceFacts) -> Results:
    """The steps or the batches of the program differ from those of the reference run, or fewer weights change.

    How it is detected: from the 8th step on, the following are compared: the usual order of the calls of a step, the
    loss functions, autocast, modules in eval mode, evaluations in train mode and the parameters of the optimizers; the
    rows of a step, the shapes and standard deviation of the inputs, the largest target and, in runs of equal length,
    the fraction of rows that are still new at the end; the number of weights that have changed, if both runs have
    equally many trainable tensors.

    Usual cause: a call, a mode or a part of the model that was changed or removed between the two programs; another
    data set, batch size or preprocessing; a part of the model that is cut off from the loss, frozen, or missing in the
    optimizer.

    Looks like: gradient.graph_cut, optim.weights_never_move, which name the weights that do not change.

    Fix: examine the difference. If it is intended, use another run as reference.
    """
    here, there = traits_of(run), reference.traits
    if here.steps < MIN_STEPS:
        return
    evidence = differing(
        [
            ("calls of a step", here.calls, there.calls),
            ("loss functions", list(here.loss_calls), list(there.loss_calls)),
            ("updates under autocast", _mostly(here.autocast), _mostly(there.autocast)),
            ("parameters of the optimizers", list(here.parameters), list(there.parameters)),
            ("evaluations in train mode", _any(here.evaluated_in_train), _any(there.evaluated_in_train)),
            ("rows of a step", here.rows, there.rows),
            ("shapes of the inputs", list(here.shapes), list(there.shapes)),
        ]
    )
    if here.eval_modules is not None and there.eval_modules is not None and here.eval_modules != there.eval_modules:
        evidence.append(("trained modules in eval mode", _named(here.eval_modules), _named(there.eval_modules)))
    if differ(here.scale, there.scale, MIN_SCALE):
        evidence.append(("largest standard deviation of an input", here.scale, there.scale))
    if differ(here.new_rows, there.new_rows) and here.steps == there.steps:
        evidence.append(("fraction of rows that are new", here.new_rows, there.new_rows))
    ours, theirs = here.largest_target, there.largest_target
    if ours is not None and theirs is not None and not theirs / 2 <= ours <= theirs:
        evidence.append(("largest target", ours, theirs))
    if here.tensors == there.tensors and (here.moved or 0) < (there.moved or 0):
        evidence.append(("weights that have changed", here.moved, there.moved))
    if evidence:
        yield run.finding(symptom=differences(evidence), evidence=evidence)


def _mostly(fraction: float | None) -> str | None:
    return None if fraction is None else "yes" if fraction > 0.5 else "no"


def _any(number: int | None) -> str | None:
    return None if number is None else "yes" if number else "no"


def _named(modules: tuple[str, ...]) -> str:
    return "the model" if "" in modules else listed(modules) or "none"
