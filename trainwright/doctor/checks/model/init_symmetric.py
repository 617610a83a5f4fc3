from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.layers import SymmetryFacts


@check(
    points_at=("initialization", "construction"),
    stage="forward",
    severity="critical",
    confidence=0.95,
    explains=("gradient.vanishing", "data.label_feature_misaligned", "model.output_same_for_all_samples"),
)
def init_symmetric(run: RunContext, facts: SymmetryFacts) -> Results:
    """Units of a layer start equal and get equal gradients, so they stay copies of each other.

    How it is detected: in a replay of the first step, at least half of the rows of a weight are equal. So are these
    rows of its gradient for a random weighted sum of the outputs.

    Exceptions: zeros on purpose (a last layer, LoRA), whose gradients differ from row to row.

    Usual cause: weights are initialized with a constant.

    Fix: `nn.init.kaiming_uniform_` or `xavier_uniform_`; only biases and scales may be constant.

    Sources: TheDeepChecker (Ben Braiek and Khomh).
    """
    alike = {name: share for name, share in facts.alike.items() if share >= 0.5}
    if alike:
        names = list(alike)
        yield run.finding(
            symptom=f"the units of {listed(names)} have equal weights and get equal gradients",
            where=Where(module=names[0].rpartition(".")[0]),
            evidence=[("fraction of units that equal the first", alike[names[0]], 0.0)],
        )
