from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="input", confidence=0.9, since_step=1, explains=("model.representations_collapse",))
def views_equal(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Both views of each sample in a contrastive or siamese loss are equal, so there is nothing to learn from them.

    Why it matters: a model that compares a picture with itself learns no invariance. The loss falls at once.

    How it is detected: in every examined step, the outputs that the loss compares are equal for all pairs, and differ
    between samples. The loss compares them by `z1 @ z2.T`, by both halves of `z @ z.T`, or by `cosine_similarity`. Two
    equal terms of a symmetric loss count, too.

    Exceptions: views that differ by dropout; their outputs are not equal.

    Usual cause: the random transform is applied once and its result is used twice, or a copy of the first view is
    returned as the second one.

    Fix: `return transform(image), transform(image)`.

    Sources: lucidrains/byol-pytorch#31, janghyuncho/PiCIE#7.
    """
    sign = sign_of(exams, "equal_views") or sign_of(exams, "equal_terms")
    if sign is not None:
        yield run.finding(
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps in which the outputs of both views are equal", sign.steps, 0)],
        )
