from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.weights import WeightsFacts

MIN_UPDATES_FROM_START = 16  # Updates at a learning rate of 0 from the start. A warm-up from 0 has fewer.
MIN_UPDATES_LATER = 8  # Updates after the learning rate fell to 0. Between two schedules there are fewer.
MAX_TAIL_FRACTION = 0.2  # Fraction of all updates that a tail (last updates at a learning rate of 0) may have
MAX_UPDATES_WITHOUT_DECAY = 16  # Updates that a tail may have if no decay had lowered the learning rate
UNDECAYED_FRACTION = 0.5  # Above this fraction of the highest learning rate, no decay has lowered it
DECAYED_FRACTION = 0.01  # Below this fraction of the highest learning rate, a decay has reached its end


@check(stage="update", confidence=0.85)
def learning_rate_zero(run: RunContext, facts: WeightsFacts) -> Results:
    """The learning rate is 0, so updates change nothing.

    How it is detected: 16 updates at a learning rate of 0 from the first step on. Or the learning rate falls to 0 from
    more than 1 % of its highest value, and stays there for at least 8 updates and a fifth of the run (16 updates are
    enough if it was at least half of its highest value before).

    Exceptions: a warm-up that begins at 0, and a few last updates at a learning rate of 0.

    Usual cause: a schedule has ended, for example after a resume; or a wrong counter, an integer division or a missing
    parameter group in the schedule sets the learning rate to 0.

    Looks like: optim.weights_never_move, where the rate is above 0.

    Fix: print `scheduler.get_last_lr()` in each step. Make the schedule as long as the loop, or end the loop where the
    schedule ends.

    Sources: mosaicml/composer#1384, mlfoundations/open_clip#413.
    """
    if not facts.at_0_since:
        return
    count = facts.steps - facts.at_0_since + 1
    is_cut = facts.rate_before_0 >= UNDECAYED_FRACTION * facts.highest_rate
    too_many = max(MIN_UPDATES_LATER, MAX_TAIL_FRACTION * facts.steps)  # more than a tail
    too_many = min(too_many, MAX_UPDATES_WITHOUT_DECAY) if is_cut else too_many
    if count >= MIN_UPDATES_FROM_START and facts.at_0_since == 1:
        symptom = f"the learning rate was 0 in all {count} updates"
    elif count >= too_many and facts.rate_before_0 > DECAYED_FRACTION * facts.highest_rate:
        fell = f"the learning rate fell from {facts.rate_before_0:.3g} to 0 in step {facts.at_0_since}"
        symptom = f"{fell}, and {count} updates changed nothing"
    else:
        return
    yield run.finding(
        symptom=symptom,
        since_step=facts.at_0_since,
        evidence=[("learning rate", 0.0, facts.rate_before_0 or "above 0")],
    )
