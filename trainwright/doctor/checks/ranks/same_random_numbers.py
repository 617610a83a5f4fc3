from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import RanksFacts, in_ranks


@check(points_at="seed", stage="forward", confidence=0.85)
def same_random_numbers(run: RunContext, facts: RanksFacts) -> Results:
    """The ranks draw the same random numbers for different samples, so dropout and noise average out less.

    How it is detected: a step draws at least 16 random numbers after its batch was read (dropout, noise, diffusion
    times). Before these draws the generators of torch are in the same state on the ranks, in at least two and at least
    half of all compared steps.

    Exceptions: models that are divided among the ranks, ranks that divide the same samples, and single draws that all
    ranks must share, such as the choice of a branch.

    Usual cause: every rank was seeded with the same number.

    Fix: `torch.manual_seed(seed + rank)` after the model is created; seed NumPy and the workers in the same way.

    Sources: VeOmni #143, lingbot-vla-v2 #41, threestudio #195.
    """
    alike = facts.coincidence("random numbers")
    if alike is not None and alike.is_no_chance:
        drawn = ("op:randn_like", "op:rand_like", "op:randn", "op:rand", "op:normal_", "op:randint", "forward")
        lines = (run.line_of(kind, max(1, facts.newest)) for kind in drawn)
        yield run.finding(
            max(1, facts.newest),
            symptom=f"{in_ranks(alike.ranks)} draw the same random numbers (dropout, noise) for different samples",
            since_step=alike.since,
            where=Where(source=next((line for line in lines if line), None)),
            evidence=[("steps with the same state of the generators", alike.same, 0)],
        )
