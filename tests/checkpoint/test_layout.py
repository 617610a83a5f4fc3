"""Strides, complex numbers, tensor subclasses and hidden buffers survive a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import trainwright as tw
from trainwright.checkpoint.average import Ema
from trainwright.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from trainwright.checkpoint.codec import decode, encode, same_bits
from trainwright.checkpoint.staging import on_host
from trainwright.checkpoint.train_state import TrainState
from trainwright.optim.choose import make_optimizer


def through_a_file(tree: object, folder: Path) -> object:
    tensors, value = encode(tree)
    save_file(on_host(tensors), folder / "x.safetensors")
    return decode(load_file(folder / "x.safetensors"), json.loads(json.dumps(value)))


DENSE = [
    torch.randn(3, 5).t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(4, 2, 3).permute(2, 0, 1),
    torch.randn(3, 4, dtype=torch.complex128).t().conj(),
]
WITH_GAPS = [torch.randn(6)[::2], torch.zeros(1).expand(4), torch.empty(0, 3), torch.randn(3, dtype=torch.complex64)]


@pytest.mark.parametrize("tensor", DENSE)
def test_a_tensor_comes_back_as_it_lay(tensor: Tensor, tmp_path: Path) -> None:
    back = through_a_file({"x": tensor}, tmp_path)["x"]  # type: ignore[index]
    assert same_bits(back, tensor.resolve_conj())
    assert not back.is_contiguous() and back.stride() == tensor.stride()


@pytest.mark.parametrize("tensor", WITH_GAPS)
def test_a_tensor_that_does_not_fill_its_memory_comes_back_row_by_row(tensor: Tensor, tmp_path: Path) -> None:
    back = through_a_file({"x": tensor}, tmp_path)["x"]  # type: ignore[index]
    assert same_bits(back, tensor) and back.is_contiguous()


class Conv(nn.Module):
    """One weight lies channels last, one is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(2, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.turned


def trained(state: TrainState, steps: int) -> None:
    for number in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.full((2, 3, 5, 5), 1.0 + number)).square().sum().backward()
        state.optimizer.step()
        state.ema.update()  # type: ignore[call-arg]
        state.step += 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=0.1, fused=True),
        lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: AdamW(p, lr=0.1, foreach=True),
        lambda p: AdamW(p, lr=0.1, amsgrad=True),
    ],
)
def test_a_fused_step_after_a_resume_is_the_same_bits(make: Callable[[object], Optimizer], tmp_path: Path) -> None:
    def fresh() -> TrainState:
        model = Conv()
        return TrainState(model, make(model.parameters()), ema=Ema(model, 0.9))

    straight = fresh()
    trained(straight, 3)
    path, _ = save_checkpoint(straight, tmp_path)
    trained(straight, 3)
    resumed = fresh()
    load_checkpoint(resumed, path)
    strides = [state["exp_avg"].stride() for state in resumed.optimizer.state.values() if "exp_avg" in state]
    assert strides in ([], [p.stride() for p in resumed.model.parameters()])
    trained(resumed, 3)
    for name, weight in straight.model.state_dict().items():
        assert same_bits(weight, resumed.model.state_dict()[name]), name


class WithMaster(SGD):
    """Keeps a copy of each weight in fp32, and a counter that is an integer."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("master", p.detach().float().clone())
                state.setdefault("count", torch.tensor(2**40 + 1))
                state["master"] -= 1e-4 * p.grad.float()
                state["count"] += 1
                p.data.copy_(state["master"])
        self.state["own"] = {"calls": self.state.get("own", {}).get("calls", 0) + 1}  # type: ignore[call-overload]


def test_state_keeps_its_own_type_beside_weights_of_bf16(tmp_path: Path) -> None:
    def fresh() -> TrainState:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        return TrainState(model, WithMaster(model.parameters(), lr=1.0))

    state = fresh()
    state.model(torch.ones(1, 4).bfloat16()).sum().backward()
    state.optimizer.step()
    path, _ = save_checkpoint(state, tmp_path)
    resumed = fresh()
    load_checkpoint(resumed, path)
    for live, back in zip(state.model.parameters(), resumed.model.parameters()):
        one, two = state.optimizer.state[live], resumed.optimizer.state[back]
        assert same_bits(one["master"], two["master"]) and same_bits(one["count"], two["count"])
    assert resumed.optimizer.state["own"] == {"calls": 1}


def test_weights_that_are_thawed_begin_with_the_buffers_of_a_new_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    state = TrainState(model, make_optimizer("sgd", model, lr=0.1, args={"momentum": 0.9}))
    model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()
    path, _ = save_checkpoint(state, tmp_path)
    thawed = copy.deepcopy(model).requires_grad_(True)
    resumed = TrainState(thawed, make_optimizer("sgd", thawed, lr=0.1, args={"momentum": 0.9}))
    load_checkpoint(resumed, path)
    thawed(torch.ones(1, 3)).sum().backward()
    resumed.optimizer.step()
    assert all(p.grad is not None and p in resumed.optimizer.state for p in thawed.parameters())


def test_a_loaded_checkpoint_can_be_deleted(tmp_path: Path) -> None:
    state = TrainState(model := Conv(), AdamW(model.parameters()))
    trained(state, 1)
    path, _ = save_checkpoint(state, tmp_path)
    load_checkpoint(state, path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what is mapped")
    assert str(path) not in maps.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_a_wrapper_calls_otherwise_is_the_same_average(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    state = TrainState(compiled, SGD(model.parameters(), lr=0.1), ema=Ema(compiled, 0.5))
    state.ema.shadow["weight"].fill_(7.0)  # type: ignore[union-attr]
    path, _ = save_checkpoint(state, tmp_path)
    plain = copy.deepcopy(model)
    resumed = TrainState(plain, SGD(plain.parameters(), lr=0.1), ema=Ema(plain, 0.5))
    load_checkpoint(resumed, path)
    assert resumed.ema.shadow["weight"].unique().tolist() == [7.0]  # type: ignore[union-attr]


class Centred(nn.Module):
    """A loss that keeps a centre; a model beside it that counts in a buffer no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(2), persistent=False)


def test_state_of_the_loss_and_hidden_buffers_come_back(tmp_path: Path) -> None:
    model, loss = Counting(), Centred()
    model.seen += 5  # type: ignore[assignment]
    loss.centre += 3  # type: ignore[assignment]
    state = TrainState(model, SGD(model.parameters(), lr=0.1), loss=loss)
    path, _ = save_checkpoint(state, tmp_path)
    fresh, centred = Counting(), Centred()
    load_checkpoint(TrainState(fresh, SGD(fresh.parameters(), lr=0.1), loss=centred), path)
    assert fresh.seen.tolist() == [5, 5] and centred.centre.tolist() == [3, 3, 3]
    longer = Counting()
    longer.seen = torch.zeros(9)  # a table of another length is made anew by its module
    load_checkpoint(TrainState(longer, SGD(longer.parameters(), lr=0.1)), path)
    assert longer.seen.tolist() == [0] * 9


class Centring(nn.Module):
    """A loss whose buffer follows what it sees, in training and in evaluation; as centred losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)  # type: ignore[has-type]
        return nn.functional.cross_entropy(output - self.mean, target)


@pytest.mark.process
def test_a_loss_that_keeps_a_mean_is_resumed_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    data = (torch.randn(64, 4), torch.randint(0, 3, (64,)))

    def fit(**more: Any) -> tw.Result:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 3), Centring()
        settings = {"evaluation.every": "2steps", "data.workers": 0}
        return tw.fit(model, data, loss, val=data, quiet=True, precision="fp32", settings=settings, **more)

    fit(until="6steps", name="halves", schedule="constant")
    straight = fit(until="12steps", name="straight", schedule="constant")
    halves = fit(until="12steps", name="halves", schedule="constant", resume="runs/halves")
    for one, two in ((straight.state.model, halves.state.model), (straight.state.loss, halves.state.loss)):  # type: ignore[union-attr]
        assert one is not None and two is not None
        assert all(same_bits(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    assert straight.state.loss.mean.abs().max() > 0  # type: ignore[union-attr]
