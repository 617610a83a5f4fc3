from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts


@check(stage="forward", severity="critical", confidence=0.95, explains=("model.padding_changes_output",), since_step=1)
def attention_mask_inverted(run: RunContext, facts: LayersFacts) -> Results:
    """The attention mask is inverted: attention ignores the tokens and attends only to padding.

    Why it matters: the layer ignores the sequence. The loss still falls, because other layers see the tokens.

    How it is detected: rows of token ids with different lengths are padded at one end, and the keys that attention
    hides from all queries of a row are exactly those that are not padding, in two or more training passes.

    Usual cause: `key_padding_mask` of `nn.MultiheadAttention` is True where a key is left out; the `attn_mask` of
    `F.scaled_dot_product_attention` and the `attention_mask` of transformers are 1 where it takes part.

    Looks like: model.padding_changes_output, where attention sees padding in addition to the tokens.

    Fix: invert the mask: `key_padding_mask=ids == pad_id`, `scores.masked_fill(~mask, float("-inf"))`.

    Sources: lucidrains/halonet-pytorch#6, InseeFrLab/torchTextClassifiers#92.
    """
    for each in facts.wrong_axes("inverted"):
        yield run.finding(
            symptom=f"attention in {in_words(each.module)} hides all tokens and attends only to padding",
            where=Where(module=each.module, op="softmax", source=each.line),
            evidence=[("shape of the mask", list(each.shapes[0]))],
        )
