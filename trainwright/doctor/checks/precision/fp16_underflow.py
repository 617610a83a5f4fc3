from trainwright.doctor import RemedyTrial, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.precision import FormatFacts, MixedPrecisionFacts

MAX_RMS_IN_STEPS = 64
"""Six bits. Rounding to them changes weight gradients by a percent, and the smaller activation gradients by more."""


@check(stage="backward", confidence=0.95, explains=("optim.lr_too_low", "gradient.vanishing"))
def fp16_underflow(run: RunContext, live: MixedPrecisionFacts) -> Results:
    """Numbers in float16 are so small that they become exactly 0: 6e-8 is the smallest number above 0.

    Why it matters: a large part of the weights gets no gradient, without an error. Sometimes only one term of the loss
    is affected, such as the balance loss of a router.

    How it is detected: a float16 step has no loss scale, and the root mean square of its gradients is below 64 times
    6e-8, so they have fewer than six significant bits. Or all results of an operation in a replayed forward pass are 0
    in float16, but not in float32.

    Exceptions: single values that vanish next to larger ones, such as the tail of a softmax.

    Usual cause: float16 without a GradScaler, or with `enabled=False`.

    Looks like: gradient.vanishing, where gradients are small in float32 as well.

    Fix: `scaler = torch.amp.GradScaler("cuda")`, then `scaler.scale(loss).backward()`, `scaler.step(optimizer)`,
    `scaler.update()`; or bfloat16. Compute small terms of the loss in float32.

    Sources: gpt-neox #477, huggingface/transformers #43543, Micikevicius et al. 2018.
    """
    facts = run.latest(FormatFacts)
    for first in facts.emptied[:1] if facts else ():
        yield run.finding(
            run.every(FormatFacts)[-1][0],
            symptom=f"{first.op} in {in_words(first.module)} gives only 0; in float32 it gives up to "
            f"{first.largest:.2g}",
            cause="the values are smaller than float16 can represent (6e-8)",
            remedy="compute this part in float32",
            sure=0.9,
            stage="forward" if first.module is not None else "loss",
            where=Where(module=first.module, op=first.op, dtype="float16"),
            evidence=[("largest value in float32", first.largest, ">= 6e-8")],
            trial=RemedyTrial("in_fp32"),
        )
    if live is not None and live.rms_in_steps < MAX_RMS_IN_STEPS:
        yield run.finding(
            symptom=f"{live.zeros:.0%} of the gradients are 0 in float16, and the others are close to 0",
            severity="critical" if live.zeros >= 0.5 else None,
            since_step=1,
            where=Where(dtype="float16"),
            evidence=[
                ("root mean square of the gradients, in steps of 6e-8", live.rms_in_steps, f"> {MAX_RMS_IN_STEPS}"),
                ("fraction of gradients that are 0", round(live.zeros, 4)),
            ],
            trial=RemedyTrial("loss_scale"),
        )
