from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.nonfinite import traces, where_of
from trainwright.runs.records import Watched

MIN_CONSECUTIVE_SKIPS = 20  # Consecutive skips after which the scale has been divided by 2**20 without success


@check(stage="update")
def scaler_collapse(run: RunContext) -> Results:
    """The gradient scaler skips one update after the other and halves its scale, so nothing is trained.

    Why it matters: the loop runs at full speed without an error. After 60 skips the scale is 5.7e-14.

    How it is detected: 20 skipped updates in a row, or two if the replay shows an operation that is not finite at any
    scale. While the scaler searches for its scale, at the beginning of a run, it skips only about ten steps.

    Usual cause: the gradients are not finite at any loss scale.

    Looks like: precision.fp16_overflow, which names the operation.

    Fix: find the operation that overflows; another scale does not help. bfloat16 needs no scaler.

    Sources: WSL-Images #9, Chinese-LLaMA #534.
    """
    skipped = [step for step in run.steps if any(kind == "scaler_skipped" for kind, _ in step.events)]
    if not skipped and not any(kind == "scaler_update" for step in run.steps for kind, _ in step.events):
        yield NotApplicable("no gradient scaler")
    row: list[Watched] = []
    for step in skipped:
        row = [*row, step] if row and step.step == row[-1].step + 1 else [step]
        begun, ended = row[0].step, row[-1].step
        within = [each for each in traces(run) if begun <= each[0] <= ended and each[2].kind == "op"]
        if len(row) < MIN_CONSECUTIVE_SKIPS and len(within) < 2:
            continue
        scales = [
            value for each in run.steps if each.step <= ended for kind, value in each.events if kind == "scaler_update"
        ]
        first = within[0] if within else None
        yield run.finding(
            ended,
            symptom=f"the gradient scaler skipped {len(row)} updates in a row; nothing is trained",
            severity="critical" if len(row) >= MIN_CONSECUTIVE_SKIPS else None,
            since_step=begun,
            where=where_of(first[1], first[2], []) if first else Where(),
            evidence=[
                ("skips in a row", len(row), "a few at the start"),
                ("loss scale", scales[-1] if scales else None),
            ],
        )
