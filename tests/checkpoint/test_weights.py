"""Weights under plain names: wrapped models on both sides, tied weights, averages, damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from trainwright.checkpoint.average import Ema
from trainwright.checkpoint.checkpoint import save_checkpoint
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import fill_zeros, load_plain_state_dict, plain_state_dict, read_weights, unwrapped
from trainwright.errors import CheckpointError

# torch's own compiler warns about torch's own jit when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Net(nn.Module):
    """Tied in and out, with running statistics and state that is no tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.module = nn.Linear(4, 4)  # called like DataParallel's own; it must keep its name
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.epochs = seed

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.head(self.norm(self.module(self.embed(ids_B))))  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def inner_compiled(model: Net) -> nn.Module:
    model.module = torch.compile(model.module)  # type: ignore[assignment]
    return model


def inner_recomputed(model: Net) -> nn.Module:
    model.module = checkpoint_wrapper(model.module)  # type: ignore[assignment]
    return model


def both_inside(model: Net) -> nn.Module:
    model.module = checkpoint_wrapper(torch.compile(model.module))  # type: ignore[assignment]
    return model


def compiled(model: nn.Module) -> nn.Module:
    wrapped = torch.compile(model)
    assert isinstance(wrapped, nn.Module) and wrapped is not model
    return wrapped


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "none": lambda model: model,
    "compile": compiled,
    "compiled submodule": inner_compiled,
    "compile around compile": lambda model: compiled(inner_compiled(model)),
    "data parallel": nn.DataParallel,
    "distributed": DistributedDataParallel,
    "compile around distributed": lambda model: compiled(DistributedDataParallel(model)),
    "distributed around compile": lambda model: DistributedDataParallel(compiled(model)),
    "checkpoint_wrapper": inner_recomputed,
    "checkpoint_wrapper around all": checkpoint_wrapper,
    "checkpoint_wrapper around compile": both_inside,
}
SLOWLY = {"compile": pytest.mark.slow}
each_wrap = pytest.mark.parametrize(
    "wrap", [pytest.param(wrap, id=name, marks=SLOWLY.get(name, ())) for name, wrap in WRAPS.items()]
)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(v, b[k]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items())


def test_plain_name_drops_whole_segments_only() -> None:
    assert plain_name("_orig_mod.a._checkpoint_wrapped_module.b._fsdp_wrapped_module.weight") == "a.b.weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"
    assert plain_name("module.weight") == "module.weight"


@pytest.mark.slow
@each_wrap
def test_a_wrapped_model_has_the_names_of_its_author(wrap: Callable[[Any], nn.Module]) -> None:
    plain = Net().state_dict()
    wrapped = wrap(Net())
    found = plain_state_dict(wrapped)
    assert same(found, dict(plain))
    assert found["embed.weight"].data_ptr() == next(wrapped.parameters()).data_ptr(), "the live memory, no copy"


@pytest.mark.slow
@each_wrap
def test_weights_go_into_a_model_that_is_wrapped_otherwise(wrap: Callable[[Any], nn.Module]) -> None:
    saved = plain_state_dict(Net(seed=7))
    wrapped = wrap(Net())
    load_plain_state_dict(wrapped, saved)
    assert same(plain_state_dict(wrapped), saved)
    assert saved["_extra_state"] == {"epochs": 7}


@pytest.mark.parametrize("wrap", [WRAPS["none"], WRAPS["checkpoint_wrapper around compile"]], ids=["none", "wrapped"])
def test_what_does_not_fit_is_named_as_torch_does(wrap: Callable[[Any], nn.Module]) -> None:
    saved = plain_state_dict(Net())
    wrapped = wrap(Net())
    del saved["module.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*bias"'):
        load_plain_state_dict(wrapped, saved)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*tail.weight"'):
        load_plain_state_dict(wrapped, {**plain_state_dict(Net()), "tail.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="size mismatch for"):
        load_plain_state_dict(wrapped, {**plain_state_dict(Net()), "module.bias": torch.zeros(3)})


def test_unwrapped_stops_at_the_model() -> None:
    model = Net()
    assert unwrapped(model) is model
    assert unwrapped(nn.DataParallel(compiled(model))) is model


def saved_state(model: nn.Module, folder: Path, *, ema: bool = False) -> tuple[Path, TrainState]:
    """A checkpoint after two steps of SGD, in which the average lags behind the weights."""
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if ema:
        state.ema = Ema(model, 0.9)
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                with torch.no_grad():
                    parameter.add_(1.0)
        state.ema.update()  # type: ignore[call-arg]
    return save_checkpoint(state, folder)[0], state


@each_wrap
def test_a_checkpoint_is_read_back_whole(wrap: Callable[[Any], nn.Module], tmp_path: Path) -> None:
    model = wrap(Net(seed=3))
    path, _ = saved_state(model, tmp_path)
    weights = read_weights(path)
    assert same(weights, plain_state_dict(model))
    assert {"norm.running_mean", "norm.num_batches_tracked", "_extra_state"} <= weights.keys()
    assert weights["head.weight"] is weights["embed.weight"], "tied weights are one tensor"
    fresh = Net()
    fresh.load_state_dict(weights)
    assert fresh.epochs == 3


@each_wrap
def test_the_average_replaces_what_was_trained_and_nothing_else(
    wrap: Callable[[Any], nn.Module], tmp_path: Path
) -> None:
    inside = Net()
    inside.norm.bias.requires_grad_(False)
    model = wrap(inside)
    path, state = saved_state(model, tmp_path, ema=True)
    live, average = read_weights(path), read_weights(path, average=True)
    assert same(live, plain_state_dict(model))
    changed = {name for name in live if isinstance(live[name], Tensor) and not torch.equal(live[name], average[name])}
    trained = {"embed.weight", "head.weight", "module.weight", "module.bias", "norm.weight"}
    assert changed == trained, "the tied head too, though the average is kept under the embedding's name"
    with state.ema.swapped():
        assert same(average, plain_state_dict(model))
    assert average["head.weight"] is average["embed.weight"]


def test_damage_and_a_missing_average_are_errors(tmp_path: Path) -> None:
    path, _ = saved_state(Net(), tmp_path)
    with pytest.raises(CheckpointError, match="no average of the weights") as caught:
        read_weights(path, average=True)
    assert "model.ema" in caught.value.remedy
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_weights(path)


def test_parameters_of_zeros_are_filled_the_same_each_time() -> None:
    made = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))  # only the bias of a norm begins at 0
        before, state = [each.clone() for each in model.parameters()], torch.get_rng_state()
        assert fill_zeros(model.named_parameters()) == ["1.bias"]
        assert all(torch.equal(old, new) for old, new in zip(before[:3], [*model.parameters()][:3]))
        assert torch.equal(torch.get_rng_state(), state)
        made.append(model[1].bias)
    assert torch.equal(*made) and 0 < made[0].abs().max() < 0.2
