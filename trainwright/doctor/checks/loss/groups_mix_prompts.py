from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="loss", confidence=0.9, since_step=1)
def groups_mix_prompts(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Advantages of GRPO are normalized over groups that mix prompts, instead of the completions of one prompt.

    Why it matters: an advantage then shows which prompt is easy, not which completion is good.

    How it is detected: each prompt has the same number of completions in the batch. The factors of the log-probability
    ratios sum to 0 over consecutive samples of that number, and not over the samples of a prompt.

    Usual cause: `prompts.repeat(n)`, which gives a, b, a, b, with `rewards.view(-1, n)`, which needs a, a, b, b.

    Fix: `prompts.repeat_interleave(n, dim=0)`, or `rewards.view(n, -1)` and statistics over dimension 0.

    Sources: dllm-reasoning/d1#19, THUDM/slime PR 2062.
    """
    sign = sign_of(exams, "groups_mixed")
    if sign is not None:
        yield run.finding(
            symptom=f"in {sign.steps} examined steps the advantages sum to 0 over consecutive samples, which "
            "are of different prompts, and not over the samples of one prompt",
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps with groups of several prompts", sign.steps, 0)],
        )
