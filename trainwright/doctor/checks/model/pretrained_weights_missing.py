from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import PretrainedFacts


@check(stage="forward", severity="critical", confidence=0.95, since_step=1)
def pretrained_weights_missing(run: RunContext, facts: PretrainedFacts) -> Results:
    """Layers that should be pretrained start at random.

    Why it matters: the layers after them receive inputs that they were not trained for; and adapters of low rank cannot
    replace a frozen base that has learned nothing.

    How it is detected: the names that `from_pretrained` of transformers reports as newly initialized, when a recipe or
    `tw.fit` loads the model by its name. A new head for another task does not count, nor does a pooler. Or a recipe
    builds the model without pretrained weights and has `model.lora` (a warning: it may be a test of the setup).

    Usual cause: the names in the files have another prefix, a shard was saved without its tensors, or `architecture`
    names a model of another kind or stands where `name` should.

    Fix: compare the names in the files with `model.state_dict()`, or take the class in config.json: leave
    `architecture` out. With adapters: `model: {use: hf, name: FOLDER}`.

    Sources: JIA-Lab-research/LISA#177, BudEcosystem/code-millenials#1, DennisGankin/species-aware-DNA-LM#4.
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
