from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.layers import ModulesFacts


@check(stage="forward", confidence=0.85, since_step=1)
def frozen_in_train_mode(run: RunContext, facts: ModulesFacts) -> Results:
    """A frozen module, such as a teacher or a backbone, runs in train mode.

    Why it matters: its dropout is on, so a teacher's targets are noisy; its BatchNorm updates running statistics.

    How it is detected: no optimizer holds the weights of a module, and nothing changes them. In two or more steps, it
    contains a dropout that is on and is called only without gradients, or a BatchNorm in train mode.

    Exceptions: a module that follows the weights (mean teacher, MoCo), where noise is intended.

    Usual cause: `model.train()` puts frozen parts into train mode, too; `requires_grad_(False)` freezes weights only.

    Fix: `model.teacher.eval()` after each `model.train()`, or override `train()` of the model.

    Sources: yxuansu/TaCL#11, huggingface/trl PR 5990.
    """
    if not (facts.noisy or facts.drifting):
        return
    names = facts.noisy or facts.drifting
    how = "with dropout on" if facts.noisy else "and its BatchNorm layers update their running statistics"
    yield run.finding(
        symptom=f"{listed(names)} is frozen and runs in train mode, {how}",
        sure=0.85 if facts.noisy else 0.7,
        where=Where(module=names[0]),
        evidence=[("frozen modules in train mode", list(names[:8]), [])],
    )
