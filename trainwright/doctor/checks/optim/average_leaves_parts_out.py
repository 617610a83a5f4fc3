from trainwright.doctor import Results, RunContext, check, listed
from trainwright.doctor.facts.averages import AveragesFacts, averages_of


@check(stage="update", confidence=0.85, needs=AveragesFacts)
def average_leaves_parts_out(run: RunContext) -> Results:
    """An average of the weights leaves some weights or buffers out.

    How it is detected: weights of an average that stand still while their originals and other weights of it move.
    Running statistics that still stand still when the average has been evaluated twice.

    Usual cause: the loop over the parameters ends early, or goes over `parameters()`, which has no running statistics.

    Fix: go over `state_dict()` of both models, copy the buffers beside the average, or recompute them with
    `torch.optim.swa_utils.update_bn`.

    Sources: pytorch-image-models, ModelEmaV2.
    """
    for copy in averages_of(run.measured(AveragesFacts)):
        left = copy.still or (copy.still_buffers if copy.evaluations >= 2 else ())
        if left:
            yield run.finding(
                run.last_step,
                symptom=f"an average of {copy.of} (a {copy.kind}) leaves these out: {listed(left)}",
                since_step=copy.moves[0].step,
                evidence=[("tensors that do not move while their originals do", list(left), [])],
            )
