from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, TermFacts, TermsFacts, over_most_steps

MIN_STEPS = 3  # Minimum number of examined steps with the fault
MIN_REPLAYS = 2
MAX_ROUNDING = 1e-6  # Maximum ratio of a gradient that cancels, and so consists of rounding errors, to another one
KIND_TEXTS = {
    "no_gradient": "has no gradient",
    "not_updated": "is detached from the weights that this update changes: its gradient reaches only others",
}


@check(stage="loss", confidence=0.85, since_step=1)
def term_without_gradient(run: RunContext, exams: Every[LossFacts]) -> Results:
    """A term of the loss trains nothing: it is part of the printed loss, but has no effect on any update.

    How it is detected: in at least 3 of the first steps, the loop adds a scalar without a graph to a scalar with one,
    and has computed it from outputs of the model, or as the distance of two tensors without a graph. Or in as many
    steps the graph of a term reaches only weights that no update changes before the next backward pass, while another
    term reaches weights that are updated. Or in replays of two of the first steps the gradient of a term is below a
    millionth of that of another term: its parts cancel.

    Exceptions: a scalar that was detached itself, as in surrogate losses and baselines; a term of detached values, if a
    term with a gradient is multiplied by these values.

    Usual cause: the inputs of the term were detached or computed under `no_grad`: a generator's loss uses
    `fake.detach()`; a teacher is compared with itself; a gradient penalty calls `torch.autograd.grad` without
    `create_graph=True`; factors of a balance loss broadcast, so that a softmax is summed over its own axis.

    Looks like: loss.term_dominates, where the term has a gradient and another is far larger.

    Fix: keep the graph of the inputs of the term, or remove the term from the loss. Detach a generated sample only in
    the step of the discriminator.

    Sources: LixiangHan/GANs-for-1D-Signal#7, junyanz/pytorch-CycleGAN-and-pix2pix#1201, nikhilsinghmus/image2reverb#37.
    """
    facts = over_most_steps(exams)
    for sign in facts.signs:
        if sign.kind in KIND_TEXTS and sign.steps >= MIN_STEPS:
            yield run.finding(
                symptom=f"a term of the loss, made by {sign.op}, {KIND_TEXTS[sign.kind]}",
                where=Where(op=sign.op, source=sign.line),
                evidence=[("examined steps in which it trains nothing", sign.steps, 0)],
            )
    seen = [facts.terms for _, facts in run.every(TermsFacts) if facts.shared]
    for number, term in enumerate(seen[-1] if len(seen) >= MIN_REPLAYS else ()):
        if all(len(terms) > number and _cancels(terms[number], terms) for terms in seen):
            yield run.finding(
                symptom=f"the gradient of a term of the loss, made by {term.name}, has the size of rounding errors",
                cause="this term of the loss is constant, whatever the weights: shapes that broadcast, or a softmax "
                "that is summed over its own axis",
                where=Where(op=None if term.name == "output" else term.name),
                evidence=[("its gradient / the largest one", term.shared / max(t.shared for t in seen[-1]), "> 1e-6")],
            )


def _cancels(term: TermFacts, terms: tuple[TermFacts, ...]) -> bool:
    """Returns True if the gradient of a term without its weight is above 0 and consists of rounding errors."""
    size, largest = (
        (term.shared / abs(term.weight) if term.weight else 0.0),
        max(t.shared / (abs(t.weight) or 1.0) for t in terms),
    )
    return 0 < size < MAX_ROUNDING * largest
