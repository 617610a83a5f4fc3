from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.layers import MASK_OF_ONES, PaddedFacts


@check(stage="forward", confidence=0.8, since_step=1)
def padding_changes_output(run: RunContext, facts: PaddedFacts) -> Results:
    """The output for a sequence depends on its padding.

    How it is detected: in eval mode, the padding at the end of a row is cut off, or padding before the tokens gets
    another embedding. The outputs of the row change by more than rounding.

    Exceptions: reported only with -v if nothing declares the padding: no mask, no lengths, no comparison such as
    `ids != pad_id`. For padding before the tokens, only a mask or positions among the
    inputs declare it.

    Usual cause: the last state of a recurrent layer is read after the padding instead of at the end of the sequence; or
    attention or a mean includes the padding.

    Fix: `pack_padded_sequence(x, lengths, enforce_sorted=False)`, or `states[torch.arange(B), lengths - 1]`; pass the
    mask to every layer that reads along the row.

    Sources: keitakurita/practical-torchtext#5, ray-project/ray#21392, NVIDIA-NeMo/Automodel#3704.
    """
    if facts.padding is None:
        yield NotApplicable("no input has padding at its ends")
    elif facts.padding.is_real:
        found = facts.padding
        yield run.finding(
            cause="the attention mask is 1 at the padding, too" if facts.pad == MASK_OF_ONES else "",
            severity="warning" if facts.pad else "info",
            evidence=[
                ("change of the outputs, in standard deviations", found.amount, f"<= {found.limit:.2g}"),
                ("what declares the padding", facts.pad or "nothing"),
            ],
        )
