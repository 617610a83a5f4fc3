"""tw.fit: a module of one's own in three lines, with whatever data and loss people have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.data import fingerprint
from trainwright.engine.dry_run import Mode, dry_run
from trainwright.engine.observer import Stop
from trainwright.engine.precision import FP32
from trainwright.errors import DataError, RecipeError, UsageError


def data(count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


@pytest.mark.examined
@pytest.mark.process
def test_three_lines() -> None:
    model = net()
    result = tw.fit(model, data(), nn.CrossEntropyLoss(), until="20ep", lr=1e-2, quiet=True)
    assert result.ending == "finished" and result.step == 160
    assert result.loss is not None and result.loss < 0.5
    x, y = data()
    model.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.9


@pytest.mark.process
def test_a_loader_is_taken_apart() -> None:
    sizes: list[int] = []

    def collate(items: list[Any]) -> Any:
        sizes.append(len(items))
        return torch.utils.data.default_collate(items)

    loader = DataLoader(TensorDataset(*data()), batch_size=64, shuffle=False, drop_last=True, collate_fn=collate)
    result = tw.fit(net(), loader, nn.functional.cross_entropy, until="2ep", quiet=True)
    assert result.step == 8 and sizes.count(64) == 8
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["batch"]["size"] == 64
    assert any("plain mean" in note["why"] and "batch size" in note["choice"] for note in plan["notes"])
    assert "shuffle: false" in (result.run / "recipe.yaml").read_text()


@pytest.mark.process
@pytest.mark.slow
def test_the_workers_of_a_loader_are_taken_over(folder: Path) -> None:
    settings: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "timeout": 45, "generator": torch.Generator()}
    loader = DataLoader(
        TensorDataset(*data()), 64, worker_init_fn=lambda worker: (folder / f"begun-{worker}").touch(), **settings
    )
    val = DataLoader(TensorDataset(*data(40)), batch_size=20, num_workers=2)
    result = tw.fit(net(), loader, nn.functional.cross_entropy, val=val, until="2steps", quiet=True)
    assert (folder / "begun-0").exists()
    recipe = (result.run / "recipe.yaml").read_text()
    assert "prefetch: 3" in recipe and "timeout: 45s" in recipe
    notes = json.loads((result.run / "plan.json").read_text())["notes"]
    assert [note["choice"] for note in notes if note["topic"] == "not used"] == ["num_workers=2 of val"]
    seeded = tw.fit(net(), loader, nn.functional.cross_entropy, steps=1, seed=3, quiet=True)
    notes = json.loads((seeded.run / "plan.json").read_text())["notes"]
    assert [note["choice"] for note in notes if note["topic"] == "not used"] == ["generator of the DataLoader"]


class Slow(torch.utils.data.Dataset[Any]):
    """Each item takes 0.2 s, by the clock `perf_counter`."""

    seconds = 0.0

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        self.seconds += 0.2
        return torch.full((20,), index / 300), index % 3

    def perf_counter(self) -> float:
        return self.seconds


@pytest.mark.process
def test_of_slow_data_little_is_read_ahead_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(fingerprint, "time", slow)
    result = tw.fit(net(), slow, nn.functional.cross_entropy, until="1steps", batch=2, quiet=True)
    notes = json.loads((result.run / "plan.json").read_text())["notes"]
    (note,) = [note for note in notes if note["topic"] == "fingerprint"]
    assert note["choice"] == "data.train, only 4 of 300 items, as they are slow to read"


@pytest.mark.parametrize("argument", ["data", "val"])
def test_an_empty_set_is_refused_by_name(argument: str) -> None:
    sets = {"data": data(), "val": data(40), argument: data(0)}
    with pytest.raises(UsageError, match=f"fit: {argument}: the dataset is empty"):
        tw.fit(net(), sets["data"], nn.CrossEntropyLoss(), val=sets["val"], until="2steps", quiet=True)


@pytest.mark.process
def test_a_loss_over_model_and_batch_with_validation() -> None:
    def loss(model: nn.Module, batch: Any) -> tw.Loss:
        x, y = batch
        logits = model(x)
        hits = (logits.argmax(1) == y).sum()
        return tw.Loss(nn.functional.cross_entropy(logits, y, reduction="sum"), float(len(y)), {"hits": hits})

    result = tw.fit(net(), data(), loss, val=data(40), until="30steps", batch=32, accumulation=2, quiet=True)
    assert result.val_loss is not None and 0 <= result.metrics["hits"] <= 1
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["batch"] == {"size": 32, "micro": 16, "accumulation": 2, "ranks": 1}
    assert not [note for note in plan["notes"] if "plain mean" in note["why"]]


@pytest.mark.process
def test_mistakes_name_their_remedy() -> None:
    with pytest.raises(UsageError, match="Module"):
        tw.fit({}, data(), nn.CrossEntropyLoss())  # type: ignore[arg-type]
    for given, said in (
        ({"learning_rate": 1}, "write lr= for learning_rate="),
        ({"colour": 1, "shape": 2}, r"the arguments are [^;]*; see docs/how-to/train-your-model.md\Z"),
        ({"eval_steps": 4, "save_every": 2}, r"'evaluation.every': \.\.\.} for eval_steps=.*'checkpoint.every'"),
        ({"patience": 4, "fp16": True}, r"EarlyStopping\(patience=3\)] for patience=; write precision= for fp16="),
        ({"max_epochs": 4, "callbacks": []}, r"max_epochs and none callbacks(.|\n)*epochs= for .*observers= for"),
        ({"gradient_clip_val": 0.5}, r"settings={'optimizer.clip.at': ...}"),
        ({"num_workers": 2}, r"settings={'data.workers': ...}"),
        ({"epoch": 2}, r"did you mean epochs=\?"),
        ({"qwxyz": 2}, "the arguments are model, data, loss"),
    ):
        with pytest.raises(UsageError, match=said):
            tw.fit(net(), data(), nn.CrossEntropyLoss(), **given)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"did you mean bf16\?"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), precision="bf16-mixed")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not callable") as raised:
        tw.fit(net(), data(), lambda net, batch: net(batch[0]).sum(), steps=1, quiet=True)
    assert "was called as loss(output, target)" in raised.value.__notes__[0]
    with pytest.raises(UsageError, match="is not a dataset"):
        tw.fit(net(), 7, nn.CrossEntropyLoss())
    with pytest.raises(RecipeError, match="until"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), until="10")
    with pytest.raises(UsageError, match="def loss"):
        tw.fit(net(), (data()[0],), nn.CrossEntropyLoss(), until="1steps", quiet=True)


@pytest.mark.process
def test_a_stream_is_read_only_once() -> None:
    class OneShot(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            x, y = data(80)
            self.items = iter(list(zip(x, y, strict=True)))
            self.given = 0

        def __iter__(self) -> Any:
            for item in self.items:
                self.given += 1
                yield item

    stream = OneShot()
    result = tw.fit(net(), stream, nn.CrossEntropyLoss(), until="1000steps", batch=16, quiet=True)
    assert (result.ending, result.step, stream.given) == ("data_exhausted", 5, 80)


@pytest.mark.process
def test_a_rehearsal_leaves_no_trace_in_a_buffer_that_is_put_anew() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mu", torch.zeros(20))
            self.fc = nn.Linear(20, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mu = 0.9 * self.mu + 0.1 * x.mean(0)  # type: ignore[has-type]
            return self.fc(x)  # type: ignore[no-any-return]

    model, (x, y) = Mean(), data(64)
    tw.fit(model, (x, y), nn.CrossEntropyLoss(), until="2steps", batch=64, quiet=True)
    torch.testing.assert_close(model.mu, 0.19 * x.mean(0))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "expanded", "overlapping", "empty"])
def test_a_rehearsal_puts_any_buffer_back(layout: str) -> None:
    """The adjacency of a graph is sparse; ``expand`` gives a buffer in which an element occurs twice."""
    kinds = {
        "coo": torch.eye(20).to_sparse(),
        "csr": torch.eye(20).to_sparse_csr(),
        "csc": torch.eye(20).to_sparse_csc(),
        "expanded": torch.ones(20).expand(20, -1),
        "overlapping": torch.ones(39).unfold(0, 20, 1),
        "empty": torch.empty(0, 20),
    }

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", kinds[layout])
            self.fc = nn.Linear(20, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.adjacency.values() if layout in ("csr", "csc") else self.adjacency
            if layout == "coo":
                one = self.adjacency._values()
            one = one[:1] if layout in ("expanded", "overlapping") else one
            one.mul_(2.0)
            mixed = x if layout == "empty" else (self.adjacency @ x.T).T
            return self.fc(mixed)  # type: ignore[no-any-return]

    model = Graph()
    state = tw.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.adjacency.to_dense().clone()
    x, y = data(8)
    first = StepBatch((MicroBatch((x, y), np.arange(8)),))
    seen = dry_run(state, first, nn.functional.cross_entropy, modes=[Mode(FP32, 1)], budget_s=0)
    assert torch.equal(model.adjacency.to_dense(), before)
    assert np.isfinite(seen.loss) and seen.activation_bytes > 0
    assert model.adjacency is kinds[layout]


@pytest.mark.slow
def test_an_evaluation_on_the_same_dataset_leaves_its_epoch_alone() -> None:
    class Epochal(torch.utils.data.Dataset[Any]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            x, y = data(64)
            return x[index] + self.epoch, y[index]

    def weights(val: bool) -> torch.Tensor:
        model, dataset = net(), Epochal()
        settings = {"evaluation.every": "12steps"}
        tw.fit(
            model,
            dataset,
            nn.CrossEntropyLoss(),
            val=dataset if val else None,
            until="24steps",
            batch=8,
            settings=settings,
            quiet=True,
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(val=True), weights(val=False))


def asked(**keys: Any) -> dict[str, Any]:
    result = tw.fit(net(), data(), nn.CrossEntropyLoss(), until="1steps", quiet=True, **keys)
    recipe: dict[str, Any] = yaml.safe_load((result.run / "recipe.yaml").read_text())
    return recipe


@pytest.mark.slow
def test_no_setting_is_lost_whatever_its_form() -> None:
    for keys in (
        {"lr": 0.123, "settings": {"optimizer": "sgd"}},
        {"settings": {"optimizer": "sgd", "optimizer.lr": 0.123}},
        {"settings": {"optimizer.lr": 0.123, "optimizer": "sgd"}},
        {"settings": {"optimizer": {"use": "sgd", "lr": 0.123}}},
        {"settings": {"optimizer": {"lr": 0.123, "args": {"momentum": 0.5}}}, "optimizer": "sgd"},
    ):
        optimizer = asked(**keys)["optimizer"]
        assert (optimizer["use"], optimizer["lr"]) == ("sgd", 0.123)
    assert optimizer["args"] == {"momentum": 0.5}
    assert asked(settings={"data": {"shuffle": False}})["data"]["train"]["use"] == "live:TensorDataset"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"settings": {"until.x": 1}}, "until is set twice"),
        ({"settings": {"schedule.warmup.x": 1}}, "warmup"),
        ({"settings": {"batch": 64, "batch.micro": 8}}, "holds no keys"),
        ({"settings": {7: 1}}, "not a path"),
        ({"settings": {"model.args": {"width": 8}}}, "model was passed"),
        ({"settings": {"model": {"args": {"width": 8}}}}, "model was passed"),
        ({"settings": {"model": "gpt"}}, "model was passed"),
        ({"settings": {"model.dtype": "bf16"}}, "model was passed"),
        ({"settings": {"loss.args.x": 8}}, "loss was passed"),
        ({"settings": {"data.val": "digits"}}, "val was passed"),
        ({"settings": {"data.train.args": {}}}, "train was passed"),
        ({"settings": {"optimizer.lr": 0.1}, "lr": 0.2}, "set twice"),
        ({"settings": [1]}, "mapping"),
        ({"settings": {"optimizer.use": "torch.optim:LBFGS"}}, "closure"),
    ],
)
def test_a_setting_that_cannot_be(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked(**keys)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss, r"write CrossEntropyLoss\(\)"),
        (lambda output: output.sum(), r"does not take two arguments, \(output, target\)"),
        (lambda output, target, weight: output.sum(), "does not take two arguments"),
        (nn.CTCLoss(), "does not take two arguments"),
        (lambda model, *, scale: model, "does not take two arguments"),
        (lambda model, x, y, z: model(x), r"takes \(model, x, y, z\), and this batch is a tuple of 2"),
        (None, r"forward\(input.*\) of the model does not take this batch(.|\n)*loss=nn.CrossEntropyLoss"),
    ],
)
def test_a_loss_that_is_no_function(loss: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tw.fit(net(), data(), loss, quiet=True)


class OwnLoss(nn.Module):
    """Computes its loss itself, as models of ``transformers`` do."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(4, 3), fails

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.fails:
            raise TypeError("a mistake of its own")
        return nn.functional.cross_entropy(self.layer(x), labels)


def test_keys_that_a_model_does_not_take_are_named() -> None:
    rows = {"x": torch.randn(8, 4), "label": torch.zeros(8, dtype=torch.long)}
    with pytest.raises(UsageError, match=r"which has the keys x, label(.|\n)*leave out label and add labels"):
        tw.fit(OwnLoss(), rows, steps=1, quiet=True)


class TakesAny(OwnLoss):
    def forward(self, x: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        return super().forward(x, labels)


def test_a_model_that_takes_any_key_is_told_what_is_missing_alone() -> None:
    rows = {"x": torch.randn(8, 4), "label": torch.zeros(8, dtype=torch.long)}
    with pytest.raises(UsageError) as caught:
        tw.fit(TakesAny(), rows, steps=1, quiet=True)
    assert caught.value.remedy.startswith("add labels (")


def test_a_mistake_inside_the_model_is_shown_as_it_is() -> None:
    rows = {"x": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long)}
    with pytest.raises(TypeError, match="a mistake of its own"):
        tw.fit(OwnLoss(fails=True), rows, steps=1, quiet=True)


def test_a_loss_by_its_name() -> None:
    by_name = tw.fit(net(), data(), "cross_entropy", steps=3, quiet=True)
    assert by_name.loss == pytest.approx(tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=3, quiet=True).loss)
    with pytest.raises(tw.TrainwrightError, match="cross_entropy"):  # the nearest name is the remedy
        tw.fit(net(), data(), "crossentropy", steps=3, quiet=True)


@pytest.mark.parametrize("weight", [torch.ones(3), -1.0, torch.tensor(-2.0), None, "4"])
def test_a_weight_that_is_none(weight: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> tw.Loss:
        return tw.Loss(model(batch[0]).sum(), weight)

    with pytest.raises(UsageError, match="weight of a Loss must be one number"):
        tw.fit(net(), data(), loss, until="1steps", quiet=True)


def test_metrics_may_be_numbers() -> None:
    def loss(model: nn.Module, batch: Any) -> tw.Loss:
        x, y = batch
        total = nn.functional.cross_entropy(model(x), y, reduction="sum")
        return tw.Loss(total, len(y), {"half": len(y) / 2, "one": torch.tensor([float(len(y))]), "each": True})

    result = tw.fit(net(), data(), loss, val=data(40), until="2steps", batch=8, accumulation=2, quiet=True)
    assert (result.metrics["half"], result.metrics["one"]) == (0.5, 1.0)
    with pytest.raises(UsageError, match="metric 'hits'"):
        tw.fit(net(), data(), lambda model, batch: tw.Loss(model(batch[0]).sum(), 1, {"hits": torch.ones(2)}))


def test_weights_without_values() -> None:
    with pytest.raises(UsageError, match=r"lazy module(.|\n)*model\(x"):
        tw.fit(nn.Sequential(nn.LazyLinear(3)), data(), nn.CrossEntropyLoss(), quiet=True)
    with pytest.raises(UsageError, match=r"meta device(.|\n)*to_empty"):
        tw.fit(nn.Linear(20, 3, device="meta"), data(), nn.CrossEntropyLoss(), quiet=True)


def test_what_is_no_observer_leaves_no_folder(tmp_path: Path) -> None:
    for wrong, said in ((7, "observer int is no object with"), (Stops, "is a class"), (lambda x: x, "does not take")):
        with pytest.raises(UsageError, match=said):
            tw.fit(net(), data(), nn.CrossEntropyLoss(), observers=[wrong], quiet=True)  # type: ignore[list-item]
    assert not (tmp_path / "runs").exists()


def test_sparse_gradients_are_named() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    ids = torch.zeros(16, 2, dtype=torch.int64)
    with pytest.raises(UsageError, match="sparse=True"):
        tw.fit(model, (ids, ids[:, 0]), nn.CrossEntropyLoss(), optimizer="sgd", until="1steps", quiet=True)
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_numpy_arrays_are_tensors() -> None:
    def losses(x: Any, y: Any) -> float | None:
        return tw.fit(net(), (x, y), nn.CrossEntropyLoss(), until="3steps", precision="fp32", quiet=True).loss

    x, y = data()
    frozen = x.numpy().copy()
    frozen.setflags(write=False)
    assert losses(x, y) == losses(x.numpy(), y.numpy()) == losses(frozen, y) == losses(x.numpy()[::-1][::-1], y)
    with pytest.raises(UsageError, match="cannot be a tensor"):
        losses(x, np.array(["a"] * len(x)))
    with pytest.raises(UsageError, match="different lengths"):
        losses(x.numpy(), y.numpy()[:-1])


@pytest.mark.slow
def test_a_validation_loader_says_its_batch_unless_settings_do() -> None:
    val = DataLoader(TensorDataset(*data(40)), batch_size=20)
    assert asked(val=val)["evaluation"]["batch"] == 20
    assert asked(val=val, settings={"evaluation.batch": 5})["evaluation"]["batch"] == 5
    assert asked(val=data(40))["evaluation"]["batch"] is None


def test_the_random_state_of_the_caller_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    models = [nn.Linear(4, 2) for _ in range(2)]
    torch.manual_seed(3)
    data = (torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)
    for expected in models:
        model = nn.Linear(4, 2)
        assert torch.equal(model.weight, expected.weight)
        tw.fit(model, data, nn.CrossEntropyLoss(), until="1steps", precision="fp32", quiet=True)


class Stops:
    """Asks for a stop as a signal does, after four steps."""

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> Stop | None:
        return Stop("SIGTERM", exit_code=75) if result.step == 4 else None

    def close(self) -> None: ...


@pytest.mark.examined
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("observers", "exit_code", "said"),
    [
        ([], 3, "finished"),
        ([Stops()], 75, "stopped by SIGTERM at step 4 of 8"),
    ],
)
def test_the_end_of_a_run_follows_its_findings(
    observers: list[Stops], exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that broadcasts against the prediction trains without an error, and learns the mean."""
    x, _ = data(64)
    model, target = nn.Linear(20, 1), x.sum(1)
    result = tw.fit(model, (x, target), nn.MSELoss(), until="8steps", batch=16, precision="fp32", observers=observers)
    assert result.exit_code == exit_code, "whoever asked for a stop is to start it again"
    assert [found.code for found in result.findings][:1] == ["loss.broadcast_target"]
    assert result.to_json()["findings"][0]["code"] == "loss.broadcast_target"
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict")]
    assert verdict.startswith(f"verdict: {said}, but ")
    assert "1 critical: loss.broadcast_target" in verdict


@pytest.mark.process
def test_the_environment_switches_the_doctor_off_unless_the_recipe_states_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_examined(**settings: Any) -> bool:
        verdict = tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=2, quiet=True, settings=settings).verdict
        assert verdict is not None
        return verdict.word != "not examined"

    monkeypatch.setenv("TRAINWRIGHT_DOCTOR", "off")
    assert not is_examined()
    assert is_examined(**{"log.doctor": True})
    monkeypatch.delenv("TRAINWRIGHT_DOCTOR")
    assert is_examined()


class Counting(nn.Module):
    """Counts its forward passes; the count is a part of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return out

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@pytest.mark.examined
@pytest.mark.slow
def test_a_module_that_counts_counts_the_steps_alone() -> None:
    """Neither the dry run nor a replay of the doctor is one of them, also after a resume."""
    model, resumed = Counting(), Counting()
    first = tw.fit(model, data(), nn.CrossEntropyLoss(), until="7steps", batch=32, quiet=True)
    assert model.calls == 7
    tw.fit(resumed, data(), nn.CrossEntropyLoss(), until="12steps", batch=32, quiet=True, resume=first.run)
    assert resumed.calls == 12


class Logging(Counting):
    def forward(self, x: Tensor) -> Tensor:
        with Path("calls.txt").open("a") as file:
            file.write("x")
        return super().forward(x)


@pytest.mark.examined
@pytest.mark.slow
def test_a_model_that_writes_files_is_neither_tried_nor_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    result = tw.fit(Logging(), data(), nn.CrossEntropyLoss(), until="7steps", batch=32)
    assert Path("calls.txt").read_text() == "x" * 7
    notes = {each["topic"]: each["why"] for each in json.loads((result.run / "plan.json").read_text())["notes"]}
    assert "it opens a file to write" in notes["dry run"]
    said = capsys.readouterr()
    assert (said.out + said.err).count("no step of this run is replayed: it opens a file to write") == 1


def test_train_accepts_the_path_of_a_recipe() -> None:
    recipe = {"until": "1steps", "model": "gpt", "data": {"train": "python-topics"}}
    Path("small.yaml").write_text(yaml.safe_dump(recipe | {"log": {"evry": 1}}))
    with pytest.raises(RecipeError, match=r"small\.yaml:.*log\.evry"):
        tw.train("small.yaml", quiet=True)
    with pytest.raises(UsageError, match="the recipe is a dict"):
        tw.train(recipe)  # type: ignore[arg-type]


def test_resume_accepts_a_result_and_refuses_true() -> None:
    first = tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=2, quiet=True)
    second = tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=3, quiet=True, resume=first)
    assert (second.run, second.step) == (first.run, 3)
    with pytest.raises(UsageError, match="resume is True"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=3, quiet=True, resume=True)


def norm_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 3))


def test_an_error_in_the_loss_saves_the_last_step_and_a_resume_has_the_same_bits() -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        if done == [1, 2, 3, 4, 5]:
            raise ValueError("my bug")
        return nn.functional.cross_entropy(output, target)

    whole, stopped, resumed, done = norm_net(), norm_net(), norm_net(), list[int]()
    given: dict[str, Any] = {"until": "9steps", "seed": 3, "quiet": True, "settings": {"log.doctor": False}}
    tw.fit(whole, data(), nn.functional.cross_entropy, **given)
    with pytest.raises(ValueError, match="my bug") as caught:
        observers = [lambda result, state: done.append(result.step)]
        tw.fit(stopped, data(), broken, name="broken", observers=observers, **given)
    assert [each.name for each in Path("runs/broken/checkpoints").glob("step-*")] == ["step-00000005"]
    assert "step-00000005" in caught.value.__notes__[-1]
    tw.fit(
        resumed, data(), nn.functional.cross_entropy, name="broken", resume="runs/broken", accept="loss.use", **given
    )
    for one, other in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_an_error_in_a_custom_step_names_that_nothing_is_saved() -> None:
    def step(state: tw.TrainState, batch: StepBatch) -> Tensor:
        if state.step == 3:
            raise ValueError("my bug")
        loss = nn.functional.cross_entropy(state.model(batch.data[0]), batch.data[1])
        loss.backward()
        state.optimizer.step()
        return loss.detach()

    with pytest.raises(ValueError, match="my bug") as caught:
        tw.fit(net(), data(), advance=step, quiet=True)
    assert caught.value.__notes__[-1].startswith("nothing is saved: step 4 may be incomplete")


class AsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.body(x)}


@pytest.mark.parametrize(
    ("model", "samples", "hint"),
    [
        (net, [(x, "cat") for x in data(64)[0]], "the labels are strings, such as 'cat'"),
        (AsDict, data(64), r"a dict with hidden, logits.*loss\(output\['logits'\], target\)"),
        (lambda: nn.LSTM(20, 3), data(64), r"a tuple: .*loss\(output\[0\], target\)"),
    ],
    ids=["strings", "dict", "tuple"],
)
def test_a_loss_that_fails_names_what_it_got(model: Callable[[], nn.Module], samples: object, hint: str) -> None:
    with pytest.raises(TypeError) as raised:
        tw.fit(model(), samples, nn.CrossEntropyLoss(), steps=1, quiet=True)
    assert re.search(hint, raised.value.__notes__[0])


def test_text_that_reaches_a_model_is_named() -> None:
    samples = [{"x": x, "labels": "cat"} for x in torch.randn(64, 4)]
    with pytest.raises(UsageError, match="text in 'labels', such as 'cat'") as raised:
        tw.fit(OwnLoss(), samples, steps=1, quiet=True)
    assert raised.value.remedy is not None and "from 0" in raised.value.remedy


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "language_model"])
def test_a_loss_by_name_names_a_batch_that_is_no_pair(loss: str) -> None:
    x, labels = data(64)
    with pytest.raises(UsageError, match=f"{loss} needs batches of .*a dict with x, labels"):
        tw.fit(net(), {"x": x, "labels": labels}, loss, steps=1, quiet=True)


def test_a_split_that_is_not_used_is_named() -> None:
    splits = {"train": TensorDataset(*data(64)), "test": TensorDataset(*data(16))}
    for val, expected in ((None, ["the split 'test'"]), (splits["test"], []), ({"clean": splits["test"]}, [])):
        result = tw.fit(net(), splits, nn.functional.cross_entropy, val=val, steps=1, quiet=True)
        notes = json.loads((result.run / "plan.json").read_text())["notes"]
        assert [note["choice"] for note in notes if note["topic"] == "not used"] == expected


def test_conversations_need_a_chat_template() -> None:
    turns = [{"role": "user", "content": "Name a bird."}, {"role": "assistant", "content": "A heron."}]
    with pytest.raises(DataError, match="collating conversations") as raised:
        tw.fit(OwnLoss(), [{"messages": turns[: 1 + at % 2]} for at in range(40)], steps=1, quiet=True)
    assert raised.value.remedy is not None and "Chat(path, tokenizer=...)" in raised.value.remedy
