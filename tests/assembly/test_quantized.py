"""AdamW with moments of 8 and 4 bits, against torchao's own classes."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests import forked
from trainwright.engine.guard import update_on_device
from trainwright.errors import UsageError
from trainwright.optim import quantized
from trainwright.optim.choose import make_optimizer
from trainwright.optim.quantized import AdamW4bit, AdamW8bit
from trainwright.optim.torchao import torchao_module

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
BOTH = pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit], ids=lambda kind: kind.__name__)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def network() -> nn.Module:
    """Three quantized tensors, and some that are too small or no multiple of a block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 67), nn.Linear(67, 64))


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), x.roll(1, 1)).backward()
        optimizer.step()


def tensors(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [(name, value) for state in optimizer.state.values() for name, value in state.items()]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@BOTH
@pytest.mark.parametrize("chunk", [2**20, 1024], ids=["whole", "chunks"])
def test_the_bits_are_those_of_torchao(
    kind: type[AdamW8bit | AdamW4bit], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "CHUNK_VALUES", chunk)
    ours = network()
    theirs, unquantized = copy.deepcopy(ours), copy.deepcopy(ours)
    reference = getattr(torchao_module("optim", "this test"), kind.__name__)(theirs.parameters(), **OPTIONS)
    train(ours, kind(ours.parameters(), **OPTIONS), 4)  # type: ignore[arg-type]
    with torch.compiler.set_stance("force_eager"):
        train(theirs, reference, 4)
    assert_same(ours, theirs)
    train(unquantized, torch.optim.AdamW(unquantized.parameters(), **OPTIONS), 4)  # type: ignore[arg-type]
    assert not torch.equal(ours[0].weight, unquantized[0].weight)  # type: ignore[index]


@BOTH
def test_the_state_is_plain_tensors_and_small_ones_stay_as_they_are(kind: type[AdamW8bit | AdamW4bit]) -> None:
    model = network()
    optimizer = kind(model.parameters())
    train(model, optimizer, 1)
    assert {type(value) for _, value in tensors(optimizer)} == {Tensor}
    by_name = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert {name for name, state in by_name.items() if "exp_avg_codes" in state} == {"0.weight", "2.weight"}
    large, small = by_name["0.weight"], by_name["0.bias"]
    per_code = 1 if kind is AdamW8bit else 2
    assert (large["exp_avg_codes"].dtype, large["exp_avg_codes"].numel()) == (torch.uint8, 64 * 128 // per_code)
    assert small["exp_avg"].dtype == torch.float32


@BOTH
def test_it_goes_on_from_its_state_dict(kind: type[AdamW8bit | AdamW4bit]) -> None:
    straight = network()
    one = kind(straight.parameters(), lr=1e-2)
    train(straight, one, 3)
    stopped = copy.deepcopy(straight)
    two = kind(stopped.parameters(), lr=1e-2)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert [(name, value.dtype) for name, value in tensors(two)] == [(n, v.dtype) for n, v in tensors(one)]
    for model, optimizer in ((straight, one), (stopped, two)):
        train(model, optimizer, 3, first=3)
    assert_same(straight, stopped)


@BOTH
def test_a_skipped_update_leaves_every_bit(kind: type[AdamW8bit | AdamW4bit]) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    before = copy.deepcopy([*model.parameters(), *(value for _, value in tensors(optimizer))])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    update_on_device(torch.tensor(True), optimizer)
    after = [*model.parameters(), *(value for _, value in tensors(optimizer))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_weight_that_does_not_lie_row_by_row() -> None:
    torch.manual_seed(0)
    row = nn.Conv2d(32, 64, 3)
    column = copy.deepcopy(row).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for layer in (row, column):
        optimizer = AdamW8bit(layer.parameters(), lr=1e-2)
        for _ in range(2):
            layer.weight.grad = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
            optimizer.step()
    assert not column.weight.is_contiguous()
    assert torch.equal(row.weight, column.weight)


@pytest.mark.parametrize("size", [0, 3, 100, 2.5])
def test_a_block_is_a_power_of_two(size: object) -> None:
    with pytest.raises(UsageError, match="power of 2"):
        make_optimizer("adamw8bit", network(), args={"block_size": size})


@pytest.mark.process
@pytest.mark.slow
def test_the_import_of_torchao_prints_nothing() -> None:
    done = forked.run(
        "import logging; logging.getLogger('torchao').setLevel('INFO')\n"
        "from trainwright.optim.torchao import torchao_module as module\n"
        "module('float8', 'a test'), module('prototype.moe_training.mxfp8_linear', 'a test')\n"
        "assert logging.getLogger('torchao').level == logging.INFO\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
