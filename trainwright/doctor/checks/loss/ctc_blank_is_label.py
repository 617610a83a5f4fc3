from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(points_at="criterion", stage="loss", severity="critical", confidence=0.97, since_step=1)
def ctc_blank_is_label(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The blank of the CTC loss is also used as a label.

    How it is detected: in each examined step, targets within their lengths contain the index `blank` of `ctc_loss`,
    which is 0 by default.

    Usual cause: the labels begin at 0, and the model's blank is its last class, but `blank` was not passed.

    Fix: `nn.CTCLoss(blank=num_classes - 1)`, or labels that begin at 1.

    Sources: deepspeech.pytorch PR 601, tf2-crnn#1.
    """
    sign = sign_of(exams, "blank_is_label")
    if sign is not None:
        yield run.finding(
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps whose targets contain the blank", sign.steps, 0)],
        )
