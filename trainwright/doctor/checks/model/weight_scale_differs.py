import math

from trainwright.doctor import NotApplicable, Passed, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import Neighbours, ScalesFacts

MIN_SCALE_RATIO = 10.0
"""Ratio to the scale of the nearest neighbour."""
MAX_ZERO_SCALE = 0.01
"""Scale times the square root of the fan-in. Smaller weights were initialized as zeros, or nearly."""


@check(
    stage="forward",
    severity="warning",
    confidence=0.8,
    needs=ScalesFacts,
    explains=("model.init_too_large", "gradient.exploding", "gradient.vanishing"),
)
def weight_scale_differs(run: RunContext) -> Results:
    """A weight matrix is larger or smaller than the same matrix of the neighbouring layers by orders of magnitude.

    Why it matters: a layer whose weights are far too large drowns the others or saturates what follows; one whose
    weights are far too small passes nothing on, and its inputs get no gradient.

    How it is detected: the root mean square of each matrix before the first step, beside those of the same shape and
    class whose names differ in one number, such as `blocks.2.proj.weight` and `blocks.3.proj.weight`. At least four are
    compared. At most a quarter of them is ten times larger or smaller than the nearest of the rest, and farther from it
    than the rest are from each other, so a scale that changes from layer to layer is none.

    Exceptions: zeros on purpose are left out, and small weights where the run began before, which may have been zeros.
    No finding is made where the rest is nearly zero, as in a LoRA factor that has only begun to learn, or for a last
    layer that is initialised small on purpose.

    Usual cause: one layer was initialised by another rule (`normal_` without `std=` is 1.0), was overwritten when a
    checkpoint was loaded, or was scaled twice.

    Looks like: model.init_too_large, where all weights are; model.init_symmetric, where they are constant.

    Fix: initialise all layers of a kind by one rule, once, and load weights after that.

        model.apply(init_weights)
        model.load_state_dict(state)
    """
    facts = run.measured(ScalesFacts)
    if not facts.groups:
        yield NotApplicable("no four weight matrices of one shape stand side by side")
        return
    factors: dict[str, float] = {}
    for group in facts.unequal:
        for name, factor in _outliers(group, is_start=facts.first == 1).items():
            factors[name] = max(factor, factors.get(name, factor), key=lambda each: abs(math.log(each)))
    if not factors:
        yield Passed(f"{facts.groups} groups of weight matrices")
        return
    names = sorted(factors, key=lambda name: abs(math.log(factors[name])), reverse=True)
    yield run.finding(
        facts.first,
        symptom=f"{names[0]} is {factors[names[0]]:.3g} times as large as the same weights of the neighbouring layers"
        + (f"; too far are also {listed(names[1:])}" if names[1:] else ""),
        since_step=facts.first,
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[(f"size of {name} over that of its neighbours", factors[name], 1.0) for name in names[:3]],
    )


def _outliers(group: Neighbours, *, is_start: bool) -> dict[str, float]:
    """Returns the few outliers, each with the ratio of its scale to the median of the others.

    After the start of a run, small weights may have been initialized as zeros.
    """
    by_size = sorted(zip(group.sizes, group.names))
    found: dict[str, float] = {}
    for few in range(1, len(by_size) // 4 + 1):
        for far, rest in ((by_size[:few], by_size[few:]), (by_size[-few:], by_size[:-few])):
            is_small = far[0][0] < rest[0][0]
            gap = rest[0][0] / far[-1][0] if is_small else far[0][0] / rest[-1][0]
            usual = rest[len(rest) // 2][0]
            if (
                gap < MIN_SCALE_RATIO
                or gap <= rest[-1][0] / rest[0][0]
                or usual * math.sqrt(group.fan_in) < MAX_ZERO_SCALE
            ):
                continue
            is_last_layer = group.is_row and few == 1 and far[0][1] == group.names[-1]
            if not is_small or (is_start and not is_last_layer):
                found |= {name: size / usual for size, name in far}
    return found
