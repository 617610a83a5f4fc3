"""Zoo, group X and R09: faults of distributed training, and healthy runs; each a plain loop on two ranks over gloo."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.host import Rows, Watch, table, train
from zoo.ranks_host import RANKS, STEPS, batches, healthy_ranks, net, rank_fault


def wrapped(
    seed: int, rank: int, dropout: float = 0.0, *, find_unused: bool = False, **more: bool
) -> DistributedDataParallel:
    """A model wrapped in DDP, the same on all ranks. Afterwards each rank has a different random seed."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(net(dropout, **more), find_unused_parameters=find_unused)
    torch.manual_seed(1000 * seed + rank)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@rank_fault("X01", "ranks.ddp_does_not_exchange")
def inner_module_is_called(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data][:STEPS]):
            call = model if step == 0 else model.module
            update(optimizer, F.cross_entropy(call(x), y))


@rank_fault("X02", "ranks.ddp_does_not_exchange")
def parameters_are_replaced(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    model.double().float()  # replaces the storage of each parameter, as .cpu().cuda() does: DDP's hooks are lost
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data)


@rank_fault("X04", "data.same_order_every_epoch")
def no_set_epoch(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data, epochs=3)


@rank_fault("X05", "ranks.identical_batches")
def no_sampler(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank, own=False)
    train(watch, model, optimizer, data)


@rank_fault("X06", "ranks.nonfinite_loss", "data.nonfinite_input", guilty=1)
def nan_on_one_rank(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data][:STEPS]):
            if rank == 1 and step == 10:
                x = x * float("nan")
            update(optimizer, F.cross_entropy(model(x), y))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.extra = nn.Linear(20, 32), nn.Linear(32, 10), nn.Linear(32, 10)

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        hidden = self.trunk(x).relu()
        return self.head(hidden) + self.extra(hidden) if both else self.head(hidden)


@rank_fault("X09", "ranks.unused_parameters", guilty=1)
def a_branch_is_skipped(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = DistributedDataParallel(TwoHeads())
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            update(optimizer, F.cross_entropy(model(x, both=rank == 0 or step < 8), y))


@rank_fault("X10", "ranks.uneven_steps", guilty=1)
def one_batch_fewer(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), list(batches(seed, rank))
    with watch(model, optimizer):
        for _, x, y in data[: len(data) - rank]:
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("X11", "ranks.ddp_does_not_exchange")
def whole_window_under_no_sync(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank, batch=8)
    with watch(model, optimizer, loader=data, accumulation=2):
        for step, (_, x, y) in enumerate(data):
            with model.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()


def replica(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return net()


@rank_fault("X12", "ranks.gradients_off_by_ranks")
def sum_without_division(watch: Watch, seed: int, rank: int) -> None:
    model = replica(seed)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                distributed.all_reduce(p.grad)
            optimizer.step()


@rank_fault("X14", "resources.silent_corruption", guilty=1)
def a_bit_is_flipped(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data][:STEPS]):
            if rank == 1 and step == 13:
                weight = model.module[4].weight.detach().view(torch.int32).view(-1)
                weight[7 + seed] ^= 1 << 30 if seed % 2 else 1 << 22
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("X15", "ranks.same_random_numbers")
def same_seed_everywhere(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, 0, 0.2)
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data)


@rank_fault("X16", "ranks.replicas_diverged")
def each_rank_makes_its_own_weights(watch: Watch, seed: int, rank: int) -> None:
    model = replica(100 * seed + rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                distributed.all_reduce(p.grad)
                p.grad /= RANKS  # type: ignore[assignment]
            optimizer.step()


@rank_fault("X17", "ranks.replicas_diverged")
def learning_rates_differ(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            if step == 5 and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.01  # as ReduceLROnPlateau does when only this rank's loss stagnates
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("X18", "ranks.stalled", guilty=1)
def one_rank_hangs(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            if step == 9 and rank == 1:
                time.sleep(8)  # longer than ranks_host.LIMIT_S
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("R09", "ranks.straggler", guilty=1)
def one_rank_is_slow(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank, n=1024)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            time.sleep(0.02 if rank == 1 else 0)
            update(optimizer, F.cross_entropy(model(x), y))


# healthy runs


@healthy_ranks("HX1")
def plain(watch: Watch, seed: int, rank: int) -> None:
    """BatchNorm, dropout, a scheduler, two parameter groups, clipping, an evaluation of ``model.module``."""
    model = wrapped(seed, rank, 0.1, norm=True)
    groups = [
        {"params": model.module[0].parameters(), "lr": 1e-3},
        {"params": [*model.module[1].parameters(), *model.module[4].parameters()]},
    ]
    optimizer, data = torch.optim.AdamW(groups, lr=1e-2), batches(seed, rank)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    held_out = DataLoader(Rows(*table(seed + 1, n=64)), batch_size=32)
    with watch(model, optimizer, loader=data, scheduler=scheduler):
        for epoch in range(2):
            data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            model.train()
            for _, x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
            model.eval()
            with torch.no_grad():
                for _, x, _ in held_out:
                    model.module(x)


@healthy_ranks("HX2")
def accumulation(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank, 0.1)
    optimizer, data = adam(model), batches(seed, rank, batch=8)
    with watch(model, optimizer, loader=data, accumulation=2):
        for step, (_, x, y) in enumerate(data):
            with nullcontext() if step % 2 else model.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()


@healthy_ranks("HX3")
def mean_by_hand(watch: Watch, seed: int, rank: int) -> None:
    """Gradients are averaged without DDP: odd seeds divide the loss by the number of ranks, even ones the gradients."""
    model = replica(seed)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss / RANKS if seed % 2 else loss).backward()
            for p in model.parameters():
                distributed.all_reduce(p.grad)
                if seed % 2 == 0:
                    p.grad /= RANKS  # type: ignore[assignment]
            optimizer.step()


@healthy_ranks("HX4")
def unused_and_found(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            update(optimizer, F.cross_entropy(model(x, both=rank == 0 or step < 8), y))


@healthy_ranks("HX5")
def uneven_inside_of_join(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), list(batches(seed, rank))
    with Join([model]), watch(model, optimizer):
        for _, x, y in data[: len(data) - 3 * rank]:
            update(optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HX6")
def the_first_rank_saves(watch: Watch, seed: int, rank: int) -> None:
    """Every tenth step rank 0 is busy for 0.1 s, as when it saves a checkpoint."""
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate([*data, *data]):
            if rank == 0 and step % 10 == 9:
                time.sleep(0.1)
            update(optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HX7")
def sharded(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = net(0.1)
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (RANKS,)))  # type: ignore[attr-defined]
    torch.manual_seed(1000 * seed + rank)
    optimizer, data = adam(model), batches(seed, rank)
    train(watch, model, optimizer, data)


@healthy_ranks("HX8")
def short_last_batches(watch: Watch, seed: int, rank: int) -> None:
    data = Rows(*table(seed, n=131))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, RANKS, rank, seed=seed))
    model = wrapped(seed, rank, 0.1)
    optimizer = adam(model)
    with watch(model, optimizer, loader=loader):
        for epoch in range(4):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for _, x, y in loader:
                update(optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HX9")
def state_of_the_optimizer_in_parts(watch: Watch, seed: int, rank: int) -> None:
    """ZeRO stage 1: each rank updates some of the parameters and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = wrapped(seed, rank, 0.1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    data = batches(seed, rank)
    train(watch, model, optimizer, data)


@healthy_ranks("HX10")
def two_models_take_turns(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    G = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20)))
    D = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    torch.manual_seed(1000 * seed + rank)
    makes, judges = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (G, D))
    data = batches(seed, rank)
    with watch([G, D], [makes, judges], loader=data):
        for _, x, _ in data:
            fake = G(torch.randn(len(x), 8))
            both = D(torch.cat([x, fake.detach()]))
            target = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
            update(judges, F.binary_cross_entropy_with_logits(both, target))
            update(makes, F.binary_cross_entropy_with_logits(D(fake), torch.ones(len(x), 1)))
