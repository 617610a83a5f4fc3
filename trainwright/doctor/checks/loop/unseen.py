import math
from collections import Counter
from collections.abc import Iterator

from trainwright.doctor import Results, RunContext, Where, by_experiment, check
from trainwright.runs.json_values import Facts

NO_STEP = {
    "": "the watched model and the watched optimizer were not used in the thread of the watch",
    "forward": "the model was called, but neither backward() nor a step of the watched optimizer was observed",
    "autograd_grad": "gradients were computed by torch.autograd.grad, and the optimizer never stepped",
    "backward": "backward() was called, but no step of the watched optimizer was observed",
    "other_step": "an optimizer that was not passed to the watch stepped, and the watched one never did",
}
"""Description of a loop without a step, by the last of these events that it had."""
PASS_ALL_OBJECTS = "pass the module that the loop calls and every optimizer that steps to tw.watch"
KEEP_OPTIMIZER = "create the optimizer once, before tw.watch, or pass the one that steps to it"

OF_OTHER = (
    "the loop creates its optimizer again, for example in each epoch, or not all optimizers were passed to the watch"
)


@check(stage="loop", severity="info", confidence=1.0)
def unseen(run: RunContext) -> Results:
    """A part of the loop cannot be observed, so it is not examined.

    Why it matters: the absence of findings does not mean that this part is correct. The finding is a warning if no step
    was observed, or if most updates were made by an optimizer that was not passed to the watch.

    How it is detected: the part is missing in half of the last eight recorded steps, or the run ended without a step.

    Usual cause: calls that bypass the module (`model.forward(x)`), a compiled model around the watched one, an
    optimizer that was not passed to `tw.watch`, gradients written by hand, an empty loader or range of epochs.

    Fix: call `model(x)`; pass all models, optimizers and scalers, as in
    `tw.watch([generator, discriminator], [opt_g, opt_d], scaler=scaler)`; print `len(loader)`.
    """
    blanks = list(_blanks(run))
    unfinished = _latest(run, "unfinished")
    is_empty = run.finished and not run.steps and bool(unfinished) and unfinished["error"] is None
    events = unfinished.get("events", ())
    is_of_other = "other_step" in events if is_empty else unfinished.get("other_steps", 0) > run.last_step
    remedies = dict.fromkeys(remedy for _, _, remedy in blanks if remedy)
    if blanks:
        yield run.finding(
            symptom="parts of this loop are not observed: " + "; ".join(what for what, _, _ in blanks),
            cause=OF_OTHER if is_of_other else "" if remedies else "the loop trains in a way that is not recorded",
            remedy="; ".join(remedies) or "none is needed if it is intended; other checks still run",
            severity="warning" if is_of_other or (is_empty and not events) else None,
            sure=0.8 if is_empty else None,
            where=Where(source=run.line_of("other_step", run.last_step)),
            evidence=[(what, seen) for what, seen, _ in blanks],
        )


def _latest(run: RunContext, experiment: str) -> Facts:
    outcomes = by_experiment(run.records).get(experiment)
    return dict(outcomes[-1].values) if outcomes else {}


def _blanks(run: RunContext) -> Iterator[tuple[str, str, str]]:
    """Yields unobserved parts: the description, the number of steps, and the remedy."""
    limits = _latest(run, "limits")
    for failure in limits.get("failures", ()):
        yield f"a part of the watch has failed ({failure})", "it is switched off", "report it with this message"
    if refused := limits.get("refused_bytes"):
        yield (
            f"no step can be replayed: a state is larger than memory_bytes={limits['budget_bytes']}",
            f"{refused / 2**20:.1f} MiB of {limits['budget_bytes'] / 2**20:.1f} MiB",
            f"memory_bytes={refused} or more, where there is room",
        )
    if not run.steps and run.finished:
        seen = set(_latest(run, "unfinished").get("events", ()))
        kind = [each for each in NO_STEP if not each or each in seen][-1]
        yield NO_STEP[kind], "in the whole run", KEEP_OPTIMIZER if "other_step" in seen else PASS_ALL_OBJECTS
    elif run.finished and (later := _latest(run, "unfinished").get("other_steps", 0)) > run.steps[-1].step:
        at = run.steps[-1].step
        what = f"after step {at} only an optimizer that was not passed to the watch made updates"
        yield what, f"{later} of {later + at} updates", KEEP_OPTIMIZER
    last = run.steps[-8:]
    if not last or (len(last) < 3 and not run.finished):
        return
    counts = Counter(
        f"its steps cannot be replayed: {each.values['blind']}" for each in last if each.values.get("blind")
    )
    counts["no loss was seen"] = sum(each.values.get("losses") == [] and math.isnan(each.loss) for each in last)
    counts["gradients are changed by hand before the update"] = sum(bool(each.values.get("edited")) for each in last)
    other = "an optimizer that was not passed to the watch steps parameters of the model"
    counts[other] = sum(any(kind == "other_step" and n for kind, n in each.events) for each in last)
    for what, count in counts.items():
        if 2 * count >= len(last):
            needs = "loss" in what or what == other
            yield what, f"{count} of the last {len(last)} steps", PASS_ALL_OBJECTS if needs else ""
