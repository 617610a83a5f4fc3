from trainwright.doctor import Results, RunContext, check, listed
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, differences, differing, traits_of


@check(stage="loop", confidence=0.8, names_cause=False)
def program_differs(run: RunContext, reference: ReferenceFacts) -> Results:
    """The steps of the program differ from those of the reference run.

    How it is detected: the usual order of the calls of a step, the loss functions, autocast, modules in eval mode,
    evaluations in train mode, and the parameters of the optimizers, from the 8th step on.

    Usual cause: a call, a mode or a part of the model that was changed or lost between the two programs.

    Fix: examine the difference. If it is intended, use another run as reference.
    """
    if (here := traits_of(run)).steps < MIN_STEPS:
        return
    there = reference.traits
    evidence = differing(
        [
            ("calls of a step", here.calls, there.calls),
            ("loss functions", list(here.loss_calls), list(there.loss_calls)),
            ("updates under autocast", _mostly(here.autocast), _mostly(there.autocast)),
            ("parameters of the optimizers", list(here.parameters), list(there.parameters)),
            ("evaluations in train mode", _any(here.evaluated_in_train), _any(there.evaluated_in_train)),
        ]
    )
    if here.eval_modules is not None and there.eval_modules is not None and here.eval_modules != there.eval_modules:
        evidence.append(("trained modules in eval mode", _named(here.eval_modules), _named(there.eval_modules)))
    if evidence:
        yield run.finding(symptom=differences(evidence), evidence=evidence)


def _mostly(fraction: float | None) -> str | None:
    return None if fraction is None else "yes" if fraction > 0.5 else "no"


def _any(number: int | None) -> str | None:
    return None if number is None else "yes" if number else "no"


def _named(modules: tuple[str, ...]) -> str:
    return "the model" if "" in modules else listed(modules) or "none"
