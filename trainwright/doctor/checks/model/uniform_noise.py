from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.layers import LayersFacts
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="forward", confidence=0.9, since_step=1)
def uniform_noise(run: RunContext) -> Results:
    """Noise is uniform between 0 and 1 where the method needs normal noise with mean 0.

    Why it matters: all samples are shifted by half a standard deviation, and generation begins from a distribution
    that the model was never trained on.

    How it is detected: `torch.rand` or `torch.rand_like` is multiplied by a standard deviation that the model computes
    and added to a mean; or uniform noise is mixed into the input, and the model predicts it.

    Exceptions: dropout masks, time steps, random factors, which need no normal distribution.

    Usual cause: `rand` instead of `randn`.

    Fix: `torch.randn_like(std)`.

    Sources: acids-ircam/diffusion_models#8, PaddlePaddle/PaddleMIX PR 1048, zhuangdizhu/FedGen#10.
    """
    for step, facts in run.every(LayersFacts):
        for each in facts.wrong_axes("uniform_noise"):
            yield run.finding(step, where=Where(module=each.module, source=each.line))
    sign = sign_of(run.every(LossFacts), "uniform_noise")
    if sign is not None:
        yield run.finding(
            where=Where(op=sign.op, source=sign.line), evidence=[("steps with uniform noise", sign.steps, 0)]
        )
