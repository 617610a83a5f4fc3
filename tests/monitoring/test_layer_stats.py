"""Statistics by layer: what they say agrees with a plain computation; the training stays the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainwright as tw
from trainwright.monitoring.layer_stats import (
    INITIAL_INTERVAL_STEPS,
    LOWEST_EXPONENT,
    MAX_SAMPLED_ELEMENTS,
    NUM_BINS,
    LayerLog,
    LayerStats,
    layers_of,
    scalars_of,
)
from trainwright.report.pages.view import RunView
from trainwright.runs.reader import read
from trainwright.runs.records import Layers, Step, to_json


class Blocks(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, count: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def one_step(model: nn.Module, stats: LayerStats, x: Tensor, lr: float = 0.1) -> tuple[Mapping[str, Any], Any, Any]:
    """The record of one step of SGD; weights before it, and gradients."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stats.begin()
    model(x).square().mean().backward()
    stats.before_update()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr).step()
    stats.after_update()
    fields = stats.read()
    assert fields is not None
    assert stats.read() is None, "once"
    return fields, before, grads


def test_a_layer_is_a_block_or_a_module_with_parameters() -> None:
    assert [layer.path for layer in layers_of(Blocks())] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert [len(layer.parameters) for layer in layers_of(Blocks())] == [1, 2, 2, 2]
    frozen = Blocks()
    frozen.embedding.requires_grad_(False)
    assert [layer.path for layer in layers_of(frozen)] == ["blocks.0", "blocks.1", "head"]
    assert len(layers_of(Blocks(500))) == 200


def test_the_numbers_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randint(5, (MAX_SAMPLED_ELEMENTS // 8,))
    stats = LayerStats(model)
    outputs: dict[str, Tensor] = {}
    model.head.register_forward_hook(lambda module, given, output: outputs.update(head=output.detach().clone()))
    model.blocks[1].register_forward_hook(lambda module, given, output: outputs.update(block=output.detach().clone()))
    fields, before, grads = one_step(model, stats, x)
    paths = [layer.path for layer in stats.layers]
    for index, path in enumerate(paths):
        own = [name for name in before if name.startswith(f"{path}.")]
        norm = math.sqrt(sum(float(grads[name].square().sum()) for name in own))
        weights = math.sqrt(sum(float(before[name].square().sum()) for name in own))
        assert fields["grad_norm"][index] == pytest.approx(norm, rel=1e-3)  # 4 digits are written
        assert fields["update_ratio"][index] == pytest.approx(0.1 * norm / weights, rel=1e-3)
    seen, at = outputs["block"], paths.index("blocks.1")
    assert seen.numel() == MAX_SAMPLED_ELEMENTS
    assert fields["act_mean"][at] == pytest.approx(float(seen.mean()), rel=1e-3)
    assert fields["act_std"][at] == pytest.approx(float(seen.std()), rel=1e-3)
    assert fields["act_max"][at] == pytest.approx(float(seen.abs().max()), rel=1e-3)
    first, *shares = fields["act_log2"][at]
    powers = (
        np.floor(np.log2(seen.abs().clamp(min=2.0**LOWEST_EXPONENT).numpy())).astype(int).reshape(-1) - LOWEST_EXPONENT
    )
    expected = (
        np.bincount(np.where(seen.numpy().reshape(-1) == 0, 0, powers), minlength=NUM_BINS) * 100 / MAX_SAMPLED_ELEMENTS
    )
    assert first == np.flatnonzero(np.round(expected))[0]
    assert shares == np.round(expected).astype(int)[first : first + len(shares)].tolist()


def test_large_tensors_are_told_by_some_of_their_elements() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300))
    fields, before, grads = one_step(model, LayerStats(model), torch.randn(64, 300))
    exact = 0.1 * math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    exact /= math.sqrt(sum(float(w.square().sum()) for w in before.values()))
    assert fields["update_ratio"][0] == pytest.approx(
        exact, rel=5 / math.sqrt(2 * MAX_SAMPLED_ELEMENTS)
    )  # five standard errors


def test_what_has_no_gradient_or_is_not_finite() -> None:
    model = Blocks(1)
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    fields, *_ = one_step(model, LayerStats(model), torch.randint(5, (4,)))
    assert all(math.isnan(each) for each in fields["grad_norm"])
    assert math.isnan(fields["act_std"][2])
    sparse = nn.Sequential(nn.Embedding(5, 8, sparse=True))
    fields, _, grads = one_step(sparse, LayerStats(sparse), torch.tensor([1, 1, 3]))
    assert fields["grad_norm"][0] == pytest.approx(float(grads["0.weight"].to_dense().norm()), rel=1e-3)
    unused = Blocks(1)
    stats = LayerStats(unused, activations=False)
    stats.begin()
    unused.head(torch.ones(2, 8)).sum().backward()
    stats.before_update()
    stats.after_update()
    idle: dict[str, Any] = dict(stats.read() or {})
    assert idle["grad_norm"][:2] == (0.0, 0.0)
    assert idle["update_ratio"] == (0.0, 0.0, 0.0)
    assert idle["act_log2"] == ((), (), ())
    assert not unused.head._forward_hooks


def test_each_of_several_optimizers_is_measured_before_its_own_update() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randint(5, (16,))
    stats = LayerStats(model)
    expected = one_step(model, stats, x, lr=0.1)[0]
    torch.manual_seed(0)
    model, x = Blocks(), torch.randint(5, (16,))
    stats = LayerStats(model)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], 0.1)
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], 0.1)
    stats.begin()
    model(x).square().mean().backward()
    for optimizer in (matrices, rest):
        stats.before_update(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    stats.before_update(matrices)  # a second update in the same step
    stats.after_update()
    assert stats.read() == expected
    stats.begin()
    model(x).square().mean().backward()
    stats.before_update(rest)
    rest.step()
    stats.after_update()
    alone: dict[str, Any] = dict(stats.read() or {})
    assert alone["grad_norm"][0] == alone["update_ratio"][0] == 0.0 < alone["update_ratio"][1]


class Heard(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_an_evaluation_between_two_steps_is_not_seen() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randint(5, (16,))
    stats = LayerStats(model)
    expected = one_step(model, stats, x, lr=0.0)[0]
    stats.begin()
    with torch.no_grad():
        model(torch.zeros(4, dtype=torch.int64))
    model(x).square().mean().backward()
    stats.before_update()
    stats.after_update()
    assert (stats.read() or {})["act_std"] == expected["act_std"]


def test_nothing_is_asked_of_the_device() -> None:
    """No operator that reads a value, has a size that values decide, or copies something of the host there."""
    model, x = Blocks(), torch.randint(5, (16,))
    stats = LayerStats(model)
    one_step(model, stats, x)
    with Heard() as heard:
        stats.begin()
        model(x)
        stats.before_update()
        stats.after_update()
    assert {"scatter_add_", "_foreach_norm", "stack"} <= heard.names
    waits = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "lift_fresh", "item", "equal"}
    assert not heard.names & waits


def fit(folder: Path, **settings: object) -> Any:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randint(5, (64, 4)), torch.randn(64, 4, 3))
    settings = {"folder": str(folder), "precision": "fp32", "log.doctor": False, **settings}
    return tw.fit(Blocks(), data, nn.MSELoss(), steps=60, batch=8, quiet=True, settings=settings)


@pytest.mark.slow
def test_a_run_has_them_and_trains_the_same_bits(tmp_path: Path) -> None:
    done, plain = fit(tmp_path / "a"), fit(tmp_path / "b", **{"log.layers": False})
    log, without = (read(Path(each.run) / "log.jsonl").records for each in (done, plain))
    layers = [each for each in log if isinstance(each, Layers)]
    assert layers[0].step == 2
    assert layers[0].layers == ("embedding", "blocks.0", "blocks.1", "head")
    assert all(each.layers == () for each in layers[1:])
    assert all(len(each.grad_norm) == len(each.act_log2) == 4 for each in layers)
    assert not any(isinstance(each, Layers) for each in without)
    losses = [[each.loss for each in records if isinstance(each, Step)] for records in (log, without)]
    assert losses[0] == losses[1]
    for (name, one), other in zip(done.state.model.state_dict().items(), plain.state.model.state_dict().values()):
        assert torch.equal(one, other), name
    assert not any(module._forward_hooks for module in done.state.model.modules())
    assert RunView.read(done.run).log.layers.count == len(layers)


def measured_steps(until: int) -> list[int]:
    """The steps that are measured where measuring costs nothing."""
    step, found = 1, []
    apart = 1
    while step < until:
        step += apart
        found.append(step)
        apart = LayerLog.apart(step)
    return found


def test_a_long_log_stays_small() -> None:
    """A million steps of 60 layers, at the stated rule, with a Step record every 10 steps: below 300 MB."""
    values, histogram = (0.0001234,) * 60, ((0, *(10,) * NUM_BINS),) * 60
    record = Layers(time_s=1e9 + 0.1234567, step=10**6, grad_norm=values, update_ratio=values, act_mean=values)
    largest = json.loads(to_json(record)) | {"act_std": values, "act_max": values, "act_log2": histogram}
    count = len(measured_steps(10**6))
    assert 4000 < count < 6000
    steps_bytes = 10**5 * 700
    assert count * len(json.dumps(largest)) + steps_bytes < 150e6
    assert measured_steps(100)[:3] == [2, 2 + INITIAL_INTERVAL_STEPS, 2 + 2 * INITIAL_INTERVAL_STEPS]


def test_what_sinks_get() -> None:
    record = Layers(time_s=0.0, step=3, grad_norm=(1.0, 2.0), update_ratio=(0.1, math.nan), act_std=(0.5, 0.6))
    assert scalars_of(record, ["a", "b"]) == {
        "layers/grad_norm/a": 1.0,
        "layers/grad_norm/b": 2.0,
        "layers/update_ratio/a": 0.1,
        "layers/act_std/a": 0.5,
        "layers/act_std/b": 0.6,
    }
