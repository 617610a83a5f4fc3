from trainwright.doctor import Every, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", confidence=0.85)
def bn_tiny_batch(run: RunContext, exams: Every[LayersFacts]) -> Results:
    """BatchNorm computes its statistics from too few values.

    How it is detected: in two examined steps, the input of a BatchNorm in train mode has at most two samples, or at
    most four values for each channel.

    Exceptions: with 32 or more values for each channel, as for one or two images, it is reported only with -v.

    Usual cause: a batch of one or two samples. The variance of so few values is noise, and evaluation uses the running
    average instead.

    Fix: `nn.GroupNorm` or LayerNorm; SyncBatchNorm over several devices; a larger micro-batch.

    Sources: pytorch/pytorch#19916, #4741.
    """
    looks = exams[-2:]
    tiny = [{path for path, seen in facts.norms.items() if seen.samples <= 2 or seen.values <= 4} for _, facts in looks]
    if len(looks) == 2 and (both := tiny[0] & tiny[1]):
        path, (step, now) = max(both), looks[-1]
        seen = now.norms[path]
        yield run.finding(
            step,
            symptom=f"{in_words(path)} normalizes by the statistics of {seen.samples} samples, {seen.values} values "
            "for each channel",
            severity="info" if seen.values >= 32 else "warning",
            where=Where(module=path, op="batch_norm"),
            evidence=[("values for each channel", seen.values, "32 or more")],
        )
