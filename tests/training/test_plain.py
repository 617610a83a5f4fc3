"""``tw.fit`` without further settings gives the bits of the five-line loop; ``verify plain`` proves it of objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import trainwright as tw
from tests import forked
from trainwright.commands.verify.plain import verify_plain_of
from trainwright.recipe.catalog import OPTIMIZERS as BOX
from trainwright.recipe.catalog import OptimizerRow

pytestmark = pytest.mark.process  # each starts threads that read the machine
ROWS, BATCH = 40, 8
RECIPES = Path(__file__).parents[2] / "recipes"


class Tagger(nn.Module):
    """An LSTM over token ids, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 12, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(12, 3)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.drop(self.lstm(self.tokens(ids_BT))[0][:, -1]))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A transformer encoder with the dropout of torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, layer = nn.Embedding(11, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(ids_BT)).mean(1))  # type: ignore[no-any-return]


class Causal(nn.Module):
    """A small GPT whose head is its embedding, and which returns its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, layer = nn.Embedding(11, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1] - 1)
        logits = self.head(self.body(self.tokens(ids_BT[:, :-1]), mask=mask, is_causal=True))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten()), "logits": logits}


def rows() -> TensorDataset:
    x = torch.randn(ROWS, 6)
    return TensorDataset(x, (x.sum(1) > 0).long())


def images() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 3, 8, 8), torch.randint(3, (ROWS,)))


def ids() -> TensorDataset:
    return TensorDataset(torch.randint(11, (ROWS, 7)), torch.randint(3, (ROWS,)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def convolutional() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 3))


def frozen_norm() -> nn.Module:
    """BatchNorm in evaluation mode within a model that trains, as in fine-tuning."""
    model = convolutional()
    model[1].eval()  # type: ignore[index]
    model[1].requires_grad_(False)  # type: ignore[index]
    return model


def gru() -> nn.Module:
    class Last(nn.GRU):
        def forward(self, ids_BT: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(F.one_hot(ids_BT, 11).float())[0][:, -1]  # type: ignore[no-any-return]

    return Last(11, 3, batch_first=True)


def wide_and_deep() -> nn.Module:
    """An EmbeddingBag, and a Linear in double precision steps: two dtypes in one model."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(11, 8, mode="mean"), nn.Linear(8, 3).double()

        def forward(self, ids_BT: Tensor) -> Tensor:
            return self.head(self.bag(ids_BT).double())  # type: ignore[no-any-return]

    return Wide()


Loss = Callable[..., Any] | None
CROSS_ENTROPY = nn.CrossEntropyLoss()
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], Loss]] = {
    "MLP": (mlp, rows, CROSS_ENTROPY),
    "CNN with BatchNorm": (convolutional, images, CROSS_ENTROPY),
    "frozen BatchNorm": (frozen_norm, images, CROSS_ENTROPY),
    "LSTM with dropout": (Tagger, ids, CROSS_ENTROPY),
    "GRU": (gru, ids, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "transformer encoder": (Attention, ids, CROSS_ENTROPY),
    "GPT with tied weights": (Causal, ids, None),
    "EmbeddingBag in two dtypes": (wide_and_deep, ids, CROSS_ENTROPY),
    "regression": (lambda: nn.Linear(6, 1), rows, lambda output, y: F.mse_loss(output[:, 0], y.float())),
    "deep and narrow": (lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)]), rows, CROSS_ENTROPY),
}


def objects(name: str, **loader: Any) -> tuple[nn.Module, DataLoader[Any], Loss]:
    torch.manual_seed(0)
    make, data, loss = MODELS[name]
    return make(), DataLoader(data(), BATCH, **({"shuffle": True} | loader)), loss


def five_lines(
    model: nn.Module, loader: DataLoader[Any], loss: Loss, optimizer: Optimizer, steps: int
) -> tuple[list[float], list[Tensor]]:
    """The loop that ``tw.fit`` must equal, written here and not by Trainwright."""
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            optimizer.zero_grad()
            value = model(*batch)["loss"] if loss is None else loss(model(batch[0]), batch[1])
            value.backward()
            optimizer.step()
            losses.append(value.item())
            if len(losses) == steps:
                break
    return losses, list(model.state_dict().values())


def fitted(
    model: nn.Module, data: object, loss: Loss, optimizer: Any, steps: int, **more: Any
) -> tuple[list[float], list[Tensor]]:
    losses: list[float] = []
    tw.fit(
        model,
        data,
        loss,
        optimizer=optimizer,
        steps=steps,
        quiet=True,
        observers=[lambda result, state: losses.append(float(result.loss))],
        settings={"checkpoint.every": None, "log.doctor": False},
        **more,
    )
    return losses, list(model.state_dict().values())


def assert_equal(ours: tuple[list[float], list[Tensor]], plain: tuple[list[float], list[Tensor]]) -> None:
    assert ours[0] == plain[0]
    assert all(map(torch.equal, ours[1], plain[1]))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(pytest.param(name, "SGD", marks=() if name == "MLP" else pytest.mark.slow) for name in MODELS),
        *(pytest.param(name, "AdamW", marks=pytest.mark.slow) for name in ("MLP", "transformer encoder")),
    ],
)
def test_the_first_steps_are_those_of_the_five_line_loop(name: str, optimizer: str) -> None:
    """Over four epochs, so that the draws at the beginning of an epoch count as well."""
    ours, plain = objects(name), objects(name)
    torch.manual_seed(5)
    seen = fitted(*ours, OPTIMIZERS[optimizer](ours[0]), 20)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert_equal(seen, five_lines(*plain, OPTIMIZERS[optimizer](plain[0]), 20))
    assert torch.equal(after, torch.get_rng_state()), "the generator stands where the loop leaves it"


def loader(**settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(rows(), **({"batch_size": BATCH, "shuffle": True} | settings))


def batches() -> list[Any]:
    data = rows()
    return [data[at : at + BATCH] for at in range(0, ROWS, BATCH)]


class Shuffled:
    """Draws its order when it is begun."""

    def __init__(self) -> None:
        self.batches = batches()

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batches[int(at)] for at in torch.randperm(len(self.batches))])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((6,), float(at % 7)), at % 2) for at in range(ROWS)])


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": loader(shuffle=False),
    "shuffled by a generator": lambda: loader(generator=torch.Generator())(),
    "short last batch dropped": loader(batch_size=7, drop_last=True),
    "short last batch kept": loader(batch_size=7),
    "weighted": lambda: loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 30 + [5.0] * 10, 30))(),
    "workers": loader(num_workers=2),
    "persistent workers": loader(num_workers=2, persistent_workers=True),
    "a list of batches": lambda: DataLoader(batches(), batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "batches that shuffle": Shuffled,
    "stream": lambda: DataLoader(Stream(), BATCH),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if "workers" in kind else ()) for kind in LOADERS]
)
def test_the_order_is_that_of_the_loader(kind: str) -> None:
    """The order of an epoch is drawn after the last step of the one before, whatever is read ahead."""
    found = []
    for run in (fitted, five_lines):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        found.append(run(model, LOADERS[kind](), CROSS_ENTROPY, SGD(model.parameters(), lr=0.1), 17))  # type: ignore[operator]
    assert_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("named", "plain"),
    [
        ({"optimizer": "adam", "lr": 1e-2}, partial(Adam, lr=1e-2)),
        ({"optimizer": "sgd", "lr": 0.1}, partial(SGD, lr=0.1)),
        ({"optimizer": "sgd"}, SGD),
        ({}, AdamW),
        ({"lr": 3e-3}, partial(AdamW, lr=3e-3)),
    ],
    ids=str,
)
def test_a_name_is_the_class_of_torch_with_its_defaults(named: dict[str, Any], plain: Callable[..., Optimizer]) -> None:
    """The plan chooses the kernel alone: the fused one, which rounds in another way than the default of torch."""

    def by_hand(**kernel: bool) -> tuple[list[float], list[Tensor]]:
        model, data, loss = objects("MLP")
        return five_lines(model, data, loss, plain(model.parameters(), **kernel), 20)

    model, data, loss = objects("MLP")
    assert_equal(fitted(model, data, loss, named.get("optimizer"), 20, lr=named.get("lr")), by_hand(fused=True))
    for one, other in zip(model.state_dict().values(), by_hand()[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_step_that_is_not_finite_is_left_out_and_the_rest_is_the_loop() -> None:
    ours, plain = objects("MLP", shuffle=False), objects("MLP", shuffle=False)
    for _, loader, _ in (ours, plain):
        loader.dataset.tensors[0][9] = float("nan")  # type: ignore[attr-defined]  # of the second batch
    seen = fitted(*ours, SGD(ours[0].parameters(), lr=0.1), 2)
    expected = five_lines(*plain, SGD(plain[0].parameters(), lr=0.1), 1)
    assert seen[0][0] == expected[0][0] and seen[0][1] != seen[0][1]
    assert all(map(torch.equal, seen[1], expected[1])), "the weights are those before the step"


def test_learning_rates_of_an_optimizer_stay_as_they_are() -> None:
    """Also where a scheduler was attached that the run does not know of."""
    model, data, loss = objects("MLP")
    optimizer = SGD([{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}], lr=0.1)  # type: ignore[index]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    fitted(model, data, loss, optimizer, 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.075, 0.025]


@pytest.mark.slow
def test_settings_of_the_process_stay_as_they_are() -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
        )

    seen: list[tuple[object, ...]] = []
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True)
    try:
        before = settings()
        model, data, loss = objects("MLP")
        tw.fit(model, data, loss, steps=2, quiet=True, observers=[lambda result, state: seen.append(settings())])
        tw.fit(
            model,
            data,
            loss,
            steps=2,
            quiet=True,
            precision="fp32",
            observers=[lambda result, state: seen.append(settings())],
        )
        assert seen[0] == before == settings()
        assert seen[-1][:2] == ("highest", False), "fp32 that is asked for is float32 without TF32"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_a_seed_is_that_of_the_run_alone() -> None:
    def trained(seed: int | None) -> tuple[Tensor, Tensor]:
        model, data, loss = objects("LSTM with dropout")
        torch.manual_seed(9)
        fitted(model, data, loss, "sgd", 6, seed=seed)
        return torch.cat([p.flatten() for p in model.parameters()]), torch.get_rng_state()

    torch.manual_seed(9)
    untouched = torch.get_rng_state()
    (one, after), (other, _), (loose, moved) = trained(3), trained(4), trained(None)
    assert torch.equal(trained(3)[0], one) and not torch.equal(one, other) and not torch.equal(one, loose)
    assert torch.equal(after, untouched) and not torch.equal(moved, untouched)


# resume


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("shuffled by a generator", 5),
        ("short last batch kept", 8),
        ("short last batch kept", 6),
        ("weighted", 6),
        ("a list of batches", 5),
    ],
)
def test_a_resume_within_an_epoch_and_between_two_gives_the_same_bits(kind: str, stop: int) -> None:
    def run(**more: Any) -> tuple[tw.Result, list[Tensor]]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        result = tw.fit(
            model,
            LOADERS[kind](),
            CROSS_ENTROPY,
            optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9),
            steps=13,
            quiet=True,
            settings={"log.doctor": False},
            **more,
        )
        return result, [p.detach().clone() for p in model.parameters()]

    _, straight = run(name="straight")
    halted, _ = run(name="halved", observers=[lambda result, state: tw.Stop("half") if state.step == stop else None])
    torch.manual_seed(77)  # whatever the process drew meanwhile
    done, resumed = run(name="halved", resume=halted.run)
    assert done.step == 13 and all(map(torch.equal, straight, resumed))


# verify plain


def test_verify_plain_proves_it_and_leaves_the_objects_alone() -> None:
    model, data, loss = objects("LSTM with dropout")
    optimizer, before = SGD(model.parameters(), lr=0.1), [p.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    proof = tw.verify_plain(model, data, loss, optimizer, steps=8)
    assert proof.equal and proof.exit_code == 0 and (proof.steps, proof.notes) == (8, ())
    assert proof.loop == "the plain loop over the loader" and "8 losses" in proof.lines()[0]
    assert all(map(torch.equal, model.parameters(), before)) and not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, "sgd", RMSprop, partial(SGD, lr=0.1, momentum=0.9)], ids=str)
def test_verify_plain_with_names_and_classes(optimizer: Any) -> None:
    assert tw.verify_plain(*objects("CNN with BatchNorm"), optimizer, steps=6).equal


def test_verify_plain_finds_what_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another default of an optimizer by name: the proof can fail."""
    row = OptimizerRow("sgd", "torch.optim:SGD", "", state_per_weight=0, decoupled=False, weight_decay=0.1)
    monkeypatch.setitem(BOX, "sgd", row)
    proof = tw.verify_plain(*objects("MLP"), "sgd", steps=4)
    assert not proof.equal and proof.exit_code == 1
    assert proof.difference is not None and proof.difference.step == 2 and "NOT the same bits" in proof.lines()[0]


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.randn(6), at % 2


def test_verify_plain_says_where_the_data_draw_random_numbers() -> None:
    torch.manual_seed(0)
    proof = tw.verify_plain(mlp(), DataLoader(Noisy(), BATCH), CROSS_ENTROPY, steps=4)
    assert proof.equal and proof.loop == "the plain loop over the batches of tw.fit"
    assert "another batch in step 1" in proof.notes[0] and "(seed, epoch, position)" in proof.notes[0]
    assert tw.verify_plain(mlp(), rows(), CROSS_ENTROPY, steps=4).notes == ()


def test_verify_plain_of_what_cannot_be_copied() -> None:
    model, data, loss = objects("MLP")
    model.file = Path(__file__).open()  # type: ignore[assignment]  # noqa: SIM115
    try:
        with pytest.raises(tw.TrainwrightError, match="cannot be copied") as caught:
            tw.verify_plain(model, data, loss)
    finally:
        model.file.close()  # type: ignore[operator, union-attr]
    assert "verify plain mymodule:function" in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("gpt-tiny", ["model.args.layers=1"]),
        ("lstm-text", ["preset=recommended"]),
        ("resnet-digits", ["model.args.depth=8", "optimizer.clip.by=value", "optimizer.clip.at=0.01"]),
        ("demo-digits", ["model.args.depth=8", "precision=bf16"]),
    ],
    ids=["clipping and schedule", "accumulation", "values clipped", "bf16"],
)
@pytest.mark.slow
def test_verify_plain_of_a_recipe(recipe: str, settings: list[str]) -> None:
    proof = verify_plain_of(str(RECIPES / f"{recipe}.yaml"), steps=4, settings=settings)
    assert proof.equal and proof.loop == "a loop with the functions of torch" and proof.steps == 4


MADE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def objects():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    return model, DataLoader(data, 8, shuffle=True), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())

def nothing():
    return None
"""


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(MADE)

    def verify(*words: str) -> forked.Forked:
        return forked.run(forked.COMMAND_LINE, "verify", "plain", *words, cwd=tmp_path)

    done = verify("made:objects", "--steps", "6", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and found["equal"] and found["steps"] == 6
    wrong = verify("made:nothing")
    assert wrong.returncode == 2 and "return (model, data, loss, optimizer)" in wrong.stderr
    assert not (tmp_path / "runs").exists()
