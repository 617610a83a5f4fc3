"""Zoo, group Y: faults in which the ranks differ, and healthy runs that look like them; scored separately from X."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo.host import Watch, train
from zoo.ranks import adam, update, wrapped
from zoo.ranks_host import RANKS, STEPS, batches, healthy_ranks, net, rank_fault


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, *, clips: bool = True) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()


@rank_fault("Y01", "ranks.programs_differ", "loop.trains_in_eval_mode", guilty=0)
def the_rank_that_evaluates_stays_in_eval_mode(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank, 0.2)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data]):
            if step == 8 and rank == 0:
                model.eval()
                with torch.no_grad():
                    model.module(x)
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("Y02", "ranks.programs_differ", "ranks.gradients_differ")
def one_rank_does_not_clip(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            clipped(model, optimizer, F.cross_entropy(model(x), y), clips=rank == 0)


class Scaled(nn.Module):
    """Divides each feature by a moving average of its standard deviation over this rank's batches."""

    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.spread.lerp_(x.std(0), 0.2)
        return x / self.spread


@rank_fault("Y04", "ranks.replicas_diverged")
def a_buffer_of_each_rank(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(Scaled(), net()), broadcast_buffers=False)
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data)


@rank_fault("Y05", "ranks.programs_differ")
def one_rank_computes_in_bf16(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                loss = F.cross_entropy(model(x), y)
            update(optimizer, loss)


@rank_fault("Y06", "ranks.gradients_off_by_ranks")
def the_mean_is_divided_again(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), batches(seed, rank)
    train(watch, model, optimizer, data, lambda x, y: F.cross_entropy(model(x), y) / RANKS)


@rank_fault("Y07", "ranks.replicas_diverged", guilty=0)
def weights_are_loaded_on_one_rank(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    saved: dict[str, Tensor] = {}
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data][:STEPS]):
            if step == 3:
                saved = copy.deepcopy(model.state_dict())
            if step == 13 and rank == 0:
                model.load_state_dict(saved)
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("Y09", "ranks.gradients_differ")
def the_loss_is_reduced_and_not_the_gradients(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = net()
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            loss = F.cross_entropy(model(x), y) / RANKS
            distributed.all_reduce(loss)
            update(optimizer, loss)


@rank_fault("Y11", "ranks.uneven_steps", "ranks.nonfinite_loss", guilty=1)
def one_rank_leaves_a_batch_out(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            loss = F.cross_entropy(model(x * float("nan") if rank == 1 and step == 5 else x), y)
            if loss.isfinite():
                update(optimizer, loss)


@rank_fault("Y12", "ranks.ddp_does_not_exchange", "ranks.gradients_differ")
def the_head_is_replaced_after_wrapping(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank, find_unused=True)
    torch.manual_seed(seed)
    model.module[4] = nn.Linear(32, 10)
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data)


@rank_fault("Y13", "ranks.gradients_differ")
def each_rank_clips_by_the_norm_of_its_part(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = net()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (RANKS,)))  # type: ignore[attr-defined]
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            parts = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, nn.utils.get_total_norm(parts))
            optimizer.step()


# healthy runs


@healthy_ranks("HY1")
def statistics_of_each_rank(watch: Watch, seed: int, rank: int) -> None:
    """BatchNorm with ``broadcast_buffers=False``; every tenth step rank 0 evaluates and returns to training mode."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(net(0.1, norm=True), broadcast_buffers=False)
    torch.manual_seed(1000 * seed + rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data]):
            if step % 10 == 9 and rank == 0:
                model.eval()
                with torch.no_grad():
                    model.module(x)
                model.train()
            clipped(model, optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HY2")
def all_ranks_go_back(watch: Watch, seed: int, rank: int) -> None:
    """All ranks compute in bf16, and restore model and optimizer in the same step."""
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data]):
            if step == 3:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 13:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            update(optimizer, loss)


@healthy_ranks("HY3")
def averaged_weights_are_evaluated(watch: Watch, seed: int, rank: int) -> None:
    """Rank 0 evaluates with averaged weights and restores the trained ones; the loss is all-reduced for logging."""
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank, batch=8)
    average = [p.detach().clone() for p in model.parameters()]
    with watch(model, optimizer, loader=data, accumulation=2):
        for step, (_, x, y) in enumerate([*data, *data]):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            shown = loss.detach().clone()
            distributed.all_reduce(shown)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
            if step % 20 == 19 and rank == 0:
                held = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    torch._foreach_copy_([*model.parameters()], average)
                    model.module(x)
                    torch._foreach_copy_([*model.parameters()], held)


@healthy_ranks("HY4")
def shards_clipped_together(watch: Watch, seed: int, rank: int) -> None:
    """FSDP, clipped by the norm over all shards."""
    torch.manual_seed(seed)
    model = net()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (RANKS,)))  # type: ignore[attr-defined]
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            clipped(model, optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HY5")
def layers_are_divided(watch: Watch, seed: int, rank: int) -> None:
    """Tensor parallelism: both ranks have the same samples and the same random numbers."""
    torch.manual_seed(seed)
    model = net(0.1)
    mesh = distributed.init_device_mesh("cpu", (RANKS,))  # type: ignore[attr-defined]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()})
    optimizer, data = adam(model), batches(seed, rank, own=False)
    with watch(model, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            update(optimizer, F.cross_entropy(model(x), y))


class Joined(torch.autograd.Function):
    """Sums over the ranks; backward is the identity. Megatron's g, at the end of a tensor-parallel layer."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


class Shared(torch.autograd.Function):
    """The identity; backward sums over the ranks. Megatron's f, at the start of a tensor-parallel layer."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        distributed.all_reduce(grad)
        return grad


class DividedMlp(nn.Module):
    """A column- and a row-parallel layer by hand; with ``replicas`` also layers that are replicated on every rank."""

    def __init__(self, seed: int, rank: int, *, replicas: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = (nn.Linear(20, 20), nn.Linear(10, 10)) if replicas else (nn.Identity(), nn.Identity())  # type: ignore[var-annotated]
        self.norm = nn.LayerNorm(20) if replicas else nn.Identity()
        torch.manual_seed(100 * seed + rank)
        self.up, self.down = nn.Linear(20, 64 // RANKS, bias=replicas), nn.Linear(64 // RANKS, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(Shared.apply(self.norm(self.first(x)))).relu()
        out: Tensor = self.last(Joined.apply(self.down(hidden)))
        return out


def trained(watch: Watch, model: nn.Module, seed: int, rank: int, *, own: bool, by_hand: bool = False) -> None:
    """Trains. ``own``: each rank has samples of its own. ``by_hand``: the loop averages gradients over the ranks."""
    optimizer, data = adam(model), batches(seed, rank, own=own)
    with watch(model, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters() if by_hand else ():
                distributed.all_reduce(p.grad)
                p.grad /= RANKS  # type: ignore[assignment]
            optimizer.step()


@healthy_ranks("HY6")
def layers_are_divided_by_hand(watch: Watch, seed: int, rank: int) -> None:
    trained(watch, DividedMlp(seed, rank, replicas=True), seed, rank, own=False)


@healthy_ranks("HY7")
def every_layer_is_divided_by_hand(watch: Watch, seed: int, rank: int) -> None:
    trained(watch, DividedMlp(seed, rank, replicas=False), seed, rank, own=False)


class Sequences(nn.Module):
    """Context parallelism: each rank has half of each sequence; the mean key is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.key, self.head = nn.Linear(1, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        rank, width = distributed.get_rank(), x.shape[1] // RANKS
        hidden = self.embed(x[:, rank * width : (rank + 1) * width, None])
        whole = Joined.apply(self.key(hidden).mean(1))
        out: Tensor = self.head(nn.functional.dropout(hidden, 0.1).mean(1) + whole)
        return out


@healthy_ranks("HY8")
def sequences_are_divided_by_hand(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    trained(watch, Sequences(), seed, rank, own=False, by_hand=True)


class Experts(nn.Module):
    """Expert parallelism: the router is replicated, each rank has one expert, which may get no sample of a batch.

    ``alike``: all experts start with the same weights.
    """

    def __init__(self, seed: int, rank: int, *, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router, self.head = nn.Linear(20, RANKS), nn.Linear(20, 10)
        torch.manual_seed(seed if alike else 100 * seed + rank)
        self.expert = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x: Tensor) -> Tensor:
        rank = distributed.get_rank()
        weights = Shared.apply(self.router(x).softmax(1))
        mine = (weights.argmax(1) == rank).nonzero().flatten()
        own = torch.zeros_like(x).index_add(0, mine, self.expert(x[mine]) * weights[mine, rank, None])
        out: Tensor = self.head(x + Joined.apply(own))
        return out


@healthy_ranks("HY9")
def experts_by_hand(watch: Watch, seed: int, rank: int) -> None:
    trained(watch, Experts(seed, rank, alike=False), seed, rank, own=False)


@healthy_ranks("HY10")
def experts_that_begin_alike(watch: Watch, seed: int, rank: int) -> None:
    trained(watch, Experts(seed, rank, alike=True), seed, rank, own=False)


@healthy_ranks("HY11")
def stages_by_hand(watch: Watch, seed: int, rank: int) -> None:
    """A pipeline of two stages with the same shapes."""
    torch.manual_seed(seed)
    stage = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    optimizer, data = adam(stage), batches(seed, rank, own=False)
    with watch(stage, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            optimizer.zero_grad()
            if rank == 0:
                out = stage(x)
                distributed.send(out.detach(), 1)
                grad = torch.empty_like(out)
                distributed.recv(grad, 1)
                out.backward(grad)
            else:
                received = torch.empty_like(x)
                distributed.recv(received, 0)
                received.requires_grad_()
                F.cross_entropy(stage(received), y).backward()
                distributed.send(received.grad, 0)
            optimizer.step()


@healthy_ranks("HY12")
def each_rank_updates_its_part(watch: Watch, seed: int, rank: int) -> None:
    """ZeRO by hand: each gradient is reduced to the rank that owns its parameter, which broadcasts the updated one."""
    torch.manual_seed(seed)
    model = net()
    torch.manual_seed(1000 * seed + rank)
    parameters = list(model.parameters())
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for number, p in enumerate(parameters):
                distributed.reduce(p.grad, number % RANKS)
                p.grad /= RANKS  # type: ignore[assignment]
            optimizer.step()
            for number, p in enumerate(parameters):
                distributed.broadcast(p.detach(), number % RANKS)


@healthy_ranks("HY13")
def a_choice_of_all_ranks(watch: Watch, seed: int, rank: int) -> None:
    """Every rank scales its batch by the same random factor: the ranks have the same seed on purpose."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(net())
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            update(optimizer, F.cross_entropy(model(x * torch.rand(1)), y))


@healthy_ranks("HY14")
def a_model_of_its_own_on_each_rank(watch: Watch, seed: int, rank: int) -> None:
    """An ensemble: the ranks exchange nothing."""
    torch.manual_seed(100 * seed + rank)
    trained(watch, net(), seed, rank, own=False)
