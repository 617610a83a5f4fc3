from trainwright.doctor import NotApplicable, Results, RunContext, Where, check, in_words, listed
from trainwright.doctor.facts.layers import LayersFacts
from trainwright.doctor.facts.modes import EvalModule, ModesFacts


@check(stage="loop", severity="critical", confidence=0.95, explains=("model.excess_dropout",))
def trains_in_eval_mode(run: RunContext, facts: ModesFacts) -> Results:
    """The model, or a part of it, trains in eval mode.

    Why it matters: dropout is off, and batch normalization uses old running statistics and does not update them.

    How it is detected: the mode of every module in each training pass. A part that left train mode during the run is
    critical (a warning if it is a single module). A model or a part that was never in train mode is a warning, and so
    is a dropout function that is called with `training=False` by a module in train mode.

    Exceptions: frozen parts; frozen statistics, where only normalization layers are in eval mode: all of them, or
    those that were so from the first step on.

    Usual cause: `model.eval()` for an evaluation without `model.train()` after it, or `train()` of a submodule only.
    `from_pretrained` returns models in eval mode.

    Fix: call `model.train()` before each epoch and after each evaluation.

    Sources: joeynmt#184, vsepp#4, pytorch-fcn#56, Megatron-LM#411, hkust-vgd/shellnet#3, deepchem#1787.
    """
    layers = run.latest(LayersFacts)
    if layers is not None and layers.inactive_dropout:
        path, line = next(iter(layers.inactive_dropout.items()))
        yield run.finding(
            symptom=f"dropout has no effect in {in_words(path)}, although the module is in train mode",
            cause="the dropout function is called with training=False",
            remedy="F.dropout(x, p, training=self.training), or an nn.Dropout",
            severity="warning",
            since_step=1,
            where=Where(module=path, op="dropout", source=line),
            evidence=[("modules in train mode with an inactive dropout", [*layers.inactive_dropout][:16], [])],
        )
    if not facts.depends:
        yield NotApplicable("no module behaves differently in eval mode")
        return
    trained = [each for each in facts.eval if each.depends and each.trained]
    left = [each for each in trained if each.left]
    rows, since_loaded, is_whole = left, False, bool(facts.roots_in_eval) and all(facts.roots_in_eval)
    if left and not is_whole and all(each.norm for each in left) and len(left) >= facts.norms:
        rows = []  # the statistics of all normalizations are frozen on purpose
    if not rows:
        others = [each for each in trained if not each.norm]
        rows = others if is_whole else _inside([each for each in facts.eval if each.container], others)
        since_loaded = True
    if not rows:
        return
    names, since = [each.module for each in rows], max(each.since for each in rows)
    is_sure = not since_loaded and (is_whole or bool(_inside([e for e in facts.eval if e.container and e.left], rows)))
    yield run.finding(
        symptom=f"{'the model' if is_whole else listed(names)} has been training in eval mode since step {since}",
        cause="it was loaded in eval mode, as pretrained models are, and train() was never called"
        if since_loaded
        else "",
        severity="critical" if is_sure else "warning",
        sure=0.95 if is_sure else 0.8 if not since_loaded else 0.65,
        since_step=since,
        where=Where(module=names[0], source=rows[0].source),
        evidence=[("modules in eval mode", names[:16], [])],
    )


def _inside(containers: list[EvalModule], rows: list[EvalModule]) -> list[EvalModule]:
    return [row for row in rows if any(row.module.startswith(f"{each.module}.") for each in containers)]
