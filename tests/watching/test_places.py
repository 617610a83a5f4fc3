"""The lines of a finding: where its object is made or called, if that is one line, and the call that shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, GeneratorType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from trainwright.runs.records import Found, Where
from trainwright.watching.places import SourcePlaces


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)  # made embed
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.twice = nn.Linear(4, 4)
        self.plain = [nn.Linear(4, 4)]  # made plain

    def forward(self, x: Tensor) -> Tensor:  # forward
        x = self.embed(x)  # call embed
        x = torch.softmax(x, -1)  # op
        x = self.twice(x)
        return self.twice(self.body(x))  # call body


class Data(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:  # item
        return torch.zeros(4)

    def __len__(self) -> int:
        return 8


def program() -> SourcePlaces:
    model = nn.Sequential(Net(), nn.Linear(4, 2))  # sequential
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # schedule
    loader = DataLoader(Data())  # loader
    frames = [sys._getframe()]
    return SourcePlaces([model], [optimizer], [schedule], [loader], lambda: frames)


def found(code: str, stage: str, **where: object) -> Found:
    return Found(
        time_s=0.0,
        code=code,
        severity="warning",
        step=1,
        symptom="",
        cause="",
        remedy="",
        sure=1.0,
        stage=stage,
        where=Where(**where),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("finding", "mark"),
    [
        (found("optim.lr_too_low", "update"), "# optimizer"),
        (found("schedule.never_stepped", "loop"), "# schedule"),
        (found("data.unnormalised_input", "input"), "# item"),
        (found("model.dead_relu", "forward", module="0.body.1"), "# call body"),
        (found("gradient.vanishing", "backward", module="0.embed.weight"), "# call embed"),
        (found("model.excess_dropout", "forward", module="0.embed"), "# made embed"),
        (found("model.softmax_over_samples", "forward", module="0", op="softmax"), "# op"),
        (found("optim.params_not_registered", "update", module="0.plain"), "# made plain"),
        (found("model.dead_relu", "forward", module="0.twice"), "self.twice = "),
        (found("model.dead_relu", "forward", module="1"), "# sequential"),
        (found("gradient.spike", "backward"), None),
        (found("optim.lr_too_low", "update", rank=1), None),
    ],
    ids=lambda value: value.code if isinstance(value, Found) else None,
)
def test_the_line_of_what_a_finding_concerns(finding: Found, mark: str | None) -> None:
    line, _ = program().place_of(finding)
    if mark is None:
        assert line is None
        return
    assert line is not None
    name, _, number = line.partition(":")
    assert name == Path(__file__).name and mark in Path(__file__).read_text().splitlines()[int(number) - 1]


def test_two_of_a_kind_have_no_line() -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(models[0].parameters()), torch.optim.SGD(models[1].parameters())]

    def loop() -> Iterator[None]:
        torch.optim.SGD(models[0].parameters())
        torch.optim.SGD(models[1].parameters())
        yield

    places = SourcePlaces(models, optimizers, frames=lambda: frames_of(loop()))
    assert places.place_of(found("optim.lr_too_low", "update")) == (None, None)


def test_an_object_that_raises_has_no_line() -> None:
    class Bad:
        @property
        def dataset(self) -> object:
            raise LookupError

    assert SourcePlaces([], [], loaders=[Bad()]).place_of(found("data.constant_input", "input")) == (None, None)


def test_a_schedule_is_found_in_the_loop() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # plateau
        yield

    model = nn.Linear(1, 1)
    frames = frames_of(loop(model, torch.optim.SGD(model.parameters())))
    places = SourcePlaces([model], [], frames=lambda: frames)
    lines = Path(__file__).read_text().splitlines()
    line, _ = places.place_of(found("schedule.plateau_mode", "loop"))
    assert line is not None and "# plateau" in lines[int(line.partition(":")[2]) - 1]


def frames_of(loop: object) -> list[FrameType]:
    """Returns the frame of a function that is suspended or has not begun."""
    assert isinstance(loop, GeneratorType) and loop.gi_frame is not None
    return [loop.gi_frame]


def setup(model: nn.Module, data: Dataset[Tensor], state: dict[str, Tensor]) -> Iterator[object]:
    torch.manual_seed(0)  # seed
    model.load_state_dict(state, strict=False)  # load
    parts = (
        torch.utils.data.Subset(data, range(6)),  # split
        torch.utils.data.Subset(data, range(6, 8)),
    )
    for each in model.modules():
        if isinstance(each, nn.Embedding):
            nn.init.normal_(each.weight)
        if isinstance(each, nn.Linear):
            nn.init.normal_(each.weight, std=3.0)  # initialization
    yield parts


@pytest.mark.parametrize(
    ("finding", "mark"),
    [
        (found("loop.random_state_repeats", "loop"), "# seed"),
        (found("checkpoint.weights_not_loaded", "input"), "# load"),
        (found("data.train_val_overlap", "input", source="evaluate.py:3"), "# split"),
        (found("model.init_too_large", "forward", module="0"), "# initialization"),
    ],
    ids=lambda value: value.code if isinstance(value, Found) else None,
)
def test_the_line_of_a_call_before_the_loop(finding: Found, mark: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    frames = frames_of(setup(model, Data(), {}))
    places = SourcePlaces([model], [], frames=lambda: frames)
    line, shown_at = places.place_of(finding, [("forward", "train.py:9"), ("step", "train.py:10")])
    assert line is not None and mark in Path(__file__).read_text().splitlines()[int(line.partition(":")[2]) - 1]
    assert shown_at == (finding.where.source or ("train.py:10" if finding.stage == "loop" else "train.py:9"))


class Trainer:
    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())  # trainer's optimizer
        self.other = torch.optim.AdamW(self.model.parameters())

    def run(self, watch: Callable[[Trainer], SourcePlaces]) -> SourcePlaces:
        return watch(self)


def trained_in_several_functions() -> SourcePlaces:
    """Two objects of each class: one is watched, and bound to a variable of a function that calls the loop."""
    trainer, sampler = Trainer(), RandomSampler(range(8))  # sampler
    optimizer = trainer.optimizer
    optimizer.load_state_dict(trainer.other.state_dict())  # optimizer's state
    trainer.other.load_state_dict(optimizer.state_dict())
    train_loader = DataLoader(Data(), sampler=sampler)  # loader
    validation_loader = DataLoader(Data())
    trainer.model.embed = nn.Linear(4, 4)  # replaced
    criterion = nn.NLLLoss()  # criterion
    assert len(validation_loader) == 8 and criterion.reduction == "mean"

    def watched(trainer: Trainer, loader: DataLoader[Tensor]) -> SourcePlaces:
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frames.append(frame)
            frame = frame.f_back
        model, optimizers = trainer.model, [trainer.optimizer]
        return SourcePlaces([model], optimizers, (), [loader], lambda: frames)

    return trainer.run(lambda each: watched(each, train_loader))


@pytest.mark.parametrize(
    ("finding", "mark"),
    [
        (found("optim.lr_too_low", "update"), "# trainer's optimizer"),
        (found("optim.moments_of_other_params", "update"), "# optimizer's state"),
        (found("data.worker_rng_duplicate", "input", source="train.py:9"), "# loader"),
        (found("data.samples_never_drawn", "input", source="train.py:9"), "# sampler"),
        (found("model.excess_dropout", "forward", module="embed"), "# replaced"),
        (found("loss.real_class_ignored", "label", op="nll_loss", source="train.py:9"), "# criterion"),
        (found("loss.real_class_ignored", "label", op="cross_entropy", source="train.py:9"), None),
    ],
    ids=lambda value: value.code if isinstance(value, Found) else None,
)
def test_the_line_that_makes_an_object_is_known_by_its_variable(finding: Found, mark: str | None) -> None:
    line, shown_at = trained_in_several_functions().place_of(finding)
    if mark is None:
        assert line == "train.py:9"
        return
    assert line is not None and mark in Path(__file__).read_text().splitlines()[int(line.partition(":")[2]) - 1]
    assert shown_at == finding.where.source


def test_a_check_that_knows_the_cause_and_the_symptom_keeps_both() -> None:
    both = found("loss.real_class_ignored", "label", op="nll_loss", source="train.py:3", shown_at="train.py:9")
    assert SourcePlaces([], []).place_of(both) == ("train.py:3", "train.py:9")


def test_a_finding_without_an_object_is_where_the_step_shows_it() -> None:
    calls = [("forward", "train.py:9"), ("backward", "train.py:10")]
    assert SourcePlaces([], []).place_of(found("gradient.spike", "backward"), calls) == ("train.py:10", None)
