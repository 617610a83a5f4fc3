"""The coordinate check, and muP of the GPT in the box."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.commands.mup_check import MupCheck, build_by_width, check_widths, draw, slope
from trainwright.errors import UsageError
from trainwright.models.gpt import GPT, gpt
from trainwright.optim.choose import make_optimizer
from trainwright.optim.groups import GroupRule

WIDTHS = (32, 64, 128)
SETTINGS = ("batch.size=4", "optimizer.lr=5e-3", "model.args.base_width=32", "data.val=null")


def small(init: str, width: int = 64, **options: object) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": width, "base_width": 32}
    return gpt(**{**shape, "init": init, **options})


@pytest.fixture(scope="module")
def checks() -> dict[str, MupCheck]:
    def check(init: str) -> MupCheck:
        build = build_by_width("gpt-tiny", "model.args.d_model", [*SETTINGS, f"model.args.init={init}"])
        return check_widths(build, WIDTHS, steps=3, say=lambda line: None)

    return {init: check(init) for init in ("gpt2", "mup")}


@pytest.mark.slow
@pytest.mark.process
def test_the_standard_parametrization_grows_and_mup_stays_flat(checks: dict[str, MupCheck], tmp_path: Path) -> None:
    grown = {layer.name for layer in checks["gpt2"].layers if layer.verdict == "grows"}
    assert {"blocks.0.mlp.down", "blocks.1.mlp.down", "blocks.1.attention.output", "head"} <= grown
    assert [layer for layer in checks["mup"].layers if layer.verdict != "stable"] == []
    assert [checks[init].exit_code for init in ("gpt2", "mup")] == [3, 0]
    assert " layers grow" in checks["gpt2"].lines()[-2]
    assert checks["mup"].lines()[-1].startswith("verdict  stable")
    found = draw(checks["gpt2"], tmp_path / "check.svg")
    top = ElementTree.parse(found.picture).getroot()
    assert [child.get("y") for child in top if child.tag.endswith("svg")] == ["0", "400"], "one picture of two charts"


def test_the_slope_of_a_power_is_its_exponent() -> None:
    assert slope((64, 128, 512), [3 * width**0.5 for width in (64, 128, 512)]) == pytest.approx(0.5)
    assert slope((64, 128), (1.0, 0.0)) is None
    assert slope((64, 128), (1.0, float("inf"))) is None


@pytest.mark.slow
@pytest.mark.process
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [each for setting in (*SETTINGS, "model.args.layers=1") for each in ("--set", setting)]
    done = CliRunner().invoke(app, ["mup-check", "gpt-tiny", *given, "--steps", "2", "--widths", "32", "64", "--json"])
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["widths"], seen["steps"], seen["picture"]) == ([32, 64], 2, "mup-check.svg")
    assert done.exit_code == (0 if seen["stable"] else 3)
    assert Path("mup-check.svg").is_file()


class Deep(nn.Module):
    """Two hidden layers; ``ratio``: the growth of the width, by muP."""

    def __init__(self, width: int, *, mup: bool) -> None:
        super().__init__()
        self.ratio = width / 32 if mup else 1.0
        self.input, self.hidden, self.head = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)
        nn.init.normal_(self.head.weight, std=32**-0.5 if mup else width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.hidden(torch.relu(self.input(x)))) / self.ratio)
        return out

    def fan_in_ratios(self) -> dict[torch.Tensor, float]:
        return {self.hidden.weight: self.ratio} if self.ratio != 1 else {}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("mup", [False, True])
def test_a_model_in_python(mup: bool) -> None:
    x = torch.randn(64, 16)
    data = [(row, int(row.argmax()) % 4) for row in x]
    found = tw.mup_check(
        lambda width: Deep(width, mup=mup),
        data,
        nn.CrossEntropyLoss(),
        widths=(32, 128, 512),
        batch=32,
        optimizer="adam",
        lr=0.01,
        quiet=True,
        epochs=8,
    )
    verdicts = {layer.name: layer.verdict for layer in found.layers}
    assert (verdicts["hidden"], verdicts["head"]) == (("stable", "stable") if mup else ("grows", "grows"))


def test_wrong_widths_are_refused() -> None:
    with pytest.raises(UsageError, match="two widths"):
        tw.mup_check("gpt-tiny", widths=(64,))


def test_mup_is_the_standard_initialization_at_the_base_width() -> None:
    standard, mup = small("gpt2", 32).state_dict(), small("mup", 32).state_dict()
    assert small("mup", 32).fan_in_ratios() == {}
    for name in standard:
        assert mup[name].std().item() == pytest.approx(standard[name].std().item(), rel=0.2, abs=1e-6), name


def test_mup_divides_variance_output_and_learning_rate_by_the_width() -> None:
    narrow, wide = small("mup", 32, tied=False), small("mup", 512, tied=False)
    of = {name: each.detach().std().item() for name, each in narrow.named_parameters() if each.ndim == 2}
    for name, weight in wide.named_parameters():
        if weight.ndim == 2:
            ratio = 4.0 if name.startswith("blocks") else 1.0  # the root of 512 / 32
            assert of[name] / weight.detach().std().item() == pytest.approx(ratio, rel=0.2), name
    ids = torch.arange(8)[None]
    torch.testing.assert_close(wide(ids), wide.head(wide(ids, hidden=True)))
    assert wide.blocks[0].attention.scale == 8 / 256  # type: ignore[union-attr]
    optimizer = make_optimizer("adamw", wide, lr=1e-2, weight_decay=0.1)
    groups = {group["lr"]: group for group in optimizer.param_groups}
    assert set(groups) == {1e-2, 1e-2 / 16}
    hidden = {id(each) for each in groups[1e-2 / 16]["params"]}
    assert hidden == {id(each) for name, each in wide.named_parameters() if "blocks" in name and each.ndim == 2}
    assert groups[1e-2 / 16]["weight_decay"] == pytest.approx(1.6)  # the product of both stays


def test_a_rule_of_the_user_is_scaled_too() -> None:
    model = small("mup", 64)
    optimizer = make_optimizer("adamw", model, lr=1e-2, rules=[GroupRule("blocks.0.*", lr=4e-3)])
    rates = {name: group["lr"] for group in optimizer.param_groups for name in _names(model, group["params"])}
    assert (rates["blocks.0.mlp.up.weight"], rates["blocks.0.mlp.up.bias"]) == (2e-3, 4e-3)
    assert rates["blocks.1.mlp.up.weight"] == 5e-3


def _names(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    chosen = set(map(id, parameters))
    return [name for name, each in model.named_parameters() if id(each) in chosen]


def test_other_rules_than_adam_are_refused() -> None:
    make_optimizer("sgd", small("mup", 32))  # at the base width there is nothing to scale
    with pytest.raises(UsageError, match="learning rates for Adam"):
        make_optimizer("sgd", small("mup", 64))
