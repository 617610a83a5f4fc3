"""The figures that a loop keeps of an evaluation are judged by the numbers that left torch in it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from tests.doctor.law_loops import CLASSES, WIDTH, found, net, states
from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts
from trainwright.errors import UsageError
from trainwright.recorder.escapes import EscapeTape
from trainwright.recorder.figure_program import BYTES, FigureProgram
from trainwright.runlog.records import Logged

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

Batches = list[tuple[Tensor, Tensor]]
Figures = dict[str, float]


def with_loss_over_rows(model: nn.Module, batches: Batches) -> Figures:
    loss, right, rows = 0.0, 0, 0
    for x, y in batches:
        out = model(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        right += (out.argmax(1) == y).sum().item()
        rows += len(y)
    return {"loss": loss / rows, "accuracy": 100 * right / rows}


def mean_of_means(model: nn.Module, batches: Batches) -> Figures:
    losses = [float(F.cross_entropy(model(x), y)) for x, y in batches]
    shares = [(model(x).argmax(1) == y).float().mean().item() for x, y in batches]
    return {"loss": sum(losses) / len(losses), "accuracy": sum(shares) / len(shares)}


def all_at_once(model: nn.Module, batches: Batches) -> Figures:
    out, y = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    return {"loss": F.cross_entropy(out, y).item(), "accuracy": (out.argmax(1) == y).double().mean().item()}


def added_up_in_torch(model: nn.Module, batches: Batches) -> Figures:
    loss, right = torch.zeros(()), torch.zeros(())
    for x, y in batches:
        out = model(x)
        loss = loss + F.cross_entropy(out, y) * len(y)
        right += (out.argmax(1) == y).sum()
    rows = sum(len(y) for _, y in batches)
    return {"loss": loss.item() / rows, "accuracy": right.item() / rows}


def masked(model: nn.Module, batches: Batches) -> Figures:
    loss, right, count = 0.0, 0, 0
    for x, y in batches:
        out, real = model(x), x[:, 0] > 0
        loss += (F.cross_entropy(out, y, reduction="none") * real).sum().item()
        right += ((out.argmax(1) == y) & real).sum().item()
        count += real.sum().item()
    return {"loss": loss / count, "accuracy": right / count}


def of_two_losses(model: nn.Module, batches: Batches) -> Figures:
    class_loss = [F.cross_entropy(model(x), y).item() for x, y in batches]
    size = [model(x).square().mean().item() for x, y in batches]
    return {"loss": sum(class_loss) / len(batches) + 3 * sum(size) / len(batches)}


def a_sum(model: nn.Module, batches: Batches) -> Figures:
    return {"loss": sum(F.cross_entropy(model(x), y).item() for x, y in batches)}


def as_arrays(model: nn.Module, batches: Batches) -> Figures:
    classes = [(model(x).argmax(1).tolist(), y.tolist()) for x, y in batches]
    return {"accuracy": 0.1 * sum(len(a) for a, _ in classes) / len(classes)}


def counted_twice(model: nn.Module, batches: Batches) -> Figures:
    loss, rows = 0.0, 0
    for x, y in batches:
        out = model(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        loss += F.cross_entropy(out, y, reduction="sum").item()
        rows += len(y)
    return {"loss": loss / rows}


def means_over_rows(model: nn.Module, batches: Batches) -> Figures:
    return {"loss": sum(F.cross_entropy(model(x), y).item() for x, y in batches) / sum(len(y) for _, y in batches)}


def shares_over_other_rows(model: nn.Module, batches: Batches) -> Figures:
    return {"accuracy": sum((model(x).argmax(1) == y).sum().item() for x, y in batches) / (len(batches) * 64)}


def of_the_last_batch(model: nn.Module, batches: Batches) -> Figures:
    for x, y in batches:
        totals = {"loss": 0.0, "class": 0.0}
        out = model(x)
        totals["class"] += F.cross_entropy(out, y).item()
        totals["loss"] += (F.cross_entropy(out, y) + out.square().mean()).item()
    return {name: total / len(batches) for name, total in totals.items()}


def negated(model: nn.Module, batches: Batches) -> tuple[float, float]:
    loss, accuracy = with_loss_over_rows(model, batches).values()
    return -loss, accuracy


def negated_share(model: nn.Module, batches: Batches) -> tuple[float, float]:
    loss, accuracy = with_loss_over_rows(model, batches).values()
    return loss, -accuracy / 100


def as_a_score(model: nn.Module, batches: Batches) -> Figures:
    return {"neg_error": -with_loss_over_rows(model, batches)["loss"]}


def sum_over_rows(model: nn.Module, batches: Batches) -> float:
    return sum(F.cross_entropy(model(x), y).item() * len(y) for x, y in batches)


def one_row_more(model: nn.Module, batches: Batches) -> Figures:
    loss, rows = 0.0, 1
    for x, y in batches:
        loss += F.cross_entropy(model(x), y, reduction="sum").item()
        rows += len(y)
    return {"loss": loss / rows}


def begun_at_one(model: nn.Module, batches: Batches) -> Figures:
    loss, rows = 30.0, 0
    for x, y in batches:
        loss += F.cross_entropy(model(x), y, reduction="sum").item()
        rows += len(y)
    return {"loss": loss / rows}


def of_the_last_assigned(model: nn.Module, batches: Batches) -> tuple[float, float]:
    loss, rows = 0.0, 0
    for x, y in batches:
        loss = F.cross_entropy(model(x), y, reduction="sum").item()
        rows += len(y)
    return loss / rows, float(rows)


def over_the_last(model: nn.Module, batches: Batches) -> tuple[float, float]:
    loss, right, rows = 0.0, 0.0, 0
    for x, y in batches:
        out = model(x)
        loss += F.nll_loss(out.log_softmax(1), y, reduction="sum").item()
        right += (out.argmax(1) == y).sum().item()
        rows = len(y)
    return loss / rows, right / rows


def squared(model: nn.Module, batches: Batches) -> Figures:
    error = sum((model(x).softmax(1) - F.one_hot(y, CLASSES)).square().sum(1).mean().item() for x, y in batches)
    return {"loss": 30.0 * error / len(batches)}


class Summed:
    """Sums that are never set back."""

    def __init__(self) -> None:
        self.loss, self.rows = 0.0, 0

    def __call__(self, model: nn.Module, batches: Batches) -> Figures:
        for x, y in batches:
            self.loss += F.cross_entropy(model(x), y, reduction="sum").item()
            self.rows += len(y)
        return {"loss": self.loss / self.rows}


class Meter:
    """As in many examples."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, value: float, rows: int) -> None:
        self.val, self.sum, self.count = value, self.sum + value * rows, self.count + rows
        self.avg = self.sum / self.count


def by_meters(model: nn.Module, batches: Batches) -> list[Meter]:
    losses, shares = Meter(), Meter()
    for x, y in batches:
        out = model(x)
        losses.update(F.cross_entropy(out, y).item(), len(y))
        shares.update((out.argmax(1) == y).float().mean().item(), len(y))
    return [losses, shares]


def transformed(model: nn.Module, batches: Batches) -> Figures:
    loss = with_loss_over_rows(model, batches)["loss"]
    return {"loss": loss, "perplexity": math.exp(loss), "bits": loss / math.log(2), "root": loss**0.5}


def as_a_tuple(model: nn.Module, batches: Batches) -> tuple[float, ...]:
    return tuple(with_loss_over_rows(model, batches).values())


def sum_and_count(model: nn.Module, batches: Batches) -> tuple[float, int]:
    return sum(F.cross_entropy(model(x), y).item() for x, y in batches), len(batches)


def of_both_parts(model: nn.Module, batches: Batches) -> Figures:
    first, second = with_loss_over_rows(model, batches[:1]), with_loss_over_rows(model, batches[1:])
    return {f"a {name}": value for name, value in first.items()} | {f"b {name}": v for name, v in second.items()}


Evaluate = Callable[[nn.Module, Batches], object]


def evaluated(evaluate: Evaluate, *, twice: bool = False) -> tw.Watch:
    """A loop that evaluates after every third step; ``twice``: once more at the end, with the same outcome."""
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH)
    y = (x @ torch.randn(WIDTH, CLASSES)).argmax(1)
    held_out = list(zip(x[64:].split(24), y[64:].split(24)))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shown: object = None
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(6 if twice else 7):
            optimizer.zero_grad()
            F.cross_entropy(model(x[:64]), y[:64]).backward()
            optimizer.step()
            if step % 3 == 2:
                for _ in range(2 if twice and step == 5 else 1):
                    model.eval()
                    with torch.no_grad():
                        shown = evaluate(model, held_out)
                model.train()
    assert shown and watch.session.failures == []
    assert not torch._C._len_torch_function_stack()
    return watch


@pytest.mark.parametrize("evaluate", [with_loss_over_rows, all_at_once, added_up_in_torch, masked])
def test_averages_are_averages(evaluate: Evaluate) -> None:
    law = states(evaluated(evaluate), "data")["figures_are_averages"]
    assert law.state == "held"
    assert "shown.loss" in law.why and "shown.accuracy" in law.why


@pytest.mark.parametrize("evaluate", [by_meters, transformed, as_a_tuple, sum_and_count, of_both_parts, as_a_score])
def test_figures_of_other_forms_are_no_finding(evaluate: Evaluate) -> None:
    assert states(evaluated(evaluate), "data")["figures_are_averages"].state in ("held", "not applicable")


@pytest.mark.parametrize("evaluate", [of_two_losses, as_arrays])
def test_what_cannot_be_told_is_not_judged(evaluate: Evaluate) -> None:
    assert states(evaluated(evaluate), "data")["figures_are_averages"].state == "not applicable"


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        (counted_twice, "shown.loss"),
        (means_over_rows, "over its rows"),
        (shares_over_other_rows, "shown.accuracy"),
        (of_the_last_batch, "what its last batch adds over"),
        (a_sum, "the sum over the batches"),
        (begun_at_one, "30 is added to its sum"),
        (of_the_last_assigned, "what its last batch adds over its rows"),
        (over_the_last, "rows of its last batch"),
        (negated, "with the other sign"),
        (negated_share, "with the other sign"),
        (sum_over_rows, "the sum over its rows, divided by nothing"),
        (squared, "30 times the mean"),
        (Summed(), "before it have summed up"),
    ],
)
def test_what_is_no_average_is_found_at_its_line(evaluate: Evaluate, words: str) -> None:
    finding = found(evaluated(evaluate), "law.data.figures_are_averages")
    assert finding.severity == "warning" and (finding.where.source or "").startswith("test_figures.py:")
    assert words in finding.symptom


@pytest.mark.parametrize("evaluate", [counted_twice, shares_over_other_rows])
def test_a_last_evaluation_that_changes_no_number_hides_none(evaluate: Evaluate) -> None:
    assert states(evaluated(evaluate, twice=True), "data")["figures_are_averages"].state == "broken"


@pytest.mark.parametrize("evaluate", [mean_of_means, one_row_more])
def test_what_other_rows_would_give_as_well_is_no_warning(evaluate: Evaluate) -> None:
    assert found(evaluated(evaluate), "law.data.figures_are_averages").severity == "info"


def deciding(right: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    """An accuracy of these decisions, beside the loss."""

    def evaluate(model: nn.Module, batches: Batches) -> Figures:
        loss, correct, rows = 0.0, 0.0, 0
        for x, y in batches:
            out = model(x)
            loss += F.cross_entropy(out, y, reduction="sum").item()
            correct += right(out, y).sum().item()
            rows += len(y)
        return {"loss": loss / rows, "accuracy": correct / rows}

    return evaluate


def with_padding(model: nn.Module, batches: Batches) -> Figures:
    """Every second target is left out of the loss, and counted in the accuracy."""
    loss, shares = 0.0, 0.0
    for x, y in batches:
        out, wanted = model(x), y.where(torch.arange(len(y)) % 2 == 0, -100)
        loss += F.cross_entropy(out, wanted).item() * len(y)
        shares += (out.argmax(-1) == wanted).double().mean().item() * len(y)
    return {"loss": loss / 64, "accuracy": shares / 64}


def by_position(model: nn.Module, batches: Batches) -> Figures:
    """A tensor (rows, classes, positions), as losses of sequences take it."""
    out = torch.stack([model(x) for x, _ in batches[:2]], 2)
    y = torch.stack([y for _, y in batches[:2]], 1)
    right = (out.argmax(1) == y).float()
    return {"loss": F.cross_entropy(out, y).item(), "accuracy": right.mean().item()}


def by_a_matrix(model: nn.Module, batches: Batches) -> Figures:
    """Confusions are added up in one matrix."""
    loss, matrix = 0.0, torch.zeros(CLASSES, CLASSES)
    for x, y in batches:
        out = model(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        pairs = torch.bincount(y * CLASSES + out.argmax(1), minlength=CLASSES**2)
        matrix += pairs.view(CLASSES, CLASSES)
    return {"loss": loss / 64, "accuracy": (matrix.diag().sum() / matrix.sum()).item()}


def of_clean_labels(model: nn.Module, batches: Batches) -> Figures:
    """Each sixth label of the loss is wrong."""
    out, y = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    noisy = torch.where(torch.arange(64) % 6 == 0, (y + 1) % CLASSES, y)
    return {"loss": F.cross_entropy(out, noisy).item(), "accuracy": (out.argmax(1) == y).float().mean().item()}


@pytest.mark.parametrize(
    ("evaluate", "state"),
    [
        (with_loss_over_rows, "held"),
        (all_at_once, "held"),
        (by_position, "held"),
        (by_a_matrix, "held"),
        (of_clean_labels, "not applicable"),
        (deciding(lambda out, y: torch.max(out, 1)[1] == y), "held"),
        (torch.inference_mode()(deciding(lambda out, y: out.argmax(1) == y.clone())), "held"),
        (deciding(lambda out, y: out.topk(2, dim=1).indices.eq(y[:, None]).any(1)), "held"),
        (deciding(lambda out, y: out.argmax(1) != y), "broken"),
        (deciding(lambda out, y: out.argmin(1) == y), "broken"),
        (deciding(lambda out, y: out.argmax(1) == y.roll(1)), "broken"),
        (deciding(lambda out, y: out.argmax(0)[y] == torch.arange(len(y))), "broken"),
        (with_padding, "broken"),
        (as_arrays, "not applicable"),
        (squared, "not applicable"),
    ],
)
def test_perfect_predictions_are_right(evaluate: Evaluate, state: str) -> None:
    watch = evaluated(evaluate)
    assert states(watch, "data")["perfect_predictions_are_right"].state == state
    if state == "broken":
        source = found(watch, "law.data.perfect_predictions_are_right").where.source
        assert (source or "").startswith("test_figures.py:")


def distance_of(figure: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    """A figure of outputs and of a reference of the same shape."""
    reference = torch.randn(24, CLASSES)

    def evaluate(model: nn.Module, batches: Batches) -> object:
        return figure(model(batches[0][0]), reference).item()

    return evaluate


def between_sets(out: Tensor, real: Tensor) -> Tensor:
    within = torch.cdist(out, out).mean() / 2 + torch.cdist(real, real).mean() / 2
    return torch.cdist(out, real).mean() - within


def without_bias(out: Tensor, real: Tensor) -> Tensor:
    pairs = len(out) * (len(out) - 1)
    within = torch.cdist(out, out).sum() / pairs + torch.cdist(real, real).sum() / pairs
    return torch.cdist(out, real).mean() - within / 2


@pytest.mark.parametrize(
    ("figure", "state"),
    [
        (between_sets, "held"),
        (without_bias, "held"),
        (lambda out, y: (out - y).abs().mean(), "held"),
        (lambda out, y: -F.mse_loss(out, y), "held"),
        (lambda out, y: 1 - (y - out).square().sum() / (y - y.mean()).square().sum(), "held"),
        (lambda out, y: torch.cdist(out, y).mean() - torch.cdist(out, out).mean() / 2, "broken"),
        (lambda out, y: torch.cdist(out, y).mean() + torch.cdist(out, out).mean() / 2, "broken"),
        (lambda out, y: torch.cdist(out, y).sum() - torch.cdist(out, out).mean(), "broken"),
        (lambda out, y: (out - 2 * y).abs().mean() - (out - y).abs().mean(), "not applicable"),
        (lambda out, y: F.mse_loss(out, y) + 0.1 * torch.ones(3).sum(), "not applicable"),
        (lambda out, y: ((out - y).square() + out.exp()).mean(), "not applicable"),
    ],
)
def test_distances_vanish(figure: Callable[[Tensor, Tensor], Tensor], state: str) -> None:
    watch = evaluated(distance_of(figure))
    assert states(watch, "data")["distances_vanish"].state == state
    if state == "broken":
        finding = found(watch, "law.data.distances_vanish")
        assert (finding.where.source or "").startswith("test_figures.py:") and finding.symptom.startswith("shown")


@pytest.mark.parametrize(
    ("figure", "state"),
    [
        (lambda out, y: (out - y).square().mean(), "held"),
        (lambda out, y: (out + y).square().mean(), "broken"),
        (lambda out, y: ((out + y).pow(2).sum() / len(y)).sqrt(), "broken"),
        (lambda out, y: F.l1_loss(-out, y), "broken"),
        (lambda out, y: (out + y).mean(), "not applicable"),
        (lambda out, y: (out + -y).abs().mean(), "not applicable"),
    ],
)
def test_a_distance_is_less_than_with_the_other_sign(figure: Callable[[Tensor, Tensor], Tensor], state: str) -> None:
    def evaluate(model: nn.Module, batches: Batches) -> object:
        out = model(batches[0][0])
        known = torch.from_numpy(out.numpy() * 1.1)
        return figure(out, known).item()

    watch = evaluated(evaluate)
    assert states(watch, "data")["distances_vanish"].state == state
    if state == "broken":
        assert "with the other sign" in found(watch, "law.data.distances_vanish").symptom


def of_classes(out: Tensor) -> object:
    return [(out[:n].sum() / n).item() for n in range(3)]


@pytest.mark.parametrize(
    ("figure", "state"),
    [
        (lambda out: out.square().mean().sqrt().item(), "held"),
        (lambda out: (-out.square()).mean().sqrt().item(), "broken"),
        (of_classes, "held"),
    ],
)
def test_a_figure_of_numbers_is_a_number(figure: Callable[[Tensor], object], state: str) -> None:
    def evaluate(model: nn.Module, batches: Batches) -> object:
        return figure(model(batches[0][0]))

    assert states(evaluated(evaluate), "data")["figures_are_numbers"].state == state


def test_a_share_that_is_explained_may_stand_beside_a_distance() -> None:
    reference = torch.randn(24, CLASSES)

    def evaluate(model: nn.Module, batches: Batches) -> object:
        out = model(batches[0][0])
        r2 = 1 - (out - reference).square().sum() / (reference - reference.mean()).square().sum()
        return (out - reference).abs().mean().item(), r2.item()

    assert states(evaluated(evaluate), "data")["distances_vanish"].state == "held"


def of_calls_without_a_loss(right: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    """A share with padding, of which no name says that it is an accuracy; the loss is of other calls."""

    def evaluate(model: nn.Module, batches: Batches) -> object:
        loss, correct, rows = 0.0, 0.0, 0
        for x, y in batches:
            loss += F.cross_entropy(model(x), y, reduction="sum", ignore_index=0).item()
            correct += right(model(x).argmax(1), y).sum().item()
            rows += (y != 0).sum().item()
        return loss / rows, correct / rows

    return evaluate


def errors(model: nn.Module, batches: Batches) -> float:
    wrong = sum((model(x).argmax(1) != y).sum().item() for x, y in batches)
    return wrong / sum(len(y) for _, y in batches)


def right_called_errors(model: nn.Module, batches: Batches) -> float:
    errors = 0
    for x, y in batches:
        errors += (model(x).argmax(1) == y).sum().item()
    return errors / sum(len(y) for _, y in batches)


def wrong_called_hits(model: nn.Module, batches: Batches) -> float:
    hits = []
    for x, y in batches:
        hits.append((model(x).argmax(1) != y).double().mean().item())
    return sum(hits) / len(hits)


@pytest.mark.parametrize(
    ("evaluate", "state"), [(errors, "held"), (right_called_errors, "broken"), (wrong_called_hits, "broken")]
)
def test_what_is_counted_has_a_name_for_it(evaluate: Callable[..., float], state: str) -> None:
    assert states(evaluated(evaluate), "data")["perfect_predictions_are_right"].state == state


@pytest.mark.parametrize(
    ("right", "state"),
    [
        (lambda out, y: (out == y) & (y != 0), "held"),
        (lambda out, y: out.ne(y) & (y != 0), "broken"),
        (lambda out, y: (out == y)[y != 0], "held"),
        (lambda out, y: out == y, "broken"),
        (lambda out, y: (out == y) | (y != 0), "broken"),
        (lambda out, y: (out == y) & (y < 2), "broken"),
        (lambda out, y: (out == y) & (y == 0), "broken"),
        (lambda out, y: (out == 2) & (y != 0), "not applicable"),
        (lambda out, y: ((out == y) | (out == (y + 1) % CLASSES)) & (y != 0), "not applicable"),
    ],
)
def test_decisions_are_right_where_they_equal_the_targets(
    right: Callable[[Tensor, Tensor], Tensor], state: str
) -> None:
    watch = evaluated(of_calls_without_a_loss(right))
    assert states(watch, "data")["perfect_predictions_are_right"].state == state


def test_a_program_runs_again_on_other_outputs() -> None:
    program, out, total = FigureProgram(), torch.randn(6, 3), torch.zeros(2)
    program.called((out, None))
    twice = out * 2
    program.add(torch.mul, (out, 2), {}, twice)
    program.add(Tensor.add_, (total, twice[:2, 0]), {}, total.add_(twice[:2, 0]))  # of no known output
    loss = F.mse_loss(twice, target := torch.ones(6, 3))
    program.add(F.mse_loss, (twice, target), {}, loss)
    program.left(loss, 0)
    assert program.run(lambda call, outputs: outputs)[0] == loss
    assert program.run(lambda call, outputs: [torch.full((6, 3), 0.5)])[0] == 0
    program.called(torch.zeros(BYTES // 4 + 1))
    assert not program.is_whole and program.outputs == []


def log_probabilities(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batches], Figures]:
    def evaluate(model: nn.Module, batches: Batches) -> Figures:
        return {"loss": sum(F.nll_loss(change(model(x)), y).item() for x, y in batches) / len(batches)}

    return evaluate


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda out: out.log_softmax(1), "held"),
        (lambda out: out.bfloat16().log_softmax(1).float(), "held"),
        (lambda out: (out.softmax(1) + 1e-8).log(), "held"),
        (lambda out: out.log_softmax(0), "broken"),
        (lambda out: out.log_softmax(1).round(), "broken"),
        (lambda out: 2 * out.log_softmax(1), "broken"),
    ],
)
def test_logarithms_of_probabilities(change: Callable[[Tensor], Tensor], state: str) -> None:
    watch = evaluated(log_probabilities(change))
    assert states(watch, "loss")["probabilities_add_up"].state == state


def test_the_tape_follows_outputs_and_holds_none() -> None:
    tape = EscapeTape()
    out = torch.randn(6, 3)
    tape.called({"logits": out}, 6)
    tape.start()
    right = (out.argmax(1) == torch.zeros(6)).float().sum().item()
    loss = F.mse_loss(out, torch.zeros(6, 3)).item()
    other = torch.ones(4).sum().item()
    tape.stop()
    assert [each.value for each in tape.escapes] == [right, loss, other]
    ones, twos, threes = (each.origin for each in tape.escapes)
    assert ones is not None and (ones.reduction, ones.count, ones.decided) == ("sum", 6, True)
    assert twos is not None and (twos.function, twos.reduction, twos.decided) == ("mse_loss", "mean", False)
    assert threes is None
    del out
    assert all(reference() is None for reference, _ in tape._known.values())


@pytest.mark.parametrize(("factor", "state"), [(1.0, "held"), (3.0, "broken")])
def test_told_figures_are_judged_and_recorded(factor: float, state: str) -> None:
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(48, WIDTH), torch.arange(48) % CLASSES
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(rows: slice) -> float:
        with torch.no_grad():
            return factor * F.cross_entropy(model(x[rows]), y[rows]).item()

    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            watch.log(val_loss=sum(map(loss_of, (slice(0, 24), slice(24, 48)))) / 2, halves=torch.tensor(2.0))
    assert states(watch, "data")["figures_are_averages"].state == state
    logged = [each for each in watch.records if isinstance(each, Logged)]
    assert [each.step for each in logged] == [1, 2, 3, 4, 5, 6] and logged[0].figures["halves"] == 2.0
    with pytest.raises(UsageError, match="val_loss is a list"):
        watch.log(val_loss=[1.0])  # type: ignore[arg-type]


def kept(keep: Callable[[int], bool], *, of_a_copy: bool = False) -> tw.Watch:
    """A loop that keeps the loss of some of its evaluations, of the model or of an average of it."""
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(48, WIDTH), torch.arange(48) % CLASSES
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    val_loss = 0.0
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(average.parameters(), model.parameters()):
                    one.lerp_(other, 0.2)
                figure = with_loss_over_rows((average if of_a_copy else model).eval(), [(x, y)])["loss"]
            if keep(step):
                val_loss = figure
            figure = 0.0
            model.train()
    assert val_loss and watch.session.failures == []
    return watch


def test_a_figure_goes_with_its_evaluations() -> None:
    assert states(kept(lambda step: True), "data")["figures_are_averages"].state == "held"
    finding = found(kept(lambda step: step == 0), "law.data.figures_are_averages")
    assert "val_loss" in finding.symptom and "as an evaluation before has left it" in finding.symptom


def test_evaluations_of_an_average_are_heard() -> None:
    facts = Case(kept(lambda step: True, of_a_copy=True).records).newest(EvaluationFacts)
    assert facts is not None and facts.rows == 48 and [each.of for each in facts.computed]


def swapped(model: nn.Module, batches: Batches) -> Figures:
    figures = with_loss_over_rows(model, batches)
    return {"loss": figures["accuracy"] / 100, "accuracy": figures["loss"]}


def test_figures_have_their_own_names() -> None:
    finding = found(evaluated(swapped), "law.data.figures_are_averages")
    assert finding.severity == "warning" and finding.symptom.startswith("shown.loss is 0.")


def of_rows(losses: list[tuple[float, int]], before: list[tuple[float, int]]) -> float:
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


Average = Callable[[list[tuple[float, int]], list[tuple[float, int]]], float]


@pytest.mark.parametrize(
    ("average", "state"),
    [
        (of_rows, "held"),
        (lambda losses, before: sum(loss for loss, _ in losses) / len(losses), "held"),
        (lambda losses, before: 0.9 * losses[-1][0] + 0.1 * losses[-2][0], "not applicable"),
        (lambda losses, before: sum(loss for loss, _ in losses), "not applicable"),
        (lambda losses, before: sum(loss for loss, _ in losses) / 64, "broken"),
        (lambda losses, before: sum(loss * rows for loss, rows in losses) / len(losses), "broken"),
        (lambda losses, before: sum(loss for loss, _ in before + losses) / len(losses), "broken"),
    ],
)
def test_averages_of_training(average: Average, state: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH)
    loader = DataLoader(TensorDataset(x, (x @ torch.randn(WIDTH, CLASSES)).argmax(1)), batch_size=16, shuffle=True)
    model, history, before = net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(3):
            losses: list[tuple[float, int]] = []
            for inputs, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), y)
                loss.backward()
                optimizer.step()
                losses.append((loss.item(), len(y)))
            history.append({"train_loss": average(losses, before)})
            before = before + losses
    assert history and watch.session.failures == []
    assert states(watch, "data")["training_averages_are_averages"].state == state
