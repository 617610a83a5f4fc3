from trainwright.doctor import Every, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts
from trainwright.doctor.facts.weights import UpdateFacts

MAX_UPDATE_RATIO = 2e-6  # Norm of an update / norm of the weights. Useful updates have 1e-4 to 1e-2.
MIN_STEPS = 8
MAX_SMALL_RATIO, MIN_STEPS_OF_SMALL = 2e-5, 64
"""The same where a loss that has not moved in this many steps is evidence, too: 100 such updates make 0.2 %."""
MAX_PROGRESS = 0.02  # A smaller relative change of the loss is no progress
MIN_RELATIVE_GRADIENT = 1e-3
"""Relative change of the loss per relative change of the weights. Normal gradients exceed it."""


@check(stage="update", severity="critical", confidence=0.9, since_step=1)
def lr_too_low(run: RunContext, exams: Every[UpdateFacts]) -> Results:
    """The learning rate is so low that updates change almost nothing.

    How it is detected: every examined update is smaller than 2e-6 of the weights, gradients have a normal size, and
    after at least 8 steps the loss has moved by no more than 2 % or half of its noise. After 64 steps, updates below
    2e-5 are small.

    Exceptions: a warm-up, a learning rate that a schedule has lowered, and gradients that clipping has made small.

    Usual cause: a wrong exponent, or a confusion with eps: 1e-8 is the usual eps, not a learning rate.

    Looks like: gradient.graph_cut and gradient.vanishing, where gradients are missing; gradient.clip_always_active.

    Fix: multiply the learning rate by 10 until the loss falls. Usual values are 1e-4 to 1e-3 for AdamW, and 0.01 to 0.1
    for SGD with momentum.

    Sources: AutoTrainer (Zhang et al., ICSE 2021).
    """
    every = [facts for _, facts in exams if facts.optimizers == 1 and max(facts.lr, default=0.0) > 0.0]
    losses = [each.loss for each in run.steps]
    if len(losses) < MIN_STEPS or not every:
        return
    facts = every[-1]
    is_clipped = (facts.norm_at_clip or 0.0) > 100 * facts.grad_norm
    pull = facts.grad_norm * facts.weight_norm / max(abs(facts.loss), 1e-12)
    most = MAX_UPDATE_RATIO if len(losses) < MIN_STEPS_OF_SMALL else MAX_SMALL_RATIO
    if any(not each.ratio < most for each in every) or is_clipped or pull < MIN_RELATIVE_GRADIENT or _rises(run):
        return
    first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
    recent = losses[len(losses) // 2 :]  # a run that has converged is not reported: its loss fell before
    noise = max(recent) - min(recent)
    if abs(last - first) <= max(MAX_PROGRESS * abs(first), 0.5 * noise):
        yield run.finding(
            symptom=f"an update changes the weights by {facts.ratio:.1g} of their size, and the loss stays at "
            f"{last:.4g}",
            cause=f"the learning rate of {max(facts.lr):g} is too low; gradients are normal",
            severity="critical" if facts.ratio < MAX_UPDATE_RATIO else "warning",
            evidence=[("update / weights", facts.ratio, "1e-4 .. 1e-2"), ("norm of gradients", facts.grad_norm)],
            trial=RemedyTrial("other_lr", {"factor": 1e4 if facts.ratio < MAX_UPDATE_RATIO else 1e2}),
        )


def _rises(run: RunContext) -> bool:
    """Returns True if the learning rate is rising, or the base rate of its schedule is over 3 times as high."""
    calls = run.latest(CallsFacts)
    groups = [group for each in calls.optimizers for group in each.groups] if calls is not None else []
    is_low = any((group.initial_lr or 0.0) > 3 * (group.lr or 0.0) for group in groups)
    return is_low or run.steps[-1].lr > 1.0001 * run.steps[0].lr
