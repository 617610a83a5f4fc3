from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import PretrainedFacts


@check(points_at=("load", "construction"), stage="forward", severity="critical", confidence=0.95, since_step=1)
def pretrained_weights_missing(run: RunContext, facts: PretrainedFacts) -> Results:
    """Layers that should be pretrained start at random.

    Why it matters: later layers receive inputs that they were not trained for. Low-rank adapters cannot make up for a
    frozen base that has learned nothing.

    How it is detected: a recipe or `tw.fit` loads the model by its name, and transformers' `from_pretrained` reports
    weights as newly initialized. New task heads and poolers do not count. Or a recipe has `model.lora` and builds the
    model without pretrained weights (a warning: it may be a test of the setup). Or at least half of the frozen linear
    weights have the distribution of an initialisation, and other frozen layers have not (a warning).

    Usual cause: the names in the files have another prefix, a shard was saved without its tensors, `architecture`
    names another kind of model, or it is set instead of `name`. In a loop: `load_state_dict(..., strict=False)` after
    layers were wrapped or renamed.

    Fix: compare the names in the files with `model.state_dict()`, or leave `architecture` out, so that the class in
    config.json is used. With adapters: `model: {use: hf, name: FOLDER}`.

    Sources: JIA-Lab-research/LISA#177, BudEcosystem/code-millenials#1, mlfoundations/open_flamingo#9.
    """
    if facts.missing:
        yield run.finding(
            symptom=f"{len(facts.missing)} weights of the model are not in its files: {listed(facts.missing)}",
            where=Where(module=facts.missing[0].rpartition(".")[0]),
            evidence=[("weights that are not in the files", list(facts.missing[:8]), [])],
        )
    elif facts.adapters and facts.is_random:
        yield run.finding(
            symptom=f"{facts.adapters} adapters are trained on frozen weights that are random",
            severity="warning",
            evidence=[("base model has pretrained weights", False, True)],
        )
    elif facts.fresh:
        yield run.finding(
            symptom=f"{len(facts.fresh)} of {facts.frozen} frozen layers have random initial weights, though others "
            f"are pretrained: {listed(facts.fresh)}",
            cause="the pretrained weights were loaded with `strict=False` under names that do not fit these layers",
            remedy="look at the `missing_keys` that `load_state_dict` returns; load before layers are wrapped",
            severity="warning",
            sure=0.8,
            where=Where(module=facts.fresh[0]),
            evidence=[("frozen layers with the values of an initialisation", len(facts.fresh), 0)],
        )
