"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.calls import NamesFacts
from trainwright.runlog.records import Where


@check(stage="loop", confidence=0.9, needs=NamesFacts)
def name_never_read(run: RunContext) -> Iterator[Result]:
    """An attribute or a key is set that nothing reads; its name resembles one that is read.

    Why it matters: Python makes a new attribute of a misspelled one, so the value has no effect.

    How it is detected: names on optimizers, their groups, modules and parameters that are close to a known name, or a
    usual other word for it (`learning_rate` for `lr`), and that the class does not read in its own code.

    Usual cause: `module.requires_grad = False`, which freezes nothing; `optimizer.lr = ...`; a misspelled key.

    Fix: set the name that is read: `module.requires_grad_(False)`, `group["lr"]`, `dropout.p`.

    Sources: a frequent question at discuss.pytorch.org ("requires_grad on a module").
    """
    facts = run.latest(NamesFacts)
    if facts is None or not facts.unread:
        yield Passed(f"the attributes of {facts.examined if facts else 0} objects")
        return
    first = facts.unread[0]
    yield run.finding(
        run.last_step,
        symptom=f"{first.name} = {first.value} was set on {first.owner}, and nothing reads it",
        remedy=f"set {first.known}",
        where=Where(module=first.module),
        evidence=[(f"set on {each.owner}", each.name, each.known) for each in facts.unread[:8]],
    )
