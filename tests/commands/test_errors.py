"""tw.bad_cases and ``trainwright errors``: what was planted is found, and each figure is that of its definition."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

import trainwright as tw
from tests.report_pages.runs import ended, make_run, started, step
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.cli import app
from trainwright.commands.bad_cases.find import class_names, errors_in_folds, label_order
from trainwright.commands.bad_cases.scores import NUM_BINS, Scores, Tally, score
from trainwright.data.images import digits
from trainwright.data.text import CharText
from trainwright.data.unwrap import Columns
from trainwright.errors import UsageError
from trainwright.recipe import from_mapping
from trainwright.report.bad_cases import NAME, read_bad_cases
from trainwright.runs.files import UnreadableFile


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(x: Tensor, y: Tensor, *, classes: int, steps: int) -> nn.Module:
    """A small model, trained by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 64), nn.ReLU(), nn.Linear(64, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.slow
def test_planted_wrong_labels_of_digits_are_among_the_first() -> None:
    train, val = digits("train"), digits("val")
    model, right = trained(train.images, train.labels, classes=10, steps=100), val.labels
    for seed in range(2):
        rng = np.random.default_rng(seed)
        planted, val.labels = rng.choice(len(val), 20, replace=False).tolist(), right.clone()
        for each in planted:
            val.labels[each] = (right[each] + int(rng.integers(1, 10))) % 10
        found = tw.bad_cases(model, val, nn.CrossEntropyLoss())
        assert set(planted) <= {each.id for each in found.labels[:40]}, seed
        likely = {each.id for each in found.labels if each.likely}
        assert len(likely & set(planted)) >= 15 and found.likely_wrong <= 40


def test_the_planted_bad_slice_comes_first() -> None:
    x = drawn(600, 8)
    y = (x[:, 0] > 0).long()
    model = trained(x, y, classes=2, steps=100)
    site = np.array([["north", "south", "west"][i % 3] for i in range(600)], dtype=object)
    site[17] = "one"  # its loss is larger than that of the bad slice, and it is one sample
    wrong = [i for i in range(600) if site[i] == "west" and i % 2]
    y[wrong] = 1 - y[wrong]
    x[17], y[17] = torch.tensor([3.0, *[0.0] * 7]), 0
    positive: Callable[[Any], bool] = lambda s: bool(s[0][1] > 0)  # noqa: E731
    found = tw.bad_cases(model, (x, y), nn.CrossEntropyLoss(), by={"site": site.tolist(), "sign": positive})
    by_site = [each for each in found.slices if each.grouping == "site"]
    assert by_site[0].name == "west" and {each.name for each in by_site} == {*site}
    first, one = by_site[0], next(each for each in by_site if each.name == "one")
    assert first.at_least > 0 > one.at_least and one.loss > first.loss
    inside = torch.tensor(site == "west")
    losses = F.cross_entropy(model(x), y, reduction="none").detach().double()
    assert first.loss == pytest.approx(float(losses[inside].mean()), rel=1e-6)
    assert first.excess == pytest.approx(float(losses[inside].mean() - losses[~inside].mean()), rel=1e-6)
    assert {each.name for each in found.slices if each.grouping == "sign"} == {"True", "False"}


class Small(nn.Module):
    def __init__(self, outputs: int, end: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inside, self.end = nn.Sequential(nn.Linear(6, outputs), nn.Dropout(0.5)), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inside(x))


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * (1 + batch[1])
    return tw.Loss(each.sum(), (1 + batch[1]).sum())


LABELS = torch.arange(11) % 3
TWO = torch.arange(11) % 2
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Any, bool]] = {
    "logits": (lambda: Small(3), LABELS, nn.CrossEntropyLoss(), True),
    "smoothed": (lambda: Small(3), LABELS, nn.CrossEntropyLoss(label_smoothing=0.2), True),
    "log probabilities": (lambda: Small(3, lambda y: y.log_softmax(1)), LABELS, nn.NLLLoss(), True),
    "own": (lambda: Small(3), LABELS, own_loss, True),
    "weighted": (lambda: Small(3), LABELS, counted_loss, True),
    "binary": (lambda: Small(1), TWO.float()[:, None], nn.BCEWithLogitsLoss(), True),
    "binary probability": (lambda: Small(1, torch.sigmoid), TWO.float()[:, None], nn.BCELoss(), True),
    "number": (lambda: Small(1), drawn(11, 1, seed=5), nn.MSELoss(), False),
    "many labels": (lambda: Small(4), (drawn(11, 4, seed=6) > 0).float(), nn.BCEWithLogitsLoss(), False),
    "huber": (lambda: Small(2), drawn(11, 2, seed=6), nn.SmoothL1Loss(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_sample_is_that_of_the_loss_function_alone(name: str) -> None:
    make, y, loss, is_classified = CASES[name]
    model, x = make(), drawn(11, 6, seed=1)
    model.train()
    batches = [MicroBatch((x[:8], y[:8]), np.arange(8)), MicroBatch((x[8:], y[8:]), np.arange(8, 11))]
    found = score(model, loss, batches)
    assert model.training and not model._forward_hooks
    model.eval()
    with torch.no_grad():
        for i in range(11):
            alone = (x[i : i + 1], y[i : i + 1])
            expected = loss(model, alone) if loss in (own_loss, counted_loss) else loss(model(alone[0]), alone[1])
            value = expected.total / expected.weight if isinstance(expected, tw.Loss) else expected
            assert found.loss[i] == pytest.approx(float(value), rel=1e-5, abs=1e-7), i
    assert (found.label is not None) == is_classified and not found.notes
    if is_classified and name != "weighted":
        assert found.label is not None and found.label.tolist() == y.flatten().long().tolist()
    if name == "number":
        assert found.values is not None and found.values[:, 0] == pytest.approx(y[:, 0].double().numpy())


def test_tokens_that_do_not_count_are_left_out() -> None:
    class Tokens(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return F.one_hot(ids, 5).float() * 3

    ids = torch.arange(12).view(3, 4) % 5
    target = ids.clone()
    target[0, 1:], target[2, 3] = -100, (int(ids[2, 3]) + 1) % 5
    loss = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())  # noqa: E731
    cases = tw.bad_cases(Tokens(), (ids, target), loss, batch=3)
    right, wrong = (-float(torch.tensor([3.0, 0, 0, 0, 0]).log_softmax(0)[i]) for i in (0, 1))
    assert cases.unit == "tokens" and cases.accuracy == pytest.approx(8 / 9) and cases.labels == ()
    assert [each.id for each in cases.worst] == [2, 1, 0]
    assert cases.worst[0].loss == pytest.approx((3 * right + wrong) / 4, rel=1e-5)
    assert cases.loss == pytest.approx((8 * right + wrong) / 9, rel=1e-5)


def test_a_loss_that_is_not_of_samples_is_said() -> None:
    def spread(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).var(0, unbiased=False).sum() + 0.1 * model(batch[0]).square().mean()

    found = tw.bad_cases(Small(2), (drawn(9, 6),), spread)
    assert len(found.notes) == 1 and "one at a time" in found.notes[0] and found.accuracy is None


def test_confident_learning_by_hand() -> None:
    chances = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.2, 0.8], [0.6, 0.4]])
    label = np.array([0, 0, 0, 1, 1])
    # thresholds: class 0 (0.9 + 0.8 + 0.3) / 3 = 0.667, class 1 (0.8 + 0.4) / 2 = 0.6; so only the third is another's:
    # the last one is more likely 0, but not as likely as a 0 is
    top = np.argsort(-chances, axis=1, kind="stable")
    own = chances[np.arange(5), label]
    ids, sorted_chances = np.arange(5), np.take_along_axis(chances, top, 1)
    scores = Scores(ids, own, own, label, None, own, None, top, sorted_chances, None, None, "samples")
    assert list(label_order(scores).items()) == [(2, True), (4, False), (1, False), (3, False), (0, False)]


def test_calibration_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    sure, right = rng.uniform(0.34, 1.0, 500), rng.random(500) < 0.6
    tally = Tally(3)
    label = rng.integers(0, 3, 500)
    predicted = np.where(right, label, (label + 1) % 3)
    for part in (slice(0, 200), slice(200, 500)):
        tally.add(label[part], predicted[part], sure[part])
    expected = 0.0
    for number in range(NUM_BINS):
        inside = (sure > number / NUM_BINS) & (sure <= (number + 1) / NUM_BINS)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    assert tally.ece == pytest.approx(expected, abs=1e-12)
    assert tally.accuracy == pytest.approx(right.mean())
    for row in range(3):
        assert tally.matrix[row] == tuple(((label == row) & (predicted == column)).sum() for column in range(3))
    assert [each.count for each in tally.confused("abc")] == sorted(
        (((label == each) & (predicted == (each + 1) % 3)).sum() for each in range(3)), reverse=True
    )


def pixels(png: str) -> np.ndarray:
    """The pixels of a picture that was written without a filter."""
    data = base64.b64decode(png)
    width, height, _, kind = (int.from_bytes(data[16:20]), int.from_bytes(data[20:24]), data[24], data[25])
    length, at = int.from_bytes(data[33:37]), 41
    rows = np.frombuffer(zlib.decompress(data[at : at + length]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any() and zlib.crc32(data[37 : at + length]) == int.from_bytes(data[at + length :][:4])
    return rows[:, 1:].reshape(height, width, 3 if kind == 2 else 1)


def test_samples_are_shown_as_what_they_are(tmp_path: Path) -> None:
    def of(data: object, model: nn.Module, loss: Any = None) -> Any:
        (found,) = tw.bad_cases(model, data, loss or (lambda model, batch: model(batch)), count=1).shown.values()
        return found

    class Length(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return sum(each.float().mean() for each in batch) if isinstance(batch, list) else torch.tensor(1.0)

    image = torch.linspace(0, 1, 3 * 64 * 96).view(1, 3, 64, 96)
    shown = of((image, torch.zeros(1)), Length())
    assert (shown.kind, shown.text) == ("image", "3 x 64 x 96") and pixels(shown.png).shape == (32, 48, 3)
    grey = torch.tensor([[0.0, 5.0], [10.0, 5.0]]).repeat_interleave(2, 0).repeat_interleave(2, 1)[None, None]
    assert pixels(of((grey, torch.zeros(1)), Length()).png)[::2, ::2, 0].tolist() == [[0, 128], [255, 128]]
    text = CharText("hello there, this is a text" * 3, block_size=16)
    assert class_names(text, text.classes)[:3] == ["' '", ",", "a"]
    torch.manual_seed(0)
    lm = nn.Embedding(text.classes, text.classes)
    assert of(text, lm, lambda model, b: F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten())).text in "".join(
        ["hello there, this is a text"] * 3
    )
    table = tw.table({"age": [30.0], "height": [1.75], "y": [0.5]}, inputs=["age", "height"], target="y")
    shown = of(table, nn.Linear(2, 1), lambda model, batch: model(batch[0]).mean())
    assert (shown.kind, shown.text) == ("table", "age=30, height=1.75")
    named = {"a": torch.tensor([2.5]), "n": torch.tensor([3]), "labels": torch.tensor([1])}
    assert of(named, Length()).text == "a=2.5, n=3"


def test_groupings_by_column_and_by_value() -> None:
    x = drawn(80, 2, seed=4)
    table = tw.table({"a": x[:, 0].numpy(), "b": x[:, 1].numpy(), "y": [0, 1] * 40}, inputs=["a", "b"], target="y")
    model = nn.Linear(2, 2)
    found = tw.bad_cases(model, table, nn.CrossEntropyLoss(), by="a")
    parts = [each for each in found.slices if each.grouping == "a"]
    assert [each.count for each in parts] == [20] * 4 and all(" to " in each.name for each in parts)
    columns = Columns({"x": x, "labels": torch.arange(80) % 2, "site": torch.arange(80) % 4})
    loss = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"])  # noqa: E731
    by_site = tw.bad_cases(model, columns, loss, by="site").slices
    assert {each.name: each.count for each in by_site if each.grouping == "site"} == dict.fromkeys("0123", 20)
    for by, said in (
        ("age", "no column 'age'(.|\n)*a, b"),
        (lambda sample: 1 / 0, "raised ZeroDivisionError"),
        ([1, 2], "2 values for 80 samples"),
        (lambda sample: sample[0], "returned an array"),
    ):
        with pytest.raises(UsageError, match=said):
            tw.bad_cases(model, table, nn.CrossEntropyLoss(), by=by)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return zip(drawn(30, 6, seed=9), torch.arange(30) % 3, strict=True)


@pytest.mark.parametrize("kind", ["stream", "ready"])
def test_streams_and_ready_batches(kind: str) -> None:
    plain = TensorDataset(drawn(30, 6, seed=9), torch.arange(30) % 3)
    data = Stream() if kind == "stream" else lambda: iter(DataLoader(plain, batch_size=7))
    model = Small(3)
    expected, found = (tw.bad_cases(model, each, nn.CrossEntropyLoss()) for each in (plain, data))
    assert [each.id for each in found.worst] == [each.id for each in expected.worst] and found.shown == expected.shown
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_losses_that_are_not_finite_come_first(tmp_path: Path) -> None:
    x = drawn(20, 6)
    x[7] = math.nan
    found = tw.bad_cases(Small(3), (x, torch.arange(20) % 3), nn.CrossEntropyLoss())
    assert found.worst[0].id == 7 and math.isnan(found.worst[0].loss)
    (tmp_path / NAME).write_text(json.dumps(found.to_json(), allow_nan=False))
    assert math.isnan(read_bad_cases(tmp_path / NAME).worst[0].loss)
    assert "sample 7: loss nan" in str(found)


MINE = """
import torch
from torch.utils.data import TensorDataset

def some():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())

def sign(sample):
    return "<b>plus</b>" if sample[0][1] > 0 else "minus"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_erring.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {
        "model": {"use": "mlp", "args": {"sizes": [4, 8, 2]}},
        "data": {"train": "mine_erring:some", "val": "mine_erring:some"},
        "until": "20steps",
        "batch": {"size": 16},
        "precision": "fp32",
    }
    return tw.train(from_mapping(recipe), quiet=True).run


@pytest.mark.process
def test_the_verb_keeps_what_it_found_and_the_report_shows_it(run: Path) -> None:
    done = CliRunner().invoke(app, ["errors", str(run), "--by", "mine_erring:sign", "--count", "5", "--json"])
    assert done.exit_code == 0, done.output
    kept = read_bad_cases(run / NAME)
    assert json.loads((run / NAME).read_text()) == json.loads(done.stdout.splitlines()[-1])
    assert (kept.count, len(kept.worst), len(kept.labels), kept.step) == (60, 5, 10, 20)
    assert kept.loss == pytest.approx(tw.evaluate(run, "val").loss, rel=1e-6)
    page = (run / "report.html").read_text()
    assert "Errors on val" in page and "Loss by sign" in page and "&lt;b&gt;plus&lt;/b&gt;" in page
    assert "<b>plus" not in page and "Confusion matrix" in page
    words = CliRunner().invoke(app, ["errors", str(run), "train", "--which", "last"]).stdout
    assert "the largest losses" in words and "--folds 4" in words and "expected calibration error" in words


@pytest.mark.process
@pytest.mark.slow
def test_folds_predict_what_they_have_not_seen(run: Path) -> None:
    said: list[str] = []
    found = errors_in_folds(run, 2, by=["mine_erring:sign"], count=20, batch=None, say=said.append)
    assert found.count == 60 and "2 folds" in found.data and len(said) == 2
    assert "None" not in "\n".join(found.lines()), "it is no step of the run"
    assert sorted({each.id for each in found.worst}) == sorted(each.id for each in found.worst)
    assert sum(each.count for each in found.slices if each.grouping == "sign") == 60
    assert not [path for path in run.parent.iterdir() if path != run], "the folds leave nothing behind"
    with pytest.raises(UsageError, match="nowhere:at_all: there is no module 'nowhere'"):
        errors_in_folds(run, 2, by=["nowhere:at_all"], count=20, batch=None, say=said.append)
    with pytest.raises(UsageError, match="leave --folds out"):
        errors_in_folds(run, 31, by=[], count=20, batch=None, say=said.append)
    done = CliRunner().invoke(app, ["errors", str(run), "--folds", "2"])
    assert done.exit_code == 2 and "have no effect" in done.output


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"data": "x", "count": 1, "loss": 1, "shown": {"1": {"kind": "image", "png": "\\" onerror=alert(1)"}}}',
        '{"data": "x", "count": "many", "loss": 1}',
        '{"data": "x", "count": 1, "loss": 1, "matrix": [[1, "<script>"]]}',
    ],
)
def test_a_file_that_somebody_else_wrote_shows_nothing(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, "theirs", [started(), step(1), ended(1)]).path
    (run / NAME).write_text(text)
    with pytest.raises(UnreadableFile):
        read_bad_cases(run / NAME)
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0 and "Errors on" not in (run / "report.html").read_text()


def test_scores_of_nothing_that_counts() -> None:
    found: Scores = score(
        Small(3), nn.CrossEntropyLoss(), [MicroBatch((drawn(2, 6), torch.tensor([-100, -100])), np.arange(2))]
    )
    assert math.isnan(found.mean) and np.isnan(found.loss).all()
