from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.modes import DropsFacts


@check(stage="forward", confidence=0.95)
def dropout_ignores_mode(run: RunContext, facts: DropsFacts) -> Results:
    """A dropout stays on in eval mode, so predictions are random.

    How it is detected: one forward pass is replayed with every module in eval mode. A dropout function or a random mask
    with a fixed rate that is still applied is reported.

    Usual cause: `F.dropout(x)` without `training=`, which defaults to True; `dropout_p` in
    `scaled_dot_product_attention`.

    Looks like: evaluation.in_train_mode, where the modules are in train mode.

    Fix: `F.dropout(x, p=0.1, training=self.training)`, `dropout_p=0.1 if self.training else 0.0`, or `nn.Dropout`.

    Sources: PyTorchNLPBook#28.
    """
    if not facts.drops:
        return
    by_name = [each for each in facts.drops if "dropout" in each.op or each.op == "scaled_dot_product_attention"]
    first = (by_name or facts.drops)[0]
    yield run.finding(
        symptom=f"in eval mode {first.op} still drops values in {in_words(first.module)}",
        sure=None if by_name else 0.6,
        where=Where(module=first.module, op=first.op),
        evidence=[("dropout in eval mode", [f"{each.module}: {each.op}" for each in facts.drops[:8]], [])],
    )
