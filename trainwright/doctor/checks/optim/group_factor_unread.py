from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts

MIN_STEPS = 4


@check(points_at="optimizer", stage="update", confidence=0.9, since_step=1)
def group_factor_unread(run: RunContext, facts: CallsFacts) -> Results:
    """Parameter groups have a learning-rate factor that no code reads, so all have the same learning rate.

    Why it matters: layer-wise decay, or a smaller rate for pretrained layers, has no effect.

    How it is detected: a number in the groups is named after the learning rate (`lr_scale`, `lr_mult`,
    `learning_rate`), the source of the optimizer does not have this name, and its values differ between groups. The
    learning rates of these groups are equal after 4 steps.

    Usual cause: the loop or scheduler that multiplies `lr` by this factor is missing. PyTorch's optimizers accept any
    key in a group, and read only their own.

    Fix: multiply before a scheduler is created: `group["lr"] = lr * group.pop("lr_scale")` for each group.

    Sources: facebookresearch/mae#216, huggingface/pytorch-image-models PR 2532.
    """
    for optimizer in facts.optimizers if run.last_step >= MIN_STEPS else ():
        groups = optimizer.groups
        for name in {name: None for group in groups for name in group.unread}:
            values = {group.unread.get(name, 1.0) for group in groups}
            if len(values) > 1 and len({group.lr for group in groups}) == 1 and groups[0].lr:
                yield run.finding(
                    symptom=f"{name} differs between the groups ({min(values):.3g} to {max(values):.3g}), and all have "
                    f"a learning rate of {groups[0].lr:.3g}",
                    cause=f"no code reads {name}: the loop or scheduler that multiplies the learning rate by it is "
                    "missing",
                    evidence=[("different learning rates of the groups", 1, len(values))],
                )
