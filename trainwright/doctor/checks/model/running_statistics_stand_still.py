from trainwright.doctor import NotApplicable, Passed, Results, RunContext, Where, check, in_words, listed
from trainwright.doctor.facts.layers import LayersFacts, StandingNorm
from trainwright.doctor.facts.modes import ModesFacts

MIN_EXAMINATIONS = 3
"""Examinations with other inputs than the first one."""


@check(stage="buffers", confidence=0.9, needs=(LayersFacts, ModesFacts))
def running_statistics_stand_still(run: RunContext) -> Results:
    """The running statistics of a normalization never move, although it normalises by the batch in training.

    Why it matters: training does not read them, so the loss shows nothing; an evaluation normalises by the statistics
    that the run began with, as a rule mean 0 and variance 1.

    How it is detected: the running mean and variance of each trained `batch_norm` and `instance_norm`, as they are
    before the first forward pass of a step. They are equal bit for bit in all examined steps, in three or
    more of which the mean of the input is another one by a thousandth of a deviation. It is reported once an evaluation
    in eval mode has used them, or at the end.

    Exceptions: a norm that is frozen, in eval mode or not called; statistics that are computed anew for an evaluation
    (`update_bn`), in a pass in train mode without gradients.

    Usual cause: `momentum=0` (it is the share of the new batch, not of the old statistics as in TensorFlow),
    `track_running_stats = False` after the layer was made, or buffers that are put back at every step.

    Looks like: where training uses the running statistics, too, it is loop.trains_in_eval_mode.

    Fix: leave `momentum` at 0.1 and `track_running_stats` at True, and put nothing back; then
    `torch.optim.swa_utils.update_bn(loader, model)` makes the statistics anew for the weights as they are.

        nn.BatchNorm2d(64, momentum=0.1)  # the share of the batch in the statistics

    Sources: pytorch/pytorch#15298, pytorch/pytorch PR 38084.
    """
    facts, modes = run.measured(LayersFacts), run.measured(ModesFacts)
    if not (facts.norms or facts.standing):
        yield NotApplicable("no normalization has running statistics and is in train mode")
        return
    looks = run.every(LayersFacts)
    if len(looks) <= MIN_EXAMINATIONS:
        yield NotApplicable(f"{len(looks)} steps were looked at, and it takes {MIN_EXAMINATIONS + 1}")
        return
    still = {path: each for path, each in facts.standing.items() if each.others >= MIN_EXAMINATIONS}
    since = min((each.since for each in still.values()), default=0)
    used = [step for step in modes.evaluated_in_eval if since <= step < looks[-1][0]]
    if not still or not (used or run.finished):
        yield Passed(f"{len(facts.norms)} normalizations")
        return
    path, seen = next(iter(still.items()))
    yield run.finding(
        run.last_step,
        symptom=f"the running statistics of {listed(list(still))} have not moved since step {since}, though the mean "
        f"of the input of {in_words(path)} moved by {seen.shift:.2g} deviations",
        cause=_cause(seen),
        sure=0.9 if used else 0.75,
        since_step=since,
        where=Where(module=path, op=seen.op),
        evidence=[
            ("normalizations whose statistics stand still", list(still)[:16], []),
            ("momentum", seen.momentum, 0.1),
            ("evaluations that used them, after steps", used, []),
        ],
    )


def _cause(seen: StandingNorm) -> str:
    if not seen.is_given:
        return "it normalises without them: track_running_stats is False, or other tensors are passed"
    if seen.momentum == 0.0:
        return "momentum is 0, the share of the batch in the statistics"
    return "they are put back in every step: loaded, copied or reset"
