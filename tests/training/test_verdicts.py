"""The verdict on real runs: each word on a run that deserves it, and no trouble on runs that go well."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.engine.observer import Stop
from trainwright.errors import DataError
from trainwright.runs.records import RunVerdict

pytestmark = [pytest.mark.examined, pytest.mark.slow]
CROSS_ENTROPY = nn.CrossEntropyLoss()
EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET: dict[str, object] = {"log.doctor": False, "log.every": "1steps"}
NO_CLIP: dict[str, object] = {"optimizer.clip.by": "none"}
EXAMINED: dict[str, object] = {"log.doctor": True, "log.examine": "all"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def fit(
    model: nn.Module,
    data: object,
    loss: object = CROSS_ENTROPY,
    *,
    settings: dict[str, object] | None = None,
    **more: Any,
) -> RunVerdict:
    """The verdict on a run, which the list of runs shows, too."""
    options = {"batch": 32, "precision": "fp32", "device": "cpu", "quiet": True, **more}
    result = tw.fit(model, data, loss, settings={**QUIET, **(settings or {})}, **options)  # type: ignore[arg-type]
    assert result.verdict is not None
    listed = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)["runs"]
    assert listed[-1]["verdict"] == vars(result.verdict)
    return result.verdict


def mlp(*sizes: int) -> nn.Sequential:
    layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def classes(count: int, *, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 20)
    return x, (x[:, 0] + noise * torch.randn(count) > 0).long()


def test_random_labels_teach_nothing() -> None:
    x, y = torch.randn(4096, 20), torch.randint(0, 2, (4096,))
    verdict = fit(mlp(20, 2), (x, y), val=(torch.randn(256, 20), y[:256]), steps=128, lr=1e-5)
    assert verdict.word == "learned nothing"


class Adapted(nn.Module):
    """An adapter between layers that were never trained, and are frozen."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.body = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, 2)).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False), nn.Linear(32, 2)
        nn.init.zeros_(self.up.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(tokens)[:, 0]
        logits: Tensor = self.head(hidden + self.up(self.down(hidden)))
        return logits


def test_an_adapter_on_random_weights_learns_nothing() -> None:
    tokens, labels = torch.randint(0, 100, (1024, 12)), torch.randint(0, 2, (1024,))
    val, rate = (tokens[:128], labels[:128]), {"lr": 2e-4, "preset": "recommended"}
    verdict = fit(Adapted(), (tokens, labels), val=val, steps=192, batch=16, **rate)
    assert verdict.word == "learned nothing"


def test_a_prediction_without_inputs_is_nothing_learned() -> None:
    """The loss falls at first, to that of a constant; the doctor measures what that is."""
    x, y = torch.randn(4096, 20), torch.randint(0, 2, (4096,))
    model = mlp(20, 2)
    with torch.no_grad():
        model[0].bias.add_(torch.tensor([0.5, -0.5]))
    verdict = fit(model, (x, y), steps=200, lr=0.03, preset="recommended", settings=EXAMINED)
    assert verdict.word == "learned nothing" and "constant prediction" in verdict.sentence


def test_overfitting() -> None:
    data, val = classes(48, noise=1.5), classes(512, noise=1.5)
    verdict = fit(mlp(20, 256, 2), data, val=val, epochs=60, batch=16, lr=3e-3)
    assert verdict.word == "overfits" and verdict.best_step is not None and verdict.best_step < 90


@pytest.mark.parametrize(("lr", "said"), [(0.9, "not finite"), (0.055, "rose from")])
def test_divergence(lr: float, said: str) -> None:
    x = torch.randn(512, 20)
    rate = {"optimizer": "sgd", "lr": lr, "settings": {"optimizer.args": {"momentum": 0.9}}}
    verdict = fit(nn.Linear(20, 1), (x, 3 * x[:, :1]), lambda a, b: 8 * (a - b).square().mean(), steps=80, **rate)
    assert verdict.word == "diverged" and said in verdict.sentence, verdict.sentence


def test_a_rate_that_is_raised_too_far() -> None:
    rate = {"optimizer": "sgd", "lr": 0.1, "schedule": lambda step: 1.0 if step < 150 else 3e3}
    x = torch.randn(512, 20)
    verdict = fit(mlp(20, 32, 1), (x, x[:, :1].sign()), nn.L1Loss(), steps=300, **rate, settings=NO_CLIP)
    assert verdict.word == "diverged", verdict.sentence


class StopsAt(list[int]):
    def observe(self, result: tw.StepResult, state: tw.TrainState) -> Stop | None:
        return Stop("SIGTERM") if result.step == self[0] else None

    def close(self) -> None: ...


def test_a_run_that_was_stopped() -> None:
    verdict = fit(mlp(20, 8, 2), classes(128), steps=40, observers=[StopsAt([12])])
    assert verdict.word == "ended early" and "stopped by SIGTERM at step 12 of 40" in verdict.sentence


def test_a_run_that_failed() -> None:
    def fails(result: tw.StepResult, state: tw.TrainState) -> None:
        if result.step == 20:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fit(mlp(20, 8, 2), classes(128), steps=80, observers=[fails])
    [row] = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)["runs"]
    assert row["verdict"]["word"] == "failed" and "no more" in row["verdict"]["sentence"]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_run_with_a_finding() -> None:
    x = torch.randn(64, 20)
    verdict = fit(nn.Linear(20, 1), (x, x.sum(1)), nn.MSELoss(), steps=8, settings={"log.doctor": True})
    assert verdict.word == "critical finding" and "loss.broadcast_target" in verdict.sentence


def test_a_run_without_a_finding() -> None:
    verdict = fit(mlp(20, 16, 2), classes(512), val=classes(128), steps=120, lr=1e-2, settings={"log.doctor": True})
    assert verdict.word == "no finding" and verdict.sentence.startswith("finished without a finding: training loss ")


def test_the_finding_of_a_label_out_of_range_names_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = classes(128)
    y[100] = 7
    with pytest.raises(DataError, match=r"samples \[100\]"):
        tw.fit(mlp(20, 16, 2), list(zip(x, y, strict=True)), CROSS_ENTROPY, device="cpu")
    said = capsys.readouterr().out
    assert "samples 100 at" in said and "correct the samples if a few labels are wrong" in said


def test_validation_samples_with_nan_are_named() -> None:
    """The training is healthy, so the run did not diverge."""
    x, y = classes(128)
    x[100] = math.nan
    verdict = fit(mlp(20, 16, 2), classes(512), val=(x, y), epochs=2)
    assert verdict.word == "warning" and "NaN or infinity in the validation samples 100" in verdict.sentence


def of_a_normal(output: Tensor, target: Tensor) -> Tensor:
    """The negative logarithm of a density: it falls below 0."""
    mean, log_std = output.unbind(1)
    return (log_std + 0.5 * ((target[:, 0] - mean) / log_std.exp()).square()).mean()


def dissimilarity(output: Tensor, target: Tensor) -> Tensor:
    return -F.cosine_similarity(output, target).mean()


def sums(modulus: int) -> tuple[Tensor, Tensor]:
    numbers = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))[torch.randperm(modulus**2)]
    return numbers, numbers.sum(1) % modulus


class OfNumbers(nn.Sequential):
    def __init__(self, modulus: int) -> None:
        embedding = nn.Embedding(modulus, 32)
        super().__init__(embedding, nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, modulus))


def late_generalization() -> RunVerdict:
    """The validation loss rises far above a guess while the training loss goes to 0, and then comes down again."""
    numbers, total = sums(13)
    every = {"evaluation.every": "30steps", "optimizer.weight_decay": 1.0}
    data, val = (numbers[:110], total[:110]), (numbers[110:], total[110:])
    return fit(OfNumbers(13), data, val=val, steps=600, batch=110, lr=1e-2, schedule="constant", settings=every)


class Pair(nn.Module):
    """A generator and a discriminator of points."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(8, 32, 2), mlp(2, 32, 1)

    def forward(self, noise: Tensor) -> Tensor:
        made: Tensor = self.generator(noise)
        return made


def adversaries() -> RunVerdict:
    pair, judge = Pair(), F.binary_cross_entropy_with_logits
    of_generator = torch.optim.Adam(pair.generator.parameters(), 1e-3, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(pair.discriminator.parameters(), 1e-3, betas=(0.5, 0.9))

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        real = batch.micro[0].data
        made, yes, no = pair(torch.randn(len(real), 8)), torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_discriminator.zero_grad()
        (judge(pair.discriminator(real), yes) + judge(pair.discriminator(made.detach()), no)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss = judge(pair.discriminator(made), yes)
        loss.backward()
        of_generator.step()
        return loss

    points = 0.3 * torch.randn(512, 2) + torch.tensor([1.0, 2.0])
    return fit(pair, points, None, advance=step, optimizer=[of_generator, of_discriminator], steps=200)


def returns() -> RunVerdict:
    """A policy that is trained on its own actions: its loss is noise around 0."""
    policy = nn.Linear(4, 3)

    class Episodes(torch.utils.data.IterableDataset[tuple[Tensor, Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            while True:
                seen = torch.randn(4)
                with torch.no_grad():
                    action = torch.distributions.Categorical(logits=policy(seen)).sample()
                yield seen, action, (action == (seen[0] > 0)).float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        seen, action, reward = batch
        taken = torch.distributions.Categorical(logits=model(seen)).log_prob(action)
        return -(taken * (reward - reward.mean())).mean()

    return fit(policy, Episodes(), loss, steps=100, lr=3e-2)


def noisy_regression() -> RunVerdict:
    x = torch.randn(512, 20)
    data, val = (x, x[:, :1] + 3 * torch.randn(512, 1)), (x[:256], x[:256, :1])
    return fit(nn.Linear(20, 1), data, nn.MSELoss(), val=val, steps=200, batch=4, lr=1e-2)


GOES_WELL: dict[str, Callable[[], RunVerdict]] = {
    "classes": lambda: fit(mlp(20, 32, 2), classes(512), val=classes(256), steps=150, lr=1e-2),
    "short": lambda: fit(mlp(20, 32, 2), classes(512), val=classes(256), steps=5, lr=1e-3),
    "short and slow": lambda: fit(mlp(20, 32, 2), classes(512), steps=30, lr=1e-5),
    "one evaluation": lambda: fit(
        mlp(20, 32, 2), classes(512), val=classes(64), steps=100, lr=1e-3, settings={"evaluation.every": "100steps"}
    ),
    "warm-up": lambda: fit(mlp(20, 32, 2), classes(512), steps=100, lr=1e-3, warmup="90steps"),
    "noise": noisy_regression,
    "density": lambda: fit(
        mlp(20, 32, 2), ((x := torch.randn(512, 20)), 0.1 * x[:, :1]), of_a_normal, steps=200, lr=1e-2
    ),
    "similarity": lambda: fit(mlp(20, 32, 20), ((x := torch.randn(512, 20)), x), dissimilarity, steps=150, lr=3e-3),
    "late generalization": late_generalization,
    "adversaries": adversaries,
    "returns": returns,
}


@pytest.mark.parametrize("name", GOES_WELL)
def test_a_run_that_goes_well(name: str) -> None:
    verdict = GOES_WELL[name]()
    assert (verdict.word, verdict.best_step) == ("not examined", None), verdict.sentence
    assert "finished, not examined by the doctor: training loss" in verdict.sentence


@pytest.mark.parametrize("course", [lambda t: 0.3 * math.exp(-5 * t), lambda t: 0.3 + 0.5 * t])
def test_a_watched_loop_that_reports_its_validation(folder: Path, course: Callable[[float], float]) -> None:
    model, (x, y) = mlp(20, 64, 2), classes(64, noise=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with tw.watch(model, optimizer, out="runs/loop", examine="listen", quiet=True) as watch:
        for number in range(1, 101):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number % 10 == 0:
                watch.log(val_loss=course(number / 100))
    [row] = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)["runs"]
    assert row["verdict"]["best_step"] == (10 if course(1.0) > course(0.0) else None)
    assert row["val_loss"] == pytest.approx(course(1.0))


def test_a_policy_whose_data_are_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss plays the episodes: it falls and rises again while the policy learns."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("reinforce")
    verdict = fit(example.policy(), (torch.arange(4096),), example.loss, batch=64, steps=200, lr=1e-2)
    assert verdict.word == "not examined", verdict.sentence
