from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import ModulesFacts


@check(points_at="construction", stage="forward", confidence=0.85, since_step=1)
def padding_idx_is_token(run: RunContext, facts: ModulesFacts) -> Results:
    """The `padding_idx` of an embedding is the number of a real token, so this token never learns.

    How it is detected: padding occurs at the ends of rows, a token between other tokens. In a few steps, at least 2 %
    of all ids equal `padding_idx`, more than half of these occur between other ids, and their embedding row is 0.

    Exceptions: ids that an attention mask declares to be tokens, such as an end-of-text token that also pads.

    Usual cause: `padding_idx=0` where 0 is a real, frequent token: its row stays 0 and gets no gradient.

    Fix: remove `padding_idx`, or give padding its own id.

    Sources: FGA-DIKU/BONSAI#168, NVIDIA-NeMo/Speech#5726.
    """
    for each in facts.tables:
        if each.padding >= 0.02 and each.inside > 0.5:
            yield run.finding(
                symptom=f"{each.padding:.0%} of the ids that {in_words(each.path)} reads are its padding_idx, and "
                f"{each.inside:.0%} of these stand between other tokens",
                where=Where(module=each.path),
                evidence=[("fraction of padding between other tokens", round(each.inside, 3), 0.0)],
            )
