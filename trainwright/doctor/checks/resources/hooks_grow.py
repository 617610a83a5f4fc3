from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.resources import MIN_RISING_READINGS, GrowthFacts, has_grown

MIN_HOOKS = 4


@check(stage="loop", confidence=0.95)
def hooks_grow(run: RunContext, facts: GrowthFacts) -> Results:
    """Hooks are registered in the loop and not removed, so each forward call runs all of them.

    How it is detected: the hooks of modules and parameters are counted every 16 steps, later less often. Four readings
    in a row rise, by four hooks in total. Hooks of the watch do not count.

    Usual cause: `register_forward_hook` in each step or evaluation, without `remove()` of the returned handle.

    Fix: register hooks once before the loop, or call `handle.remove()` after use.
    """
    counts = [each.hooks for each in facts.held]
    if not has_grown(counts, MIN_HOOKS):
        return
    begin, end = facts.held[-MIN_RISING_READINGS], facts.held[-1]
    yield run.finding(
        end.step,
        symptom=f"the number of hooks grows: {begin.hooks} after step {begin.step}, {end.hooks} after step {end.step}",
        where=Where(module=facts.most_hooks),
        evidence=[("hooks, by step", [[each.step, each.hooks] for each in facts.held][-8:], "constant")],
    )
