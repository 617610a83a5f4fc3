from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import WeightsFacts, is_intentionally_untrained

MIN_UPDATES = 4  # Updates after which some weight has moved
MIN_UPDATES_OF_ZEROS = 2  # Updates after which one of the matrices that begin as zeros has moved
MIN_UPDATES_FOR_ALL = 12  # Updates after which every matrix has moved
MIN_RECENT_UPDATES = 40  # Recent updates that show that all weights have stopped


@check(names_cause=False, stage="update", confidence=0.7)
def weights_never_move(run: RunContext, facts: WeightsFacts) -> Results:
    """Weights do not learn, though the optimizer updates them at a learning rate above 0.

    How it is detected: by checksums of all weights at each examination. No weight has changed in the first 4 updates
    (12 if no weight has a gradient), or in the last 40. For single weight matrices: the gradient was exactly 0 at every
    examination, over at least 12 updates; or two or more matrices are 0 and never had a gradient, such as the second
    factors of LoRA adapters (after 2 updates if all matrices that begin as 0 are like this, else 12).

    Exceptions: weights that were trained before, or are outside of the trained path, are reported only with -v.

    Usual cause: the optimizer holds other tensors than the model, the graph is cut (detach, .data, no_grad), or an
    operation between the weight and the loss is flat: a dead unit, a factor of 0, a clamp, a softmax over one value.

    Fix: compare a weight and its gradient before and after `optimizer.step()`; make the optimizer from
    `model.parameters()` after the model is complete.

    Sources: trl#2671, transformers#42489.
    """
    if not facts.tensors:
        yield NotApplicable("no trainable tensor belongs to a watched optimizer with a learning rate above 0")
        return
    since = facts.updates_since if facts.moved else facts.updates
    enough = MIN_RECENT_UPDATES if facts.moved else MIN_UPDATES if facts.has_gradient else MIN_UPDATES_FOR_ALL
    if facts.at_0_since == 0 and since >= enough:
        yield run.finding(
            symptom=f"no weight has changed in {since} updates"
            + ("" if facts.has_gradient else ": no gradient reaches any"),
            severity="critical" if facts.has_gradient and not facts.moved else "warning",
            sure=0.9,
            since_step=facts.stands_since + 1,
            where=Where(source=None if facts.has_gradient else run.line_of("op:cut", run.last_step)),
            evidence=[("tensors that moved", 0, facts.tensors), ("updates at a rate above 0", since)],
        )
        return
    without = [name for name in facts.zero_weights if name not in facts.zero_gradients]
    is_all = len(without) == facts.zeros  # also the adapters that are in use
    if facts.updates < (MIN_UPDATES_OF_ZEROS if is_all and without else MIN_UPDATES_FOR_ALL) or not facts.moved:
        return
    if facts.zero_gradients and facts.updates >= MIN_UPDATES_FOR_ALL:
        names = facts.zero_gradients
        yield run.finding(
            symptom=f"the gradient of {listed(names)} was exactly 0 at every examination of {facts.updates} updates",
            severity="info" if is_intentionally_untrained(run, names) else "warning",
            stage="backward",
            where=Where(module=names[0].rpartition(".")[0]),
            since_step=1,
            evidence=[("weight matrices without a gradient other than 0", len(names), 0)],
        )
    elif len(without) > 1:
        yield run.finding(
            symptom=f"{listed(without)} are 0 and had no gradient in {facts.updates} updates, while others learn",
            cause="no gradient reaches them: the graph is cut behind them, by detach, no_grad, or reentrant activation "
            "checkpointing of inputs that need no gradient",
            stage="backward",
            sure=0.85,
            where=Where(module=without[0].rpartition(".")[0]),
            since_step=1,
            evidence=[("matrices that are 0 and have no gradient", len(without), 0)],
        )
