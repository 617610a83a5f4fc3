from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.calls import CallsFacts

MIN_UPDATES = 2


@check(stage="backward", confidence=0.7, points_at="backward", since_step=1)
def left_by_other_loss(run: RunContext, facts: CallsFacts) -> Results:
    """The update of one part, such as a discriminator, contains gradients that the loss of another part left in it.

    Why it matters: the generator's loss is low if the discriminator is wrong. A discriminator that steps with gradients
    of that loss is trained to be wrong.

    How it is detected: by the graphs of the first backward passes. A loss trains one part through the weights of a
    second part, and only the first part steps. The gradients that this leaves in the second part are not cleared. The
    second part's own loss, which does not reach the first part, adds to them, and the second part steps. This is seen
    in two updates.

    Exceptions: a part that is meant to learn from both losses, such as a head that also has a loss of its own. It looks
    the same and is reported; pass both losses to one `backward()` to make the intent clear.

    Usual cause: gradients of the discriminator (critic, judge) are left over from the generator's backward, because
    its `zero_grad()` is called too early: after its step, and not before its own backward.

    Looks like: optim.missing_zero_grad, where gradients are never cleared.

    Fix: clear the gradients right before the backward pass that they are for:

        discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        discriminator_optimizer.step()

    Sources: FoundationVision/OmniTokenizer#15, Lightning-AI/pytorch-lightning#557.
    """
    for optimizer, updates in facts.leftovers:
        if updates >= MIN_UPDATES:
            first = facts.leftover_in[0] if facts.leftover_in else ""
            yield run.finding(
                symptom=f"{updates} updates of optimizer {optimizer} used gradients that the loss of another optimizer "
                "had left in its weights",
                where=Where(module=first.rpartition(".")[0] or None),
                evidence=[("updates with gradients of another loss", updates, 0)],
            )
