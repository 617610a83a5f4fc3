from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import FunctionFacts, LayersFacts, ModulesFacts

MIN_DEVIATION = 0.02
"""In standard deviations of the outputs. A batch statistic that is one feature of many changes them less."""


@check(stage="forward", confidence=0.8, since_step=1)
def mixes_samples(run: RunContext, facts: FunctionFacts) -> Results:
    """The output for one sample depends on other samples of the batch.

    How it is detected: in eval mode, one sample is replaced by its neighbour, and the outputs of the others change by
    more than the measured rounding error. If an input numbers the graph of each node, a sample is a graph.

    Exceptions: batches whose rows may belong together (nodes of one graph, packed sequences, one set, the same rows
    in every step); a statistic of the batch among many features, which changes little, is reported only with -v, unless
    the model has a softmax over the first axis.

    Usual cause: a `view` or `reshape` where a transpose was meant; a softmax (`dim=0`), mean or norm over the batch
    dimension, or over the nodes of all graphs; a recurrent or attention layer without `batch_first`, which treats
    samples as the steps of a sequence.

    Fix: swap axes with `transpose` or `permute`; take softmax, mean and norm over a dimension of the sample, or over
    the nodes of each graph; `nn.LSTM(..., batch_first=True)`.

    Sources: AndersonJo/dqn-pytorch#1, ray075hl/Bi-Model-Intent-And-Slot PR 2, ctallec/world-models#10, Lackel/DPN#1.
    """
    modules = run.latest(ModulesFacts)
    if facts.neighbours is None or not facts.neighbours.is_real or facts.written:
        if facts.related:
            yield NotApplicable(facts.related)
        return
    if not (facts.is_batch or facts.are_graphs) and (modules is None or modules.looks < 4 or modules.same_inputs):
        yield NotApplicable("the rows may be one thing, such as the nodes of a graph")
        return
    found, layers = facts.neighbours, run.latest(LayersFacts)
    softmax = next(iter(layers.wrong_axes("softmax_over_batch")), None) if layers is not None else None
    yield run.finding(
        symptom=f"with one sample of a batch replaced, others change their outputs, first in {in_words(found.module)}",
        severity="info" if found.amount < MIN_DEVIATION and not (facts.are_graphs or softmax) else "warning",
        where=Where(module=(softmax or found).module, source=(softmax or found).line),
        evidence=[("change of the others' outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}")],
    )
