from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.calls import CallsFacts
from trainwright.doctor.facts.loss import LossFacts
from trainwright.runs.records import Watched

MIN_FURTHER_STEPS = 2  # Further steps without gradients that rule out a single special batch
FOREIGN_LOSS = "the loss does not depend on the output of the watched model"


@check(
    stage="loss",
    severity="critical",
    confidence=0.95,
    explains=("data.label_feature_misaligned", "gradient.*", "loop.*", "loss.*", "optim.*"),
)
def detached_from_model(run: RunContext) -> Results:
    """The graph of the loss reaches no parameter, so no update learns anything.

    How it is detected: after `backward()` no parameter of the optimizer has a gradient, although `zero_grad()` was not
    called since. In addition, the loss has no graph, is not computed from the outputs of the model, or gives no
    gradient in a replay either. If other steps have had gradients, this must last for 3 steps.

    Exceptions: a batch without gradients that is followed by steps with gradients is reported only with -v.

    Usual cause: `.item()`, `.detach()`, `.data`, `.numpy()` or `torch.tensor(...)` between the outputs and
    `backward()`, or a forward pass under `no_grad`.

    Looks like: optim.params_not_registered, where parameters outside of the optimizer get the gradients.

    Fix: keep the tensors that the model and the loss function return, and call `.item()` only on values to print.
    """
    cut = [each for each in run.steps if _is_cut(run, each)]
    reaching = [each.step for each in run.steps if each.values.get("grads", (0, 0))[0]]
    lasting = [each for each in cut if not any(step > each.step for step in reaching)]
    if not cut:
        return
    later = [each for each in run.steps if lasting and each.step > lasting[0].step]
    if lasting and reaching and len(later) < MIN_FURTHER_STEPS:
        return
    step = (lasting or cut)[0]
    reached, owned = step.values.get("grads", (1, 1))
    module = _module_without_gradient(run, owned)
    detached = "the loss was computed from a number or from detached outputs"
    is_certain = any(value.get("cut") for kind, value in step.events if kind == "backward")
    yield run.finding(
        step.step,
        symptom=f"after backward() none of the {owned} parameters has a gradient",
        cause=f"no gradient reaches {module}: {detached}"
        if lasting and module
        else detached
        if lasting
        else "this batch gives no gradient, but other steps do",
        severity="critical" if lasting else "info",
        sure=0.98 if is_certain else 0.9,
        where=Where(module=module, source=run.line_of("op:cut", step.step)),
        evidence=[("parameters with a gradient", reached, owned)],
    )


def _module_without_gradient(run: RunContext, owned: int) -> str | None:
    """Returns the module whose optimizer holds ``owned`` parameters, none with a gradient; None if several match."""
    facts = run.latest(CallsFacts)
    every = facts.optimizers if facts is not None else ()
    without = [each.module for each in every if each.parameters == owned and not any(g.with_grad for g in each.groups)]
    return without[0] or None if len(without) == 1 else None


def _is_cut(run: RunContext, step: Watched) -> bool:
    """Returns True if the loss of a step is known to reach no parameter."""
    backward = [value for kind, value in step.events if kind == "backward"]
    reached, owned = step.values.get("grads", (1, 1))
    if not backward or reached or not owned or _is_dropped(step):
        return False
    is_unreached = any(at == step.step and not facts.reached for at, facts in run.every(LossFacts))
    return is_unreached or step.values.get("blind") == FOREIGN_LOSS or any(value.get("cut") for value in backward)


def _is_dropped(step: Watched) -> bool:
    """Returns True if zero_grad was called between the last backward pass and the update."""
    kinds = [kind for kind, _ in step.events]
    return "zero_grad" in kinds[len(kinds) - kinds[::-1].index("backward") :]
