from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", severity="critical", confidence=0.9, explains=("model.mixes_samples",), since_step=1)
def softmax_over_samples(run: RunContext, facts: LayersFacts) -> Results:
    """A softmax in the model runs over the samples of the batch instead of the classes or keys of each sample.

    Why it matters: the outputs of a sample do not sum to 1 and depend on what else is in the batch.

    How it is detected: the dimension of a `softmax` or `log_softmax` in the model is the first one, which has the
    number of samples of the loader's batch.

    Usual cause: `dim=0`; or no `dim` for an input of three axes, where PyTorch takes the first.

    Looks like: model.mixes_samples.

    Fix: `torch.softmax(x, dim=-1)`.

    Sources: ctallec/world-models#10, batra-mlp-lab/visdial-challenge-starter-pytorch#1, Lackel/DPN#1.
    """
    for each in facts.wrong_axes("over_samples"):
        yield run.finding(
            symptom=f"a softmax in {in_words(each.module)} over {list(each.shapes[0])} runs over the first axis, the "
            "samples of the batch",
            where=Where(module=each.module, op="softmax", source=each.line),
            evidence=[("sum over the last axis of its result", "not 1", 1.0)],
        )
