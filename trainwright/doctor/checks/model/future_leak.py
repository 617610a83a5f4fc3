from trainwright.doctor import Every, ExperimentRequest, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import BatchFacts, TokensFacts
from trainwright.doctor.facts.layers import LayersFacts

MIN_SCORE_CHANGE = 1e-3  # Change of a score, in standard deviations of the scores, that exceeds rounding
MAX_EXAMINATIONS = 2  # Number of examinations. Initially a model may not depend on its input yet.


@check(stage="forward", severity="critical", confidence=0.95, explains=("data.target_leak",))
def future_leak(run: RunContext, batch: BatchFacts, every: Every[BatchFacts]) -> Results:
    """A causal model sees the tokens that it has to predict.

    Why it matters: training and validation loss are far too low, and generated text is bad, because there the later
    tokens do not exist yet.

    How it is detected: the targets are the next tokens, and in eval mode scores change when only tokens after their
    position are replaced. Only positions whose target counts are compared, so a prefix without targets may be visible
    to all its positions.

    Exceptions: reported only with -v in a mixture of experts. If its experts have a capacity, later tokens displace
    earlier ones there on purpose.

    Usual cause: the causal mask is missing or off by one; a bidirectional layer, symmetric padding of a convolution, or
    a norm over time.

    Looks like: loss.no_shift, where the target is the input token at the same position.

    Fix: `scaled_dot_product_attention(q, k, v, is_causal=True)`; convolutions padded on the left only.
    """
    exams = run.every(TokensFacts)
    if (batch.classes or 0) < 2 or not any(x.mean is None and len(x.shape) == 2 for x in batch.inputs):
        yield NotApplicable("the model gets no tokens, or predicts no classes")
        return
    is_new = exams[-1][0] < run.last_step if exams else not run.was_tried(TokensFacts)
    if len(exams) < MAX_EXAMINATIONS and is_new:
        step = None if exams else every[-1][0]
        yield ExperimentRequest(TokensFacts.experiment, step)
    for step, facts in exams:
        for loss in facts.losses:
            if loss.offset != 1 or loss.sees is None or loss.sees <= MIN_SCORE_CHANGE:
                continue
            layers = run.latest(LayersFacts)
            routers = () if layers is None or loss.module is None else layers.routers
            is_mixture = any(f"{path}.".startswith(f"{loss.module}.") for path in routers)
            yield run.finding(
                step,
                severity="info" if is_mixture else "critical",
                symptom=f"earlier scores change by {loss.sees:.2g} standard deviations when only tokens from position "
                f"{loss.start} on are replaced",
                where=Where(module=loss.module, source=loss.line),
                evidence=[
                    ("change of earlier scores, in deviations", loss.sees, 0.0),
                    ("targets that are the next token", loss.fraction, 1.0),
                ],
            )
