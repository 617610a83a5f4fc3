from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import PretrainedFacts


@check(stage="forward", severity="critical", confidence=0.95, since_step=1)
def pretrained_weights_missing(run: RunContext, facts: PretrainedFacts) -> Results:
    """Layers of a pretrained model are not in its files, so they start at random.

    Why it matters: the layers after them receive inputs that they were not trained for.

    How it is detected: the names that `from_pretrained` of transformers reports as newly initialized, when a recipe or
    `tw.fit` loads the model by its name. A new head for another task does not count, nor does a pooler.

    Usual cause: the names in the files have another prefix, a shard was saved without its tensors, or `architecture`
    names a model of another kind.

    Fix: compare the names in the files with `model.state_dict()`, or take the class in config.json: leave
    `architecture` out.

    Sources: JIA-Lab-research/LISA#177, BudEcosystem/code-millenials#1, DennisGankin/species-aware-DNA-LM#4.
    """
    if facts.missing:
        yield run.finding(
            symptom=f"{len(facts.missing)} weights of the model are not in its files: {listed(facts.missing)}",
            where=Where(module=facts.missing[0].rpartition(".")[0]),
            evidence=[("weights that are not in the files", list(facts.missing[:8]), [])],
        )
