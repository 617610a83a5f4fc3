from trainwright.doctor import Every, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", confidence=0.85)
def router_collapse(run: RunContext, looks: Every[LayersFacts]) -> Results:
    """The router of a mixture of experts sends nearly everything to a few experts.

    How it is detected: the effective number of experts (the exponential of the entropy of the load) falls by a quarter
    or more, to at most 1.5 or a quarter of all experts.

    Exceptions: a load that is uneven from the start and stays so.

    Usual cause: no term of the loss balances the load: an expert that is chosen learns, and is chosen more often.

    Fix: add `0.01 * num_experts * (token_fraction * mean_probability).sum()` to the loss, with one value for each
    expert in both factors; or add a bias to the score of each expert.

    Sources: Megatron-LM#1545; KempnerForge#119.
    """
    step, last = looks[-1]
    for path, now in last.routers.items():
        history = [facts.routers[path].effective for _, facts in looks if path in facts.routers]
        if len(history) < 4 or now.experts < 3:
            continue
        lately = sorted(history[-3:])[1]
        if lately <= max(1.5, 0.25 * now.experts) and lately <= 0.75 * max(history[:3]):
            yield run.finding(
                step,
                symptom=f"{in_words(path)} sends {now.most:.0%} of its load to one of {now.experts} experts",
                where=Where(module=path),
                evidence=[("experts that share the load", lately, max(history[:3]))],
            )
