from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.calls import CallsFacts, has_closure, kinds
from trainwright.doctor.facts.weights import WeightsFacts
from trainwright.runs.records import Watched

MIN_UPDATES = 4  # Updates with gradients of another optimizer's turn


@check(
    points_at="backward",
    stage="backward",
    severity="critical",
    confidence=0.95,
    explains=(
        "optim.lr_too_high",
        "gradient.exploding",
        "gradient.clip_always_active",
    ),
)
def missing_zero_grad(run: RunContext, latest: CallsFacts, exams: Every[CallsFacts]) -> Results:
    """Gradients are never cleared, so each update also contains the gradients of all steps before it.

    Why it matters: the sum acts like momentum without decay. Gradients grow with the number of steps, and the loss
    diverges.

    How it is detected: at two examinations, gradients exist when a step begins, and no `zero_grad()` comes before the
    update uses them. Or, in four updates of one of several optimizers, its parameters still hold gradients of another
    loss, such as the discriminator's from the loss of the generator. Or gradients exist when the first step begins, its
    update uses them, and later steps begin without gradients (a warning; reported only with -v if the weights were
    trained before).

    Exceptions: declared accumulation (`tw.watch(..., accumulation=8)`), and gradients that the loop writes itself
    before each update.

    Usual cause: `optimizer.zero_grad()` is missing, or is called on another optimizer, or too early: a discriminator is
    cleared after its step, and then the backward pass of the generator leaves gradients in it.

    Looks like: gradient.accumulation_window_wrong, where only gradients from the end of an epoch are left.

    Fix: call `optimizer.zero_grad()` once for each update, before the first `backward()`. With several optimizers,
    clear each one right before its own backward pass.

    Sources: FoundationVision/OmniTokenizer#15, Lightning-AI/pytorch-lightning#557.
    """
    carried: dict[int, list[tuple[int, float]]] = {}
    by_step = {each.step: each for each in run.steps}
    before_first: dict[int, float] = {}
    for step, facts in exams:
        record = by_step.get(step)
        for number, norm in enumerate(facts.carried):
            if (
                record
                and not has_closure(record)
                and norm > 1e-12 * max(record.grad_norm, 1e-30)
                and _keeps(record, number)
            ):
                if record is run.steps[0]:
                    before_first[number] = norm
                else:
                    carried.setdefault(number, []).append((step, norm))
    declared = (latest and latest.accumulation) or 1
    for number, seen in carried.items():
        if len(seen) < 2 or (declared > 1 and any(kinds(each, "zero_grad") for each in run.steps)):
            continue
        step, norm = seen[-1]
        of_one = f" of optimizer {number}" if latest and len(latest.optimizers) > 1 else ""
        yield run.finding(
            step,
            symptom=f"this update{of_one} also contains the gradients of earlier steps",
            since_step=seen[0][0],
            where=Where(module=latest.optimizers[number].module or None) if of_one else Where(),
            evidence=[
                ("norm of gradients left from before the step", norm, 0.0),
                ("norm at the update", by_step[step].grad_norm),
            ],
        )
    if before_first and not carried and declared == 1 and len(exams) > 1 and latest and not latest.moved:
        norm, weights = next(iter(before_first.values())), run.latest(WeightsFacts)
        yield run.finding(
            run.steps[0].step,
            symptom="the first update also contains gradients from before the first step",
            cause="a backward pass before the loop, such as a test or a debug pass, left its gradients",
            remedy="call `optimizer.zero_grad()` before the loop, or before each `backward()`",
            severity="info" if weights is not None and weights.worked_on else "warning",
            sure=0.9,
            evidence=[
                ("norm of gradients left from before the step", norm, 0.0),
                ("norm at the update", run.steps[0].grad_norm),
            ],
        )
    for number, count in enumerate(latest.with_left if latest else ()):
        if count >= MIN_UPDATES and len(carried.get(number, ())) < 2:
            yield run.finding(
                symptom=f"optimizer {number} steps with gradients that the backward pass for another one left in it",
                cause="its `zero_grad()` comes after its step, or before the backward pass of another optimizer",
                severity="warning",
                where=Where(module=latest.optimizers[number].module or None),
                evidence=[("updates with such gradients, of those examined", count, 0)],
            )


def _keeps(step: Watched, number: int) -> bool:
    """Returns True if the optimizer steps with gradients that neither zero_grad() nor a write by hand has cleared."""
    for kind, value in step.events:
        if kind == "step" and value["optimizer"] == number:
            return number not in step.values.get("made_anew", ())
        if kind == "zero_grad" and value in (number, -1):
            return False
    return False
