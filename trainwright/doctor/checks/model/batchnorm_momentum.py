from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import RowsFacts
from trainwright.doctor.facts.unmoved import StatisticsFacts

MIN_STEPS = 8
MIN_JUMP = 0.02  # Change of the running mean in standard deviations. Larger batches vary less.


@check(stage="buffers", confidence=0.9, points_at="construction", since_step=1)
def batchnorm_momentum(run: RunContext, facts: StatisticsFacts) -> Results:
    """The momentum of a BatchNorm is 0 or near 1, so its running statistics are not an average of the batches.

    Why it matters: eval mode uses these statistics. With a momentum of 0 they stay at mean 0 and variance 1; near 1
    they are those of the last batch. The accuracy in eval mode is far below that in train mode, and jumps.

    How it is detected: in train mode, `momentum` is 0 and the statistics have their initial values after 8 steps. Or
    `momentum` is at least 0.9, and the running mean jumps between examinations.

    Exceptions: `momentum=None`, which averages all batches; a single batch with the full dataset.

    Usual cause: the convention of TensorFlow, where `momentum=0.99` keeps 99 % of the old value. In PyTorch it is the
    fraction of the new value.

    Fix: `nn.BatchNorm2d(channels, momentum=0.1)`, the default; TensorFlow's 0.99 is 0.01 here.

    Sources: pytorch/vision#8250, Cadene/pretrained-models.pytorch#5, r9y9/tacotron_pytorch#19.
    """
    rows = run.latest(RowsFacts)
    if rows is not None and rows.period == 1 and rows.recurred >= MIN_STEPS:
        yield NotApplicable("all steps read one batch")
        return
    for norm in facts.norms:
        if facts.steps < MIN_STEPS or not (norm.is_initial if norm.momentum == 0.0 else norm.jump > MIN_JUMP):
            continue
        yield run.finding(
            symptom=f"{norm.module} has momentum {norm.momentum:g}: its running statistics "
            + ("never change" if norm.momentum == 0.0 else "are those of the last batch"),
            where=Where(module=norm.module),
            evidence=[("momentum", norm.momentum, 0.1), ("change of the running mean", norm.jump)],
        )
