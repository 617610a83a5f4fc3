from trainwright.doctor import Every, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import RowsFacts
from trainwright.doctor.facts.loss import LossFacts, sign_of

MIN_STEPS = 6
MIN_STEPS_WITHOUT_DRAWS = 2
MAX_NEW_ROWS = 0.5


@check(stage="loss", confidence=0.85, since_step=1)
def ratio_always_one(run: RunContext, exams: Every[LossFacts], rows: RowsFacts) -> Results:
    """The ratio of the new and the old policy is 1 in every update, so the clipping of PPO has no effect.

    Why it matters: the policy is updated several times on one rollout, and nothing limits how far it moves.

    How it is detected: `exp(new - old)` of log-probabilities is exactly 1 for all samples in each examined step,
    although the steps read rows again, and in at least two steps nothing was drawn since the step before.

    Exceptions: one update for each rollout, where actions are drawn before each update and the ratio is always 1;
    `exp(new - new.detach())`, which is 1 on purpose.

    Usual cause: the old log-probabilities are computed in the same step by the policy that is being updated, instead of
    being stored when the actions were sampled.

    Fix: compute `old_log_prob = policy(states).log_prob(actions)` once, under `torch.no_grad()`, before the epochs over
    the rollout.

    Sources: tensorforce/tensorforce#312, higgsfield-ai/higgsfield#20.
    """
    sign = sign_of(exams, "ratio_is_one")
    if sign is None or sign.steps < MIN_STEPS:
        return
    if rows.new_lately > MAX_NEW_ROWS or sign.value < MIN_STEPS_WITHOUT_DRAWS:
        yield NotApplicable("each rollout is used for one update")
        return
    yield run.finding(
        symptom=f"the ratio of new and old policy was exactly 1 for all samples in {sign.steps} steps",
        where=Where(op="exp", source=sign.line),
        evidence=[("steps in which the ratio is 1 everywhere", sign.steps, "the first of each rollout")],
    )
