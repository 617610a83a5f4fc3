"""Ranks that divide a model, as far as one process can show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

import trainwright as tw
from tests.exchanged import Collectives
from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.shards import divides_layers, holds_parts, local
from trainwright.commands.demo import demo
from trainwright.data.unwrap import Unwrapped
from trainwright.distributed import SOLO, RankMesh, Ranks, make_mesh
from trainwright.engine.evaluate import evaluate
from trainwright.engine.loss import Loss, LossFn
from trainwright.engine.losses import language_model
from trainwright.engine.rank_layout import RankLayout
from trainwright.engine.rank_sums import sum_grads
from trainwright.engine.stage_passes import StagedPasses
from trainwright.errors import OutOfMemoryError, RecipeError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.moe import moe_gpt
from trainwright.plan.parallel import AXES, Degrees
from trainwright.recipe import from_mapping
from trainwright.training.layout import LaidOut, evaluation_loss, lay_out

IDS = torch.arange(32).view(4, 8) % 11
SMALL: dict[str, Any] = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": 16, "tied": False}


def mesh_of(degrees: Degrees) -> RankMesh:
    """The first of so many ranks; nobody answers it."""
    torch.distributed.init_process_group("fake", rank=0, world_size=degrees.ranks, store=FakeStore())
    return RankMesh(degrees, SOLO, SOLO, SOLO, devices=init_device_mesh("cpu", degrees.shape, mesh_dim_names=AXES))


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def laid_out_on_first(model: nn.Module, mesh: RankMesh, loss: LossFn = language_model, **settings: object) -> LaidOut:
    """Return the part of the first rank."""
    parallel = {name: getattr(mesh.degrees, name) for name in AXES} | settings
    ask = {"use": "gpt", "compile": "async_tensor" in settings}
    loaded = from_mapping({"model": ask, "data": {"train": "digits"}, "parallel": parallel})
    parts = Parts(model, Unwrapped(TensorDataset(IDS, IDS)), {}, loss)
    return lay_out(parts, loaded, mesh, torch.device("cpu"))


def loss_of_first(model: nn.Module, degrees: Degrees, loss: LossFn = language_model) -> Callable[..., Loss | Tensor]:
    """Return the loss of the first rank with its part of the model."""
    return laid_out_on_first(model, mesh_of(degrees), loss).parts.loss


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, target = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def test_a_mean_over_a_part_of_a_sequence_is_refused() -> None:
    """How many of its positions count is not known, so the parts cannot be weighed."""
    model = gpt(**SMALL)
    loss = loss_of_first(model, Degrees(context=2), mean)
    with pytest.raises(UsageError, match=r"parallel\.context: the loss returns a mean"):
        loss(model, (IDS, IDS))


@pytest.mark.parametrize(
    ("name", "part", "degrees", "error"),
    [
        ("scale", nn.Parameter(torch.tensor(1.0)), Degrees(pipeline=2, shard=2), "scale is 0-dimensional"),
        ("norm", nn.BatchNorm1d(4), Degrees(pipeline=2), "norm is a BatchNorm1d"),
    ],
)
def test_what_stages_would_get_wrong_is_refused(name: str, part: object, degrees: Degrees, error: str) -> None:
    model = gpt(**SMALL)
    setattr(model, name, part)
    with pytest.raises(UsageError, match=error):
        loss_of_first(model, degrees)


@pytest.mark.parametrize(
    ("degrees", "ranks", "parts"),
    [
        (Degrees(pipeline=2), [0, 1], 1),
        (Degrees(pipeline=4), [0, 3], 1),
        (Degrees(pipeline=4, replicate=128), [0, 384], 1),
        (Degrees(pipeline=4, shard=256, tensor=4), [0, 3072], 1024),
    ],
    ids=str,
)
def test_the_first_and_the_last_stage_alone_exchange_gradients_of_a_tied_weight(
    degrees: Degrees, ranks: list[int], parts: int
) -> None:
    model = gpt(**{**SMALL, "layers": 4, "heads": 4, "vocab_size": 4096, "tied": True})
    stages = laid_out_on_first(model, mesh_of(degrees)).stages
    assert stages is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Collectives() as exchanged:
        StagedPasses(stages, SOLO, 4).sum_tied(model)
    assert exchanged.noted == [("allreduce", ranks, torch.float32, 4096 * 16 * 4 // parts)]


EXPERTS = {"experts": 8, "active": 2, "expert_width": 8, "shared": 0}


@pytest.mark.parametrize(
    ("degrees", "ranks", "copies"),
    [
        (Degrees(expert=2), [0, 1], [0]),
        (Degrees(expert=8), [*range(8)], [0]),
        (Degrees(expert=8, replicate=512), [*range(8)], [*range(0, 4096, 8)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_exchange_tokens_and_sum_the_gradients_of_experts_over_their_copies(
    degrees: Degrees, ranks: list[int], copies: list[int], dtype: torch.dtype
) -> None:
    """There are no other ranks, so the tokens and the outputs that they send have any number of bytes."""
    torch.distributed.init_process_group("fake", rank=0, world_size=degrees.ranks, store=FakeStore())
    mesh = make_mesh(degrees, Ranks(), torch.device("cpu"))
    model = moe_gpt(**{**SMALL, **EXPERTS, "layers": 1})
    experts = sum(each.nbytes for name, each in model.named_parameters() if name.endswith(("mlp.up", "mlp.down")))
    rest = sum(each.nbytes for each in model.parameters()) - experts
    laid_out_on_first(model, mesh)
    assert holds_parts(model) and not divides_layers(model)  # each rank has samples of its own
    with Collectives() as passes:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(IDS)
        out.sum().backward()
    sent = ("all_to_all_single", ranks, dtype, IDS.numel() * 2 * 16 * dtype.itemsize)
    assert passes.noted[:2] == [("alltoall_base", ranks, torch.int64, 8 * 8), sent]
    assert passes.noted[3] == sent and [each[:3] for each in passes.noted[1:]] == [sent[:3]] * 4
    with Collectives() as sums:
        sum_grads([p.grad for p in model.parameters() if p.grad is not None], mesh.sums, mesh.copies)
    of_experts = [("allreduce", copies, torch.float32, experts // degrees.expert)] if len(copies) > 1 else []
    assert sums.noted == [("allreduce", [*range(degrees.ranks)], torch.float32, rest), *of_experts]


@pytest.mark.parametrize(
    ("degrees", "dense", "shards", "copies"),
    [
        (Degrees(shard=2, expert=2), [*range(4)], [0, 2], [0]),
        (Degrees(replicate=8, shard=64, expert=8), [*range(512)], [*range(0, 512, 8)], [*range(0, 4096, 512)]),
    ],
    ids=["4", "4096"],
)
def test_shards_of_experts_and_of_the_rest_are_on_other_ranks(
    degrees: Degrees, dense: list[int], shards: list[int], copies: list[int]
) -> None:
    """Every gradient is summed over all ranks once, experts by the exchange of tokens among those that divide them."""
    torch.distributed.init_process_group("fake", rank=0, world_size=degrees.ranks, store=FakeStore())
    mesh = make_mesh(degrees, Ranks(), torch.device("cpu"))
    model = moe_gpt(**{**SMALL, **EXPERTS, "layers": 1, "d_model": 64})
    numbers = {name: each.numel() for name, each in model.named_parameters()}
    laid_out_on_first(model, mesh)
    assert holds_parts(model) and not divides_layers(model)  # each rank has samples of its own
    parts = {name: local(each).numel() for name, each in model.named_parameters() if name.endswith(("up", "down"))}
    assert parts == {name: numbers[name] // (degrees.shard * degrees.expert) for name in parts} != {}
    with Collectives() as passes:
        model(IDS).sum().backward()
    found = [(name, ranks) for name, ranks, *_ in passes.noted if not name.startswith("all_to_all")]
    found.remove(("alltoall_base", [*range(degrees.expert)]))  # numbers of tokens
    forward = [("allgather_base", ranks) for ranks in (dense, dense, shards)]  # model, block, its experts
    again = [("allgather_base", ranks) for ranks in (shards, dense)]
    added = [("allreduce", copies)] if len(copies) > 1 else []
    sums = [each for ranks in (shards, dense, dense) for each in (("reduce_scatter_base", ranks), *added)]
    assert found == [*forward, *again, *sums]


def test_shards_of_experts_need_a_torch_with_several_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_fsdp_common, "ShardPlacementResult")  # as in torch 2.11
    with pytest.raises(RecipeError, match=r"parallel\.shard together need torch 2\.13"):
        laid_out_on_first(moe_gpt(**{**SMALL, **EXPERTS}), mesh_of(Degrees(shard=2, expert=2)))


class GraphIsKnown(Exception):
    """Ends the compilation: the operators would need a GPU."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that torch imports
@pytest.mark.parametrize("overlaps", [False, True], ids=["default", "async"])
def test_the_compiler_overlaps_collectives_of_divided_layers_on_request(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is that of torch's compiler. CUDA and NCCL are only said to exist, and the ranks are not there."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    mesh = mesh_of(Degrees(tensor=2))
    model = gpt(**{**SMALL, "vocab_size": 12, "layers": 1, "bias": False})  # products with a bias are not overlapped
    settings = {"sequence": True, **({"async_tensor": True} if overlaps else {})}
    found: list[str] = []

    def note(graph: Graph) -> None:
        found.extend(str(each.target) for each in graph.nodes)
        raise GraphIsKnown

    with config.patch(_micro_pipeline_tp=False, post_grad_custom_post_pass=note, fx_graph_cache=False):
        with monkeypatch.context() as there:
            there.setattr(torch.cuda, "is_available", lambda: True)
            laid_out_on_first(model, mesh, **settings)
        model.compile()
        with pytest.raises(Exception, match="GraphIsKnown"):
            model(IDS)
    fused = [found.count(f"symm_mem.fused_{kind}.default") for kind in ("all_gather_matmul", "matmul_reduce_scatter")]
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor")
    alone = [found.count(f"_c10d_functional.{kind}.default") for kind in kinds]
    assert (fused, alone) == (([3, 2], [1, 0]) if overlaps else ([0, 0], [4, 2]))


class Learned(nn.Module):
    """A loss with a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy((logits / self.temperature).flatten(0, 1), target.flatten())


def test_a_loss_with_weights_is_refused_where_one_stage_computes_it() -> None:
    with pytest.raises(UsageError, match="the loss is a Learned with weights"):
        loss_of_first(gpt(**SMALL), Degrees(pipeline=2), Learned())  # type: ignore[arg-type]


def test_ranks_that_divide_sequences_do_not_evaluate_less_alone() -> None:
    tried: list[int] = []

    def too_large(model: nn.Module, batch: Tensor) -> Loss:
        tried.append(len(batch))
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes")

    loss = evaluation_loss(too_large, RankMesh(Degrees(context=2), SOLO, SOLO, SOLO), None)
    with pytest.raises(OutOfMemoryError, match="cannot retry alone") as raised:
        evaluate(nn.Linear(2, 2), loss, [MicroBatch(torch.zeros(4, 2), np.arange(4))])
    assert tried == [4] and not raised.value.whole


def test_ranks_that_divide_layers_draw_the_same_whatever_one_of_them_has_drawn() -> None:
    """An observer or a sink, which the first rank alone has, may draw."""

    def loss_after(drawn: int, ranks: RankLayout) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
        advance = tw.make_step(lambda model, x: tw.Loss(model(x).square().sum(), float(len(x))), ranks=ranks)
        state = tw.TrainState(model, torch.optim.SGD(model.parameters(), 0.1))
        torch.manual_seed(drawn)
        return float(advance(state, StepBatch((MicroBatch(torch.ones(8, 4), np.arange(8)),))).loss)

    divided = RankLayout(divided=True)
    assert loss_after(1, divided) == loss_after(2, divided)
    assert loss_after(1, RankLayout()) != loss_after(2, RankLayout())


def test_the_demo_trains_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is that of the clock of the first rank."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="the demo trains in one process"):
        demo("text", budget="1s", settings=[])
