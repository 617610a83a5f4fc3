from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.calls import SteadinessFacts

MIN_REPEATS = 4
MIN_SEEDED_ALIKE = 7


@check(points_at="seed", stage="loop", confidence=0.9)
def random_state_repeats(run: RunContext, facts: SteadinessFacts) -> Results:
    """Steps begin with the random state of earlier steps, so noise and dropout masks repeat.

    How it is detected: a hash of the state of the default generators is compared at the first forward call of each step
    until 64, then of every eighth. Four repeats are a finding. Resuming a run or repeating a step causes only one.
    Also a finding: in eight steps in a row, a generator of torch, NumPy or Python is seeded, draws numbers, and ends in
    the same state.

    Usual cause: the generator is seeded again inside the loop (`torch.manual_seed` for a preview or an evaluation), or
    its state is restored.

    Fix: seed once, before the loop. Use a separate generator for numbers that must repeat:
    `generator=torch.Generator().manual_seed(0)`.

    Sources: huggingface/diffusers#175, kohya-ss/sd-scripts#1864, TorchIO-project/torchio#191, eiriniar/gleason_CNN#1.
    """
    if facts.seeded_alike >= MIN_SEEDED_ALIKE:
        yield run.finding(
            symptom=f"{facts.seeded_alike + 1} steps in a row drew the same numbers from a seeded generator",
            cause="a random transform or the loading of a batch seeds with a constant at every call",
            since_step=1,
            where=Where(source=facts.seeded_at, shown_at=facts.seeded_at),
            evidence=[("steps in a row with the same random numbers", facts.seeded_alike + 1, 1)],
        )
        return
    if not facts.draws:
        yield NotApplicable("no random numbers are drawn while a step runs")
    elif facts.repeats >= MIN_REPEATS:
        yield run.finding(
            symptom=f"{facts.repeats} steps began with the random state of an earlier step: step {facts.since_repeat} "
            f"with that of step {facts.repeated_step}",
            since_step=facts.since_repeat,
            where=Where(source=facts.seeded_at, shown_at=facts.seeded_at),
            evidence=[("steps whose random state repeats", facts.repeats, 0)],
        )
