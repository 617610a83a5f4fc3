from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import ModulesFacts


@check(stage="forward", confidence=0.9, since_step=1)
def layers_share_weights(run: RunContext, facts: ModulesFacts) -> Results:
    """One module occurs several times in a list of layers, so the layers share their weights.

    How it is detected: the same object occurs several times in an `nn.ModuleList` or `nn.Sequential`, and gets its own
    output as its input.

    Exceptions: sharing without a list of layers (ALBERT, tied autoencoders); heads that share a module but are not
    chained.

    Usual cause: `[block] * n` repeats one object: the same module is registered n times.

    Fix: `nn.ModuleList([Block() for _ in range(n)])`.

    Sources: zalandoresearch/pytorch-vq-vae#2, linkedin/Liger-Kernel PR #269.
    """
    for each in facts.repeated:
        if each.is_chained:
            yield run.finding(
                symptom=f"{each.times} entries of {in_words(each.path)} are one and the same module",
                where=Where(module=each.path),
                evidence=[("entries that are one module", each.times, 1)],
            )
