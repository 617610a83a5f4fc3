from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.modes import ModesFacts

MAX_FRACTION = 0.25
"""Fraction of steps. More frequent passes without gradients belong to the steps (targets, pseudo labels)."""


@check(stage="loop", confidence=0.9)
def in_train_mode(run: RunContext, facts: ModesFacts) -> Results:
    """An evaluation runs in train mode: `model.eval()` is missing.

    Why it matters: dropout is on and batch normalization learns from the validation set, so the validation loss is
    noisy and too high, and statistics of the validation set leak into the model.

    How it is detected: forward passes without gradients, between steps, on batches that are not used for training, run
    in train mode, from the first evaluation on or after evaluations in eval mode.

    Exceptions: frequent passes. If more than a quarter of the steps follow one, they count as part of the step.

    Usual cause: `model.eval()` is missing before all or some evaluations. `torch.no_grad()` does not change the mode.

    Looks like: evaluation.dropout_ignores_mode, where the modules are in eval mode.

    Fix: `model.eval()` before and `model.train()` after each evaluation, with `torch.no_grad()` in between.

    Sources: ethos-ares#20.
    """
    if not facts.depends:
        yield NotApplicable("no module behaves differently in eval mode")
        return
    bursts, in_eval = facts.evaluated_in_train, facts.evaluated_in_eval
    starts_late = bool(bursts and in_eval and bursts[0] > in_eval[0])
    is_unusual = bursts and (starts_late or not in_eval)
    if facts.steps >= 5 and is_unusual and facts.num_evaluated_in_train <= MAX_FRACTION * facts.steps:
        norms = f"; it updates the running statistics of {facts.norms} normalizations" if facts.norms else ""
        yield run.finding(
            symptom=f"an evaluation after step {bursts[0]} ran in train mode{norms}",
            sure=0.7 if in_eval else None,
            since_step=bursts[0],
            where=Where(source=facts.source),
            evidence=[
                ("evaluations in train mode, after steps", list(bursts), []),
                ("evaluations in eval mode", len(in_eval)),
            ],
        )
