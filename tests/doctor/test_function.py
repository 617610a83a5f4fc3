"""The laws of the function hold for healthy models, and each is broken, in the right module, by several mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import LAWS
from trainwright.doctor.facts.data import RowsFacts
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.function.facts import FunctionFacts, GapFacts, InputsFacts
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Record, Watched, construct

pytestmark = pytest.mark.slow

X, Y = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
IDS = torch.randint(1, 12, (32, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.where(torch.arange(10) < (3 + torch.arange(32) % 7)[:, None], IDS, 0)
JUDGES = {law.name.removeprefix("function."): law.judge for law in LAWS if law.name.startswith("function.")}


class Net(nn.Module):
    """``change`` is what happens between its two layers."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor] = lambda net, h: h) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.change = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3), change
        self.inner, self.calls = nn.Softmax(0), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, F.relu(self.first(x))))


def counted(net: Net, h: Tensor) -> Tensor:
    net.count += 1
    return h


def numbered(net: Net, h: Tensor) -> Tensor:
    net.calls += 1
    return h * net.calls


class Rows(nn.Module):
    """Token ids to one output for each row, or for each position; ``kind`` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.head = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 12)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=kind != "other order")
        self.gru, self.both = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        h, is_pad = self.tokens(ids), ids == 0
        match self.kind:
            case "causal" | "off by one" | "not causal":
                places = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
                mask = places.triu({"causal": 1, "off by one": 2, "not causal": 99}[self.kind])
                return self.head(self.mix(h, src_mask=mask))
            case "both ways":
                return self.head(self.both(h)[0])
            case "mean of all":
                return self.head(h.mean(1))
            case "last state":
                return self.head(self.gru(h)[0][:, -1])
            case "masked":
                h = self.mix(h, src_key_padding_mask=is_pad)
            case "no mask" | "other order":
                h = self.mix(h)
        return self.head((h * ~is_pad[..., None]).sum(1) / (~is_pad).sum(1, keepdim=True))


def watched(model: nn.Module, step: Callable[[nn.Module], Tensor], dtype: torch.dtype = torch.float32) -> Case:
    """The records of one step, but for those of its rows: one step does not tell whether they vary."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="function") as watch:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = step(model)
        loss.backward()
        optimizer.step()
    assert watch.session.failures == []
    return Case([each for each in watch.records if getattr(each, "experiment", "") != RowsFacts.experiment])


def classes(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def rows(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(PADDED), PADDED[:, 0])


def next_tokens(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())


def findings(case: Case, law: str) -> list[Finding]:
    return [each for each in JUDGES[law](case) if isinstance(each, Finding)]


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_the_laws_hold_for_healthy_models(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    normed = Net(lambda net, h: F.dropout(net.norm(h), 0.2, net.training))
    for model, step in ((normed, classes), (Rows("masked"), rows), (Rows("causal"), next_tokens)):
        case = watched(model, step, dtype)
        verdicts = {law: [*JUDGES[law](case)] for law in JUDGES}
        assert not [each for found in verdicts.values() for each in found if isinstance(each, Finding)], verdicts
        for law in ("samples_are_independent", "evaluation_repeats", "inputs_matter"):
            assert isinstance(verdicts[law][0], Holds), (law, verdicts[law])
        applies = {rows: "padding_is_not_seen", next_tokens: "past_does_not_see_the_future"}.get(step)
        assert applies is None or isinstance(verdicts[applies][0], Holds), verdicts


@each_row(
    ("law", "change", "module"),
    [
        ("samples_are_independent", lambda net, h: net.inner(h) * 9, "inner"),
        ("samples_are_independent", lambda net, h: h - h.mean(0), ""),
        ("samples_are_independent", lambda net, h: h.view(12, -1).t(), ""),
        ("samples_are_independent", lambda net, h: h * len(h), None),
        ("evaluation_repeats", counted, ""),
        ("evaluation_repeats", numbered, None),
        ("evaluation_repeats", lambda net, h: h + torch.randn_like(h), None),
        (
            "evaluation_repeats",
            lambda net, h: F.batch_norm(h, net.norm.running_mean, net.norm.running_var, training=True),
            "norm",
        ),
    ],
    ids=str,
)
def test_a_function_of_more_than_the_sample_is_found(law: str, change: Any, module: str | None) -> None:
    [found] = findings(watched(Net(change), classes), law)
    assert found.found.where.module == module


@each_row(
    ("kind", "step", "law", "module"),
    [
        ("other order", rows, "samples_are_independent", "mix.self_attn"),
        ("no mask", rows, "padding_is_not_seen", None),
        ("mean of all", rows, "padding_is_not_seen", None),
        ("last state", rows, "padding_is_not_seen", None),
        ("not causal", next_tokens, "past_does_not_see_the_future", "mix"),
        ("off by one", next_tokens, "past_does_not_see_the_future", "mix"),
        ("both ways", next_tokens, "past_does_not_see_the_future", "both"),
    ],
    ids=str,
)
def test_a_sequence_that_sees_too_much_is_found(kind: str, step: Any, law: str, module: str | None) -> None:
    torch.manual_seed(0)
    [found] = findings(watched(Rows(kind), step), law)
    assert str(found.found.where.module).startswith(str(module))


def constant(net: Net, h: Tensor) -> Tensor:
    return torch.ones_like(h)


class Sliced(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[:, :4], torch.zeros(len(x), 2)], 1))


class Two(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x)


def with_both(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X, X.flip(0)), Y)


@each_row(
    ("model", "step", "idle", "columns"),
    [
        (Net(constant), classes, (0,), ()),
        (Sliced(), classes, (), (4, 5)),
        (Two(), with_both, (1,), ()),
        (Net(), classes, (), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_input_without_effect_is_found_once_it_stays_so(
    model: nn.Module, step: Any, idle: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    case = watched(model, step)
    facts = case.newest(InputsFacts)
    assert facts is not None
    assert (facts.idle, facts.idle_columns) == (idle, columns)
    assert findings(case, "inputs_matter") == []
    later = [record for record in case.records if getattr(record, "experiment", "") == "idle_inputs"]
    later = [Examined(time_s=0.0, step=9, experiment="idle_inputs", values=later[0].values)]  # type: ignore[attr-defined]
    found = findings(Case([*case.records, *later]), "inputs_matter")
    assert len(found) == bool(idle or columns)


PASSES: list[int] = []


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(len(x))
        return super().forward(x)


def passes(columns: int) -> int:
    """How many forward passes the step and the looks at it took."""
    PASSES.clear()
    x = torch.randn(32, columns, generator=torch.Generator().manual_seed(0))
    case = watched(Counted(columns, 3), lambda model: F.cross_entropy(model(x), Y))
    assert case.newest(InputsFacts) is not None
    return len(PASSES)


def test_looks_take_as_many_passes_whatever_the_number_of_columns() -> None:
    assert passes(24) == passes(3)


def trained(*gaps: tuple[int, GapFacts], loss: float = 1.0) -> Case:
    """A run whose loss begins at 2; its modules depend on the mode."""
    steps = range(1, gaps[-1][0] + 1 if gaps else 42)
    records: list[Record] = [
        Watched(time_s=0.0, step=n, loss=2.0 if n < 5 else loss, grad_norm=1.0, lr=0.1) for n in steps
    ]
    records.append(Examined(time_s=0.0, step=1, experiment="modes", values={"depends": 1}))
    records += [Examined(time_s=0.0, step=n, experiment="evaluated", values=strict(vars(gap))) for n, gap in gaps]
    return Case(records, finished=bool(gaps))


@each_row(
    ("gaps", "count"),
    [
        ([(48, GapFacts(1.0, 1.1))], 0),
        ([(48, GapFacts(1.0, 1.9, "norm", 1.0))], 0),
        ([(48, GapFacts(1.0, 1.9, "norm", 1.0)), (90, GapFacts(0.9, 1.9, "norm", 1.0))], 1),
        ([(48, GapFacts(1.0, 1.9)), (64, GapFacts(0.8, 0.9))], 0),
        ([(48, GapFacts(1.98, 5.0))], 0),
        ([(48, GapFacts(1.0, math.inf, "norm", 1.0))], 1),
    ],
    ids=str,
)
def test_a_model_that_is_another_in_eval_mode_is_found(gaps: list[tuple[int, GapFacts]], count: int) -> None:
    assert len(findings(trained(*gaps), "evaluated_is_what_is_trained")) == count


def test_the_gap_is_asked_for_when_statistics_have_followed() -> None:
    asked = [*JUDGES["evaluated_is_what_is_trained"](trained())]
    assert asked == [ExperimentRequest("evaluated")]


def test_the_gap_of_a_normalisation_with_wrong_statistics_is_measured() -> None:
    model = Net(lambda net, h: net.norm(h) if net.training else 100 * (h - 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="function") as watch:
        classes(model).backward()
        optimizer.step()
        facts = watch.session.runner.run_requested(1, [ExperimentRequest("evaluated")])["evaluated"]
    facts.pop("step")
    gap = construct(GapFacts, facts)
    assert gap.eval > 1.1 * gap.train
    assert gap.module == "norm"


def tied(change: Callable[[Any], object]) -> list[Finding]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight  # type: ignore[union-attr,assignment]
    before = change(model) if change is by_data else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        if change is not by_data:
            change(model)
        classes(model).backward()
        optimizer.step()
    del before
    return findings(Case(watch.records), "ties_hold")


def by_data(model: Any) -> None:
    model[2].weight = nn.Parameter(model[2].weight.data)


def replaced(model: Any) -> None:
    model[2].weight = nn.Parameter(model[2].weight.clone().detach())


def loaded(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@each_row(
    ("change", "words"),
    [(by_data, "over the same memory"), (replaced, "are several now"), (loaded, "are several now"), (lambda m: m, "")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_tie_that_breaks_is_found(change: Callable[[Any], object], words: str) -> None:
    assert [words in each.found.symptom for each in tied(change)] == ([True] if words else [])


def test_what_could_not_be_measured_is_said() -> None:
    blind = Examined(time_s=0.0, step=1, experiment=FunctionFacts.experiment, values={"blind": "no replay"})
    for law in ("samples_are_independent", "padding_is_not_seen", "inputs_matter"):
        [verdict] = JUDGES[law](Case([blind]))
        assert getattr(verdict, "why", "") == "no replay"


@each_row(
    ("steps", "same", "verdicts"),
    [(9, 8, [NotApplicable]), (9, 0, [Finding]), (4, 3, []), (1, 0, [])],
)
def test_the_rows_of_every_step_may_be_one_thing(steps: int, same: int, verdicts: list[type]) -> None:
    """The nodes of a graph are the same in each step. Until it is known whether rows vary, nothing is said."""
    mixing = watched(Net(lambda net, h: h - h.mean(0)), classes)
    rows = Examined(time_s=0.0, step=steps, experiment="rows", values={"steps": steps, "batch": 12, "same": same})
    judged = JUDGES["samples_are_independent"](Case([*mixing.records, rows]))
    assert [type(each) for each in judged] == verdicts


@each_row(("large", "count"), [(1e3, 0), (0.0, 1)], ids=str)
def test_what_a_neighbour_changes_by_rounding_alone_is_no_finding(large: float, count: int) -> None:
    """A sum over the batch that cancels but for the rounding of ``large``; and one that is as small, and real."""

    def change(net: Net, h: Tensor) -> Tensor:
        total = h.sum()
        return h + ((total + large) - total - large if large else 1e-5 * total)

    assert len(findings(watched(Net(change), classes), "samples_are_independent")) == count
