from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps


@check(points_at=("criterion", "op:cross_entropy"), stage="loss", confidence=0.9, since_step=1)
def class_weights_permuted(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The class weights of the loss are in the wrong order: most classes have the weight of another class.

    Why it matters: frequent classes get the weights of rare ones. The loss falls as usual.

    How it is detected: the class weights fall with the frequencies of the classes among the targets only if the classes
    are sorted as text (0, 1, 10, 11, 2, ...) or moved by one. In that order the correlation of the logarithms is below
    -0.95, and in the order of the class numbers it is at least 0.3 weaker.

    Exceptions: fewer than five classes, classes of nearly equal frequency, weights that do not depend on the frequency.

    Usual cause: the counts are in a dictionary whose keys are strings, or in the order in which labels were first read.

    Fix: `counts = torch.bincount(labels, minlength=num_classes)`, which is in the order of the class numbers.

    Sources: Chumsy0725/logit-adj-pytorch#2, amanshenoy/multilogue-net#21.
    """
    for each in over_most_steps(exams).given:
        if each.weights_of:
            wrong = sum(n != other for n, other in enumerate(each.weights_of))
            first = next(n for n, other in enumerate(each.weights_of) if n != other)
            yield run.finding(
                symptom=f"{wrong} of {len(each.weights_of)} class weights fit the frequency of another class: that of "
                f"class {first} fits class {each.weights_of[first]}",
                where=Where(op=each.op, source=each.line),
                evidence=[("class whose frequency each weight fits", list(each.weights_of), "0, 1, 2, ...")],
            )
