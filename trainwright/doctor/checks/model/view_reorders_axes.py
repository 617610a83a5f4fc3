from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(
    stage="forward",
    severity="critical",
    confidence=0.93,
    explains=("model.mixes_samples", "model.depends_on_batch_position"),
    since_step=1,
)
def view_reorders_axes(run: RunContext, facts: LayersFacts) -> Results:
    """A `view` or `reshape` is used where axes should be permuted, so values land in the wrong places.

    Why it matters: shapes are right and there is no error, but channels, steps or samples are mixed up.

    How it is detected: after a view, the last two or three axes (without axes of size 1) have the same sizes in another
    order, in two or more training passes, or between the outputs and the loss. Or (batch, length, feature) is viewed as
    (batch, head, length, part), or back.

    Exceptions: sizes that differ by 1, because the shift of relative attention uses such a view on purpose.

    Usual cause: `reshape` is used to move the channels first in images (batch, height, width, channel) or sequences
    (batch, length, feature), or to split heads without a transpose.

    Looks like: model.mixes_samples, where a view moves values between samples.

    Fix: `x.permute(0, 3, 1, 2)` or `x.transpose(1, 2)`: these move the axes with their values.

    Sources: Selen-Suyue/DensePolicy2D#3, zamanzadeh/CARLA#16.
    """
    for each in facts.wrong_axes("reordered"):
        old, new = each.shapes
        yield run.finding(
            symptom=f"in {in_words(each.module)} a reshape of {list(old)} to {list(new)} permutes no axes: values get "
            "mixed up",
            where=Where(module=each.module, op="view", source=each.line),
            evidence=[("shape before and after", [list(old), list(new)], "a permute or a transpose")],
        )
    sign = sign_of(run.every(LossFacts), "reordered")
    if sign is not None:
        yield run.finding(
            symptom="a reshape between the outputs and the loss permutes no axes: values get mixed up",
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps with such a reshape", sign.steps, 0)],
        )
