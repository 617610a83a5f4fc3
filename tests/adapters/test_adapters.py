"""A loop of one's own, a Lightning module and Hugging Face's Trainer with the same fault get the same diagnosis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.adapters import WatchChoices
from trainwright.errors import MissingExtra, import_optional
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Examined, Found

pl = pytest.importorskip("lightning.pytorch")
accelerate = pytest.importorskip("accelerate")
hf = pytest.importorskip("transformers")

from trainwright.adapters.lightning import WatchCallback as LightningWatch  # noqa: E402
from trainwright.adapters.transformers import WatchTrainerCallback as TrainerWatch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    # Lightning keeps the handlers of all signals, and that of pytest-timeout holds the whole test session
    pytest.mark.timeout(300, method="thread"),
]
STEPS, BATCH, BAD_SAMPLE = 12, 16, 37
Loss = Callable[[Tensor, Tensor], Tensor]


class Rows(Dataset[dict[str, Tensor]]):
    """Samples as a Trainer wants them; ``is_bad`` puts a NaN into one."""

    def __init__(self, *, is_bad: bool) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(128, 8, generator=g)
        self.y = (self.x @ torch.randn(8, 4, generator=g)).argmax(1)
        if is_bad:
            self.x[BAD_SAMPLE, 3] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(torch.relu(self.body(x)))}


def trained(net: Net, fault: str) -> list[nn.Parameter]:
    return list(net.body.parameters() if fault == "missing parameters" else net.parameters())


def loss_for(fault: str) -> Loss:
    if fault == "softmax":
        return lambda logits, y: F.cross_entropy(logits.softmax(-1), y)
    return F.cross_entropy


def by_hand(fault: str, out: Path) -> list[Found]:
    net, loss = Net(), loss_for(fault)
    optimizer = torch.optim.AdamW(trained(net, fault), lr=0.01)
    loader = DataLoader(Rows(is_bad=fault == "nan"), batch_size=BATCH, shuffle=True)
    step = 0
    with tw.watch(net, optimizer, loader=loader, out=out, quiet=True) as watch:
        while step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                loss(net(batch["x"])["logits"], batch["labels"]).backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    return watch.findings()


class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    """``training_step`` calls a part of it, or itself."""

    def __init__(self, fault: str, *, calls_itself: bool = False, fails_at: int = -1) -> None:
        super().__init__()
        self.fault, self.calls_itself, self.fails_at = fault, calls_itself, fails_at
        self.net, self.loss = Net(), loss_for(fault)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)["logits"]
        return logits

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if index == self.fails_at:
            raise ValueError("mine")
        logits = self(batch["x"]) if self.calls_itself else self.net(batch["x"])["logits"]
        return self.loss(logits, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained(self.net, self.fault), lr=0.01)


def fit(module: Module, callback: LightningWatch, out: Path, **options: Any) -> None:
    trainer = pl.Trainer(
        max_steps=STEPS, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(is_bad=module.fault == "nan"), batch_size=BATCH, shuffle=True))


def by_lightning(fault: str, out: Path, **how: Any) -> list[Found]:
    callback = LightningWatch(out=out / "run", quiet=True)
    fit(Module(fault, **how), callback, out)
    assert callback.watch is not None and callback.watch.step == STEPS
    assert callback.watch.session.failures == []
    return callback.findings()


def by_lightning_calling_itself(fault: str, out: Path) -> list[Found]:
    return by_lightning(fault, out, calls_itself=True)


def trainer_of(fault: str, callback: TrainerWatch, out: Path, **options: Any) -> Any:
    net, loss = Net(), loss_for(fault)
    arguments = hf.TrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(trained(net, fault), lr=0.01)
    return hf.Trainer(
        net, arguments, train_dataset=Rows(is_bad=fault == "nan"), callbacks=[callback],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: loss(outputs["logits"], labels),
    )  # fmt: skip


def by_trainer(fault: str, out: Path) -> list[Found]:
    callback = TrainerWatch(out=out / "run", quiet=True)
    trainer_of(fault, callback, out).train()
    assert callback.watch is not None and callback.watch.step == STEPS
    assert callback.watch.session.failures == []
    return callback.findings()


WAYS = (by_hand, by_lightning, by_lightning_calling_itself, by_trainer)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("nan", "data.nonfinite_input"),
        ("softmax", "loss.softmax_before_cross_entropy"),
        ("missing parameters", "optim.params_missing"),
    ],
)
def test_the_same_fault_gets_the_same_diagnosis(fault: str, code: str, tmp_path: Path) -> None:
    said = {}
    for way in WAYS:
        torch.manual_seed(3)
        found = way(fault, tmp_path / way.__name__)
        said[way.__name__] = found[0].code if found else None
        if fault == "nan":
            assert found[0].where.sample_ids == (BAD_SAMPLE,), way.__name__
    assert said == {way.__name__: code for way in WAYS}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_nothing_is_found_where_nothing_is_wrong(way: Callable[..., list[Found]], tmp_path: Path) -> None:
    torch.manual_seed(3)
    assert [f.code for f in way("", tmp_path / "healthy") if f.severity != "info"] == []


def test_every_step_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    callback, other = LightningWatch(out=None, quiet=True), TrainerWatch(out=None, quiet=True)
    fit(Module("", calls_itself=False), callback, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer_of("", other, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5).train()
    for watch in (callback.watch, other.watch):
        assert watch is not None and watch.step == STEPS
        again = [r.values for r in watch.records if isinstance(r, Examined) and r.experiment == "again"]
        assert again and all(values.get("same_losses") and values["same_twice"] for values in again)


def test_watched_or_not_the_weights_are_the_same_bits(tmp_path: Path) -> None:
    def weights(way: Callable[[list[Any]], nn.Module], callbacks: list[Any]) -> list[Tensor]:
        torch.manual_seed(7)
        return list(way(callbacks).state_dict().values())

    def lightning(callbacks: list[Any]) -> nn.Module:
        module = Module("")
        trainer = pl.Trainer(
            max_steps=8, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Rows(is_bad=False), batch_size=BATCH, shuffle=True))
        return module

    def trainer(callbacks: list[Any]) -> nn.Module:
        made = trainer_of("", TrainerWatch(), tmp_path)
        made.callback_handler.callbacks = [c for c in made.callback_handler.callbacks if type(c) is not TrainerWatch]
        for each in callbacks:
            made.add_callback(each)
        made.train()
        model: nn.Module = made.model
        return model

    for way, callback in ((lightning, LightningWatch), (trainer, TrainerWatch)):
        watched = weights(way, [callback(out=None, quiet=True)])
        assert all(torch.equal(a, b) for a, b in zip(weights(way, []), watched, strict=True)), way.__name__


def test_the_run_folder_is_that_of_a_watch(tmp_path: Path) -> None:
    by_lightning("", tmp_path / "a")
    by_trainer("", tmp_path / "b")
    for name in ("a", "b"):
        assert RunFolder(tmp_path / name / "run").log.exists()


def test_an_exception_ends_the_watch(tmp_path: Path) -> None:
    callback = LightningWatch(out=None, quiet=True)
    with pytest.raises(ValueError, match="mine"):
        fit(Module("", fails_at=5), callback, tmp_path)
    other = TrainerWatch(out=None, quiet=True)
    trainer = trainer_of("", other, tmp_path)
    trainer.compute_loss_func = lambda *args, **kwargs: (_ for _ in ()).throw(ValueError("mine"))
    before = hf.Trainer._run_epoch if hasattr(hf.Trainer, "_run_epoch") else hf.Trainer.training_step
    with pytest.raises(ValueError, match="mine"):
        trainer.train()
    assert (hf.Trainer._run_epoch if hasattr(hf.Trainer, "_run_epoch") else hf.Trainer.training_step) is before
    for watch in (callback.watch, other.watch):
        assert watch is not None
        unfinished = [r.values for r in watch.records if isinstance(r, Examined) and r.experiment == "unfinished"]
        assert unfinished[-1]["error"] == "ValueError: mine"


def test_a_callback_can_be_used_twice(tmp_path: Path) -> None:
    callback = LightningWatch(out=None, quiet=True)
    for _ in range(2):
        fit(Module(""), callback, tmp_path)
        assert callback.watch is not None and callback.watch.step == STEPS


def test_a_callback_takes_every_option_of_the_watch_that_the_trainer_does_not_give() -> None:
    given = {"model", "optimizer", "loader", "scaler", "scheduler"}
    assert set(WatchChoices.__annotations__) == set(inspect.signature(tw.watch).parameters) - given


@pytest.mark.parametrize("fault", ["", "softmax"])
def test_what_accelerate_has_prepared_is_seen_through(fault: str, tmp_path: Path) -> None:
    net, loss = Net(), loss_for(fault)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loader: DataLoader[Any] = DataLoader(Rows(is_bad=False), batch_size=BATCH, shuffle=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model, prepared, batches, stepped = accelerator.prepare(net, optimizer, loader, schedule)
    with tw.watch(model, prepared, loader=batches, scheduler=stepped, out=None, quiet=True) as watch:
        for batch in batches:
            prepared.zero_grad()
            accelerator.backward(loss(model(batch["x"])["logits"], batch["labels"]))
            prepared.step()
            stepped.step()
    assert watch.step == len(loader) and watch.session.failures == []
    assert [found.code for found in watch.findings()] == (["loss.softmax_before_cross_entropy"] if fault else [])


def test_the_schedule_of_a_trainer_belongs_to_its_optimizer(tmp_path: Path) -> None:
    """The Trainer makes both by itself: the schedule for Accelerate's wrapper of the optimizer."""
    callback = TrainerWatch(out=None, quiet=True)
    steps = 24  # more than those for which an optimizer may be one that steps seldom
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, learning_rate=0.01,
    )  # fmt: skip
    trainer = hf.Trainer(
        Net(), arguments, train_dataset=Rows(is_bad=False), callbacks=[callback],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: F.cross_entropy(outputs["logits"], labels),
    )  # fmt: skip
    trainer.train()
    assert callback.watch is not None and callback.watch.step == steps
    assert [each.code for each in callback.findings() if each.severity != "info"] == []


class Players(pl.LightningModule):  # type: ignore[name-defined,misc]
    """A GAN with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.generator(z)
        return made

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        x, z = batch["x"], torch.randn(len(batch["x"]), 4)
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(self.critic(self(z)), ones))
        first.step()
        second.zero_grad()
        real, made = (F.binary_cross_entropy_with_logits(self.critic(x), ones), self.critic(self(z).detach()))
        self.manual_backward(real + F.binary_cross_entropy_with_logits(made, zeros))
        second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), 2e-4) for part in (self.generator, self.critic)]


def test_manual_optimization_empties_gradients(tmp_path: Path) -> None:
    callback = LightningWatch(out=None, quiet=True)
    trainer = pl.Trainer(
        max_steps=24, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Players(), DataLoader(Rows(is_bad=False), batch_size=BATCH, shuffle=True))
    assert callback.watch is not None and callback.watch.step == 12
    assert [each.code for each in callback.findings() if each.severity != "info"] == []


def test_what_fabric_has_set_up_is_seen_through() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(Rows(is_bad=False), batch_size=BATCH, shuffle=True))
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True) as watch:
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(batch["x"])["logits"], batch["labels"]))
            optimizer.step()
    assert watch.step == len(loader) and watch.session.failures == []
    assert watch.findings() == []


def test_a_package_that_is_missing() -> None:
    with pytest.raises(MissingExtra, match="pip install no_such_package_at_all"):
        import_optional("no_such_package_at_all", needed_for="this test")
