from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="loss", confidence=0.85)
def ends_ignored(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The target of a Q-value adds the value of the next state even where the episode has ended: `1 - done` is missing.

    Why it matters: the state after the end belongs to the next episode, or to none. The values of terminal states, and
    of all before them, are wrong.

    How it is detected: the target equals `reward + factor * next_value` for all samples, also those whose flag is 1.
    Reward, next value and a tensor of flags 0 and 1 are variables of the function that computes the loss.

    Exceptions: flags of a time limit, after which the episode would continue.

    Usual cause: `done` is stored and sampled, but not used in the target.

    Fix: `target = reward + gamma * next_value * (1 - done)`.

    Sources: navneet-nmk/pytorch-rl#2, seungeunrho/minimalRL#32, cyoon1729/deep-Q-networks#6.
    """
    sign = sign_of(exams, "ends_ignored")
    if sign is not None:
        yield run.finding(
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps whose target ignores the flags", sign.steps, 0)],
        )
