from collections.abc import Sequence

from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, Where, check
from trainwright.doctor.facts.wiring import ActivatedFacts, WiringFacts

MAX_LOSS_RATIO = 0.7  # Remaining loss on one batch with activations / without them
MIN_REMAINING_LOSS = 0.02  # Below this loss nothing is left to gain


@check(stage="forward", confidence=0.9)
def missing_nonlinearity(run: RunContext, facts: WiringFacts, exams: Every[WiringFacts]) -> Results:
    """Two linear layers follow each other with nothing between them, so together they are one.

    How it is detected: a replay follows the output of each linear layer to its uses. The finding is a warning if
    updates on one batch reach at most 0.7 times the loss once an activation is inserted; otherwise it is reported only
    with -v.

    Exceptions: a narrow middle (LoRA, bottleneck), depthwise layers, factors of a kernel.

    Usual cause: an activation is built in `__init__` and never called.

    Fix: `nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))`.

    Sources: NeuraLint (Nikanjam et al.).
    """
    chains = [each for each in facts.chains if _adds_nothing(each.first_shape, each.second_shape)]
    if not chains:
        return
    step, tried = exams[-1][0], run.latest(ActivatedFacts)
    if tried is None and not run.was_tried(ActivatedFacts):
        yield ExperimentRequest(ActivatedFacts.experiment, step)
        return
    after, before = (tried.activated, tried.unchanged) if tried is not None else (None, None)
    gains = after is not None and before is not None and after < MAX_LOSS_RATIO * before and before > MIN_REMAINING_LOSS
    yield run.finding(
        step,
        symptom=f"the input of {chains[0].second} is the output of {chains[0].first}, unchanged",
        severity="warning" if gains else "info",
        where=Where(module=chains[0].first.rpartition(".")[0]),
        evidence=[
            ("pairs of linear layers in a row", len(chains), 0),
            ("loss after updates on one batch, with activations", after, before),
        ],
    )


def _adds_nothing(first: Sequence[int], second: Sequence[int]) -> bool:
    """Returns True if two linear layers are equivalent to one. Shapes are ``[outputs, inputs, *kernel]``."""
    wide = first[0] >= min(first[1], second[0])
    pointwise = all(size == 1 for size in first[2:]) and all(size == 1 for size in second[2:])
    square = all(len(set(each[2:])) <= 1 for each in (first, second))
    return wide and (pointwise or (len(first) > 2 and len(second) > 2 and square and first[2:] == second[2:]))
