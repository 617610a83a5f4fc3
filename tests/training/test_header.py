"""The header of a run says what it trains with, and who decided it: on the screen, in the log, and in plan.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainwright as tw
from trainwright.engine.chunked import logits_bytes
from trainwright.models.gpt import gpt
from trainwright.plan.header import origins_in
from trainwright.runs.folder import RunFolder

pytestmark = pytest.mark.process  # each starts threads that read the machine


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 4), torch.randint(2, (32,))


Header = dict[str, tuple[str, str]]


def header_of(run: Path) -> Header:
    settings = json.loads((run / "plan.json").read_text())["header"]["settings"]
    return {each["name"]: (each["value"], each["origin"]) for each in settings}


def fitted(given: object = None, **settings: Any) -> Header:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    made = {key: value(model) if value is _sgd else value for key, value in settings.items()}
    more = {"log.doctor": False, **made.pop("settings", {})}  # type: ignore[dict-item]
    samples = data() if given is None else given
    return header_of(tw.fit(model, samples, nn.CrossEntropyLoss(), steps=2, quiet=True, settings=more, **made).run)


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_plain_call() -> None:
    assert fitted() == {
        "optimizer": ("AdamW, weight decay 0.01", "default"),
        "lr": ("0.001", "default"),
        "schedule": ("constant", "default"),
        "clip": ("none", "default"),
        "precision": ("fp32", "default"),
        "not finite": ("an update with NaN or infinity is left out", "default"),
        "batch": ("32 samples", "default"),
        "order": ("shuffled by the seed 1337", "default"),
        "random": ("the generators of the process, not seeded", "default"),
        "update": ("fused kernel", "planned"),
        **({"threads": ("1", "planned")} if torch.get_num_threads() > 1 else {}),
    }


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*data(), strict=True)


def test_a_stream_is_not_named_as_shuffled() -> None:
    result = tw.fit(nn.Linear(4, 2), Stream(), nn.CrossEntropyLoss(), steps=1, quiet=True)
    assert header_of(result.run)["order"][0].startswith("as the data come")


def test_settings_of_objects_are_configured() -> None:
    found = fitted(DataLoader(TensorDataset(*data()), 8, shuffle=True, drop_last=True), optimizer=_sgd)
    assert found["optimizer"] == ("SGD, momentum 0.9", "configured") and found["lr"] == ("0.1", "configured")
    assert found["batch"] == ("8 samples, a short last batch is left out", "configured")
    assert found["order"] == ("as a loop over the DataLoader", "configured")
    assert found["schedule"] == ("constant", "default") and "update" not in found


ADAMW, IN_GROUPS = "AdamW, weight decay 0.01", "AdamW, weight decay 0 to 0.01 in 2 groups"


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("optimizer", {"optimizer": "sgd"}, ("SGD", "configured")),
        ("lr", {"lr": 0.5}, ("0.5", "configured")),
        ("lr", {"optimizer": partial(AdamW, lr=0.25)}, ("0.25", "configured")),
        ("lr", {"optimizer": AdamW}, ("0.001", "default")),
        ("optimizer", {"settings": {"optimizer.args": {"eps": 1e-6}}}, (f"{ADAMW}, eps 1e-06", "configured")),
        ("optimizer", {"settings": {"optimizer.decay_norms_and_biases": False}}, (IN_GROUPS, "configured")),
        ("schedule", {"schedule": "wsd", "warmup": "1steps"}, ("wsd, warm-up 1 steps, floor 0", "configured")),
        ("schedule", {"schedule": partial(StepLR, step_size=1)}, ("StepLR, stepped every 1steps", "configured")),
        ("schedule", {"warmup": "1steps"}, ("constant, warm-up 1 steps", "configured")),
        ("clip", {"clip": 0.5}, ("norm at 0.5", "configured")),
        (
            "batch",
            {"batch": 8, "accumulation": 3},
            ("8 in micro-batches of at most 3: accumulation 3, ranks 1", "configured"),
        ),
        ("clip", {"settings": {"optimizer.clip": {"by": "value", "at": 0.1}}}, ("value at 0.1", "configured")),
        ("precision", {"precision": "bf16"}, ("bf16", "configured")),
        ("batch", {"batch": 64}, ("64 samples, but the data have only 32", "configured")),
        (
            "batch",
            {"batch": 8, "accumulation": 2},
            ("8 = 4 x 2 x 1 (micro-batch x accumulation x ranks)", "configured"),
        ),
        ("order", {"seed": 7}, ("shuffled by the seed 7", "configured")),
        ("order", {"settings": {"data.shuffle": False}}, ("that of the dataset", "configured")),
        ("random", {"seed": 7}, ("seed 7", "configured")),
        ("average", {"settings": {"model.ema": 0.9}}, ("of the weights, decay 0.9", "configured")),
        (
            "average",
            {"settings": {"model.swa": {"start": "1steps", "every": "2steps"}}},
            ("the mean of the weights every 2 steps from step 1 on", "configured"),
        ),
        ("spikes", {"settings": {"spikes.policy": "skip"}}, ("skip", "configured")),
        ("kernels", {"settings": {"deterministic": True}}, ("deterministic", "configured")),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_call_sets_is_configured(name: str, settings: dict[str, Any], expected: tuple[str, str]) -> None:
    assert fitted(**settings)[name] == expected


def test_the_preset_is_named_and_what_is_set_beside_it_is_configured() -> None:
    found = fitted(preset="recommended", schedule="constant", lr=0.1)
    assert found["clip"] == ("norm at 1", "recommended") and found["schedule"] == ("constant", "configured")
    assert found["precision"][1] == "planned", "the preset leaves it to the plan"
    assert found["optimizer"] == ("AdamW, weight decay 0 to 0.01 in 2 groups", "recommended")
    assert found["lr"] == ("0.1", "configured")


def test_it_is_printed_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 2)
    result = tw.fit(model, data(), nn.CrossEntropyLoss(), optimizer=_sgd(model), steps=2)
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "optimizer   SGD, momentum 0.9 (configured)",
        "clip        none (default)",
        "precision   fp32 (default)",
    ):
        assert lines.count(line) == 1
    assert sum(line.startswith(("precision", "batch", "schedule")) for line in lines) == 3, "nothing is said twice"
    started = json.loads((result.run / "log.jsonl").read_text().splitlines()[0])
    assert started["kind"] == "started" and started["settings"]["schedule"] == "constant (default)"
    assert list(started["settings"]) == list(header_of(result.run))


RECIPE = """
until: 4steps
preset: recommended
model: {use: mlp, args: {sizes: [64, 8, 10]}}
data: {train: digits}
batch: {size: 16}
optimizer: {lr: 0.1}
log: {doctor: false}
"""


def test_a_resumed_run_knows_what_was_configured_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe in its folder states every value."""
    pytest.importorskip("sklearn")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = tw.train(tw.load("recipe.yaml"), quiet=True).run
    first = header_of(run)
    assert first["clip"] == ("norm at 1", "recommended") and first["random"] == ("seed 1337", "default")
    assert first["lr"] == ("0.1", "configured") and first["schedule"][1] == "recommended"
    longer = tw.load(run / "recipe.yaml", overrides=["until=8steps", "optimizer.clip.at=0.5"], environ={})
    tw.train(longer, resume=RunFolder.open(run), accept=["all"])
    again = header_of(run)
    assert again["clip"] == ("norm at 0.5", "configured")
    assert {name: again[name] for name in ("lr", "random", "schedule")} == {
        name: first[name] for name in ("lr", "random", "schedule")
    }
    assert "clip        norm at 0.5 (configured)" in capsys.readouterr().out


@pytest.mark.parametrize("room", ["plenty", "none"])
def test_logits_are_computed_in_chunks_only_where_the_plan_has_no_room(room: str) -> None:
    """The decision is kept: chunks round otherwise, and a resumed run must have the same bits."""
    ids = torch.randint(11, (32, 9))
    model = gpt(vocab_size=11, block_size=8, layers=1, heads=2, d_model=16)
    settings = {"log.doctor": False, "batch.size": 16}
    with pytest.MonkeyPatch.context() as patched:
        if room == "none":
            patched.setattr("trainwright.training.prepare.room_for_logits", lambda usable, held: 1000)
        run = tw.fit(model, (ids[:, :-1], ids[:, 1:]), "language_model", steps=2, quiet=True, settings=settings).run
    found, most = header_of(run), json.loads((run / "plan.json").read_text())["settled"]["max_logits_bytes"]
    if room == "plenty":
        assert "loss" not in found and most > logits_bytes(16 * 8, 11)
        return
    assert found["loss"] == ("computed in chunks", "planned") and most == 1000
    longer = tw.fit(
        model, (ids[:, :-1], ids[:, 1:]), "language_model", steps=4, quiet=True, settings=settings, resume=run
    )
    assert header_of(longer.run)["loss"] == ("computed in chunks", "planned")


@pytest.mark.slow
def test_what_the_plan_decided_where_it_was_left_open_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the user has written ``auto`` or a size, and in the part that resumes the run."""
    settings = {
        "log.doctor": False,
        "batch": {"size": 16, "micro": "auto"},
        "model.activation_checkpointing": "400KiB",
        "optimizer.offload": "auto",
    }

    def trained(steps: int, **more: Any) -> Header:
        torch.manual_seed(0)
        model, ids = gpt(vocab_size=11, block_size=32, layers=2, heads=2, d_model=16), torch.randint(11, (32, 33))
        samples = ids[:, :-1], ids[:, 1:]
        return header_of(tw.fit(model, samples, "language_model", steps=steps, settings=settings, **more).run)

    found = trained(2)
    printed = capsys.readouterr().out
    assert found["batch"][1] == "planned" and "micro-batch" in found["batch"][0]
    blocks, origin = found["recompute"]
    assert blocks.endswith("of 2 blocks") and not blocks.startswith("0") and origin == "planned"
    assert printed.count("KiB usable") == 1, "the reason is printed once"
    again = trained(3, resume="runs/run")
    assert (again["batch"], again["recompute"]) == (found["batch"], found["recompute"])


def test_nothing_is_named_as_planned_where_the_plan_changed_nothing() -> None:
    found = fitted(settings={"batch": {"size": 8, "micro": "auto"}, "optimizer.offload": "auto"})
    assert not {"recompute", "offload", "compile", "loss"} & found.keys()
    assert found["batch"][1] == "planned"


def test_a_resumed_run_has_no_first_loss(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"log.doctor": False}
    for until, count in (("2steps", 1), ("4steps", 0)):
        resume = {"resume": "runs/run"} if until == "4steps" else {}
        tw.fit(nn.Linear(4, 2), data(), nn.CrossEntropyLoss(), until=until, settings=settings, **resume)
        assert capsys.readouterr().out.count("first loss") == count


def test_origins_of_an_earlier_version_are_renamed() -> None:
    settings = [{"name": "lr", "origin": "asked"}, {"name": "clip", "origin": "default"}]
    assert origins_in({"header": {"settings": settings}}) == {"lr": "configured", "clip": "default"}
