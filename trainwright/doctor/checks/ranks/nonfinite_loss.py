from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.ranks import RanksFacts


@check(
    stage="forward",
    severity="critical",
    confidence=0.95,
    explains=("precision.nonfinite_step", "ranks.replicas_diverged", "ranks.gradients_differ"),
)
def nonfinite_loss(run: RunContext, facts: RanksFacts) -> Results:
    """The loss of one rank became non-finite first, while that of another rank was finite.

    Why it matters: averaging makes the gradients of all ranks NaN, so every rank looks like the cause.

    How it is detected: each rank reports its own loss, before any communication, in its first step that is not finite.

    Usual cause: the samples of that rank.

    Looks like: precision.nonfinite_step, where the losses of all ranks are non-finite, or of none.

    Fix: read the findings of that rank in its own run folder; skip such an update on all ranks together.

    Sources: WeatherGenerator #2718, habitat-lab #2226.
    """
    for status in facts.first_nonfinite[:1]:
        found = status.nonfinite
        assert found is not None
        yield run.finding(
            found.step,
            symptom=f"the loss of rank {status.rank} was {found.own_loss:g} in step {found.step} before any "
            "communication, while another rank's was finite",
            cause="" if found.inputs_finite else f"the inputs of rank {status.rank} are not finite",
            stage="forward" if found.inputs_finite else "input",
            since_step=found.step,
            where=Where(rank=status.rank, sample_ids=found.samples[:64]),
            evidence=[("own loss of the rank", found.own_loss), ("its inputs are finite", found.inputs_finite, True)],
        )
