from collections import Counter

from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import WeightsFacts


@check(
    points_at=("initialization", "construction"), stage="forward", severity="critical", confidence=0.95, since_step=1
)
def init_both_factors_zero(run: RunContext, facts: WeightsFacts) -> Results:
    """Both factors of a product, such as those of a LoRA adapter, start at zero, so neither gets a gradient.

    How it is detected: two matrices of one module, or of one parent, that are all zeros from the start, have a gradient
    of exactly 0 at every examination, and never move in 4 updates.

    Usual cause: all adapter weights are initialized with zeros. With both factors 0, each gradient is 0, because it is
    a product with the other factor.

    Fix: `nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))`, and zeros for `lora_B` only.

    Sources: nvidia-cosmos/cosmos-predict2.5 PR #15, NovaSky-AI/SkyRL PR #852.
    """
    if facts.updates < 4:
        return
    stuck = [name for name in facts.zero_weights if name in facts.zero_gradients]
    parents = Counter(part for name in stuck for part in _parents(name))
    pairs = [parent for parent, count in parents.items() if count == 2]
    if pairs:
        names = [name for name in stuck if pairs[0] in _parents(name)]
        yield run.finding(
            symptom=f"{listed(names)} are all zeros and get a gradient of exactly 0",
            where=Where(module=pairs[0]),
            evidence=[("weights of zeros without a gradient", len(stuck), 0)],
        )


def _parents(name: str) -> set[str]:
    module = name.rpartition(".")[0]
    return {module, module.rpartition(".")[0]}
