from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="loss", confidence=0.85, since_step=1)
def terminal_states_bootstrapped(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The target of a value contains the value of the next state where the episode has ended.

    Why it matters: a state after the end has no value. Its random value spreads backwards to all states before it.

    How it is detected: the variables of the functions that compute the loss include flags that are true for some
    samples. In every examined step the target of these samples is not the reward alone.

    Exceptions: flags of episodes that are only cut off (`truncated`), if flags of their real end are there as well.

    Usual cause: `1 - done` is missing in the target.

    Fix: `target = reward + gamma * (1 - done) * next_value`; `done` is true for terminated episodes, not for truncated
    ones.

    Sources: navneet-nmk/pytorch-rl#2, seungeunrho/minimalRL#32, cyoon1729/deep-Q-networks PR 5.
    """
    sign = sign_of(exams, "terminal_bootstrapped")
    if sign is not None:
        yield run.finding(
            symptom=f"in {sign.steps} steps, targets of samples whose episode has ended contain a next value",
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps with such targets", sign.steps, 0)],
        )
