"""The promises of the engine on a GPU. Where a CPU can keep one, its test runs there, too, and so is known to be right.

``scripts/gpu OUT tests`` runs these where there is an NVIDIA GPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.plan_trace.models import make_lstm
from trainwright.assembly.linear_layers import convert_linear_layers
from trainwright.checkpoint.codec import same_bits
from trainwright.distributed import low_precision
from trainwright.distributed.memory import capacity_bytes, free_bytes, held_bytes
from trainwright.engine.graphs import CudaGraphs, StepGraphs
from trainwright.plan.machine import read_machine
from trainwright.plan.trace.traced_step import trace_step
from trainwright.recipe.schema import Fp8
from trainwright.recorder.ring import LEAST_BYTES, enough_bytes

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def net(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3)).to(device)


def batches(device: str, *, poisoned: int | None = None) -> Iterator[tw.StepBatch]:
    """Two micro-batches of 16 each, for ever; the inputs of step ``poisoned`` are NaN."""
    draw = torch.Generator().manual_seed(1)
    step = 0
    while True:
        step += 1
        micro = []
        for _ in range(2):
            x = torch.randn(16, 8, generator=draw)
            if step == poisoned:
                x.fill_(torch.nan)
            micro.append(tw.MicroBatch((x.to(device), x[:, :3].argmax(1).to(device)), np.arange(16)))
        yield tw.StepBatch(tuple(micro), tw.Cursor(0, step))


def state_of(model: nn.Module, precision: str = "fp32") -> tuple[tw.TrainState, tw.Precision]:
    device = next(model.parameters()).device
    how = tw.Precision(precision, device.type)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return tw.TrainState(model, optimizer, scaler=how.scaler(device)), how


def train(state: tw.TrainState, how: tw.Precision, stream: Iterator[tw.StepBatch], steps: int) -> None:
    advance = tw.make_step(nn.CrossEntropyLoss(), precision=how, clip=tw.make_clip("norm", 1.0))
    for _ in tw.steps(state, stream, advance, until=tw.for_steps(state.step + steps)):
        pass


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert all(same_bits(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_as_a_loop_written_by_hand(device: str, precision: str) -> None:
    ours = net(device)
    state, how = state_of(ours, precision)
    train(state, how, batches(device), 8)
    plain = net(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for _, batch in zip(range(8), batches(device)):
        optimizer.zero_grad()
        for micro in batch.micro:
            with how.autocast():
                loss = nn.functional.cross_entropy(plain(micro.data[0]), micro.data[1]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert_same(weights(plain), weights(ours))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_update_that_is_not_finite_does_not_reach_the_weights(device: str, precision: str) -> None:
    if (device, precision) == ("cpu", "fp16"):
        pytest.skip("fp16 on a CPU is tested with the engine")
    model = net(device)
    state, how = state_of(model, precision)
    stream = batches(device, poisoned=4)
    train(state, how, stream, 3)
    before = weights(model)
    train(state, how, stream, 1)
    assert_same(before, weights(model))
    train(state, how, stream, 1)
    assert not torch.equal(before["0.weight"], model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_ends_in_the_same_bits(device: str, tmp_path: Path) -> None:
    straight, how = state_of(net(device, dropout=0.3))
    stream = batches(device)
    torch.manual_seed(5)
    train(straight, how, stream, 4)
    tw.save_checkpoint(straight, tmp_path)
    train(straight, how, stream, 4)
    resumed, _ = state_of(net(device, dropout=0.3))
    tw.load_checkpoint(resumed, tmp_path / "step-00000004")
    stream = batches(device)
    for _ in range(4):
        next(stream)
    train(resumed, how, stream, 4)
    assert_same(weights(straight.model), weights(resumed.model))


@pytest.mark.parametrize("device", DEVICES)
def test_a_watched_loop_trains_to_the_same_bits(device: str) -> None:
    def trained(*, watched: bool) -> dict[str, Tensor]:
        model = net(device, dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        torch.manual_seed(7)

        def loop() -> None:
            for _, batch in zip(range(12), batches(device)):
                x, y = batch.micro[0].data
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

        if watched:
            with tw.watch(model, optimizer, out=None, quiet=True):
                loop()
        else:
            loop()
        return weights(model)

    assert_same(trained(watched=False), trained(watched=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_wait_for_the_device(precision: str) -> None:
    state, how = state_of(net("cuda"), precision)
    few = [batch for _, batch in zip(range(12), batches("cuda"))]
    train(state, how, iter(few[:4]), 4)
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        train(state, how, iter(few[4:]), 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.step == 12


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_have_the_bits_of_eager_steps(precision: str) -> None:
    """With a learning rate that float32 holds exactly: on the device it is a float32 tensor."""

    def trained(graphs: StepGraphs | None) -> dict[str, Tensor]:
        model = net("cuda", dropout=0.3)
        how = tw.Precision(precision, "cuda")  # type: ignore[arg-type]
        state = tw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True))
        advance = tw.make_step(nn.CrossEntropyLoss(), precision=how, clip=tw.make_clip("norm", 1.0), graphs=graphs)
        torch.manual_seed(3)
        for _ in tw.steps(state, batches("cuda", poisoned=9), advance, until=tw.for_steps(80)):
            pass
        state.ledger.read_pending()
        assert state.ledger.total == 1
        return weights(model)

    said: list[str] = []
    graphs = StepGraphs(CudaGraphs(torch.device("cuda")), report=said.append)
    assert_same(trained(None), trained(graphs))
    assert said == [] and graphs.num_replays > 70 and graphs.num_captures == 1


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_reads_a_value_falls_back_to_eager_steps() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net("cuda")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out * float(out.detach().mean().item() < 1e9)

    said: list[str] = []
    state, how = state_of(Reads())
    graphs = StepGraphs(CudaGraphs(torch.device("cuda")), report=said.append)
    advance = tw.make_step(nn.CrossEntropyLoss(), precision=how, graphs=graphs)
    results = list(tw.steps(state, batches("cuda"), advance, until=tw.for_steps(10)))
    assert len(said) == 1 and "the capture raised" in said[0]
    assert graphs.num_replays == 0 and all(bool(each.loss.isfinite()) for each in results)


@pytest.mark.gpu
@needs_gpu
def test_fit_replays_captured_steps_under_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(256, 8)
    data = (x, x[:, :3].argmax(1))
    settings = {"graphs": True, "data.drop_last": True}
    result = tw.fit(net("cpu"), data, nn.CrossEntropyLoss(), until="200steps", lr=2**-7, settings=settings, quiet=True)
    assert [each.code for each in result.findings if each.code == "resources.graphs_not_used"] == []


@pytest.mark.gpu
@needs_gpu
def test_a_batch_that_does_not_fit_is_trained_in_smaller_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * 2**20) / total)
    try:
        x = torch.randn(256, 1024)
        model = nn.Sequential(nn.Linear(1024, 2048), *(nn.GELU() for _ in range(120)), nn.Linear(2048, 2))
        with pytest.raises(torch.OutOfMemoryError):
            copy.deepcopy(model).cuda()(x.cuda()).sum().backward()
        torch.cuda.empty_cache()
        result = tw.fit(model, (x, (x.sum(1) > 0).long()), nn.CrossEntropyLoss(), until="3steps", batch=256, quiet=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.ending == "finished" and result.state is not None


@pytest.mark.gpu
@needs_gpu
def test_fit_trains_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(256, 8)
    result = tw.fit(net("cpu"), (x, x[:, :3].argmax(1)), nn.CrossEntropyLoss(), until="30ep", lr=1e-2, quiet=True)
    assert result.state is not None and result.loss is not None
    assert next(result.state.model.parameters()).device.type == "cuda" and result.loss < 0.5


@needs_gpu
@pytest.mark.gpu
def test_what_the_recorder_may_hold_is_measured_on_the_device_of_the_model() -> None:
    device = torch.device("cuda")
    before = free_bytes(device)
    block = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert before - free_bytes(device) == pytest.approx(block.nbytes, rel=0.1)
    assert capacity_bytes(device) == pytest.approx(held_bytes(device) + free_bytes(device), rel=0.01)
    model = nn.Linear(2**14, 2**11, bias=False, device=device)  # 128 MiB
    assert enough_bytes([model]) == min(max(LEAST_BYTES, 9 * model.weight.nbytes), free_bytes(device) // 4)


@needs_gpu
@pytest.mark.gpu
def test_an_lstm_is_planned_where_there_is_a_gpu() -> None:
    """torch's shape function of cuDNN's RNNs lacks what their backward pass needs."""
    assert "lstm" in {unseen.op for unseen in trace_step(make_lstm, device="cuda").unseen}
    trace_step(make_lstm, device="cuda", precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit"])
def test_quantized_moments_train_and_a_bad_step_leaves_them(device: str, name: str) -> None:
    """On CUDA the update is compiled and the flag is read there."""
    if find_spec("torchao") is None:
        pytest.skip("needs torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3)).to(device)
    optimizer = tw.make_optimizer(name, model, lr=1e-3)
    state = tw.TrainState(model, optimizer)
    train(state, tw.Precision("fp32", device), batches(device), 10)
    assert sum("exp_avg_codes" in own for own in optimizer.state.values()) == 2
    before = [value.clone() for own in optimizer.state.values() for value in own.values()]
    train(state, tw.Precision("fp32", device), batches(device, poisoned=1), 1)
    after = [value for own in optimizer.state.values() for value in own.values()]
    assert state.ledger.total == 1
    assert all(same_bits(one, other) for one, other in zip(before, after, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
@pytest.mark.parametrize("scales", ["rowwise", "tensorwise"])
def test_hardware_computes_what_emulation_does(
    precision: Literal["fp8", "mxfp8"], scales: Literal["rowwise", "tensorwise"]
) -> None:
    if precision not in low_precision(torch.device("cuda"), read_machine()):
        pytest.skip(f"the device has no {precision}")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to("cuda")
    x = torch.randn(64, 256, device="cuda")
    outputs = []
    for emulate in (False, True):
        model = copy.deepcopy(layers)
        convert_linear_layers(model, precision, Fp8(scales=scales, emulate=emulate))
        with torch.autocast("cuda", torch.bfloat16):
            outputs.append(model(x).float())
        outputs[-1].square().mean().backward()
        outputs.append(next(model[1].parameters()).grad)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=0.05, atol=0.05)
    assert torch.nn.functional.cosine_similarity(outputs[1].flatten(), outputs[3].flatten(), dim=0) > 0.99
