from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="label", confidence=0.95, since_step=1)
def box_ends_before_start(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Target boxes end before they begin: their width or height, `x2 - x1`, is negative.

    Why it matters: areas and overlaps of such boxes are meaningless, and so is an IoU loss.

    How it is detected: the loss subtracts columns 0 and 1 of targets with four columns from columns 2 and 3. For more
    than 5 % of the boxes the difference is negative, in every examined step.

    Usual cause: boxes as centre and size (`cxcywh`) or as corner and size (`xywh`, as in COCO) where two corners
    (`xyxy`) are expected.

    Fix: `torchvision.ops.box_convert(boxes, "cxcywh", "xyxy")` before the overlap is computed.

    Sources: stevebottos/owl-vit-object-detection#14.
    """
    sign = sign_of(exams, "box_ends_before")
    if sign is not None:
        yield run.finding(
            where=Where(source=sign.line), evidence=[("steps with negative widths or heights", sign.steps, 0)]
        )
