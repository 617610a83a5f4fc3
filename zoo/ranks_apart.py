"""Zoo, group Y: faults in which one rank does something else, and healthy runs that look like them; judged apart."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.host import Rows, Watch, table
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


@rank_fault("Y03", "ranks.replicas_diverged")
def one_rank_steps_its_schedule_twice(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    with watch(model, optimizer, loader=data, scheduler=scheduler):
        for _, x, y in data:
            update(optimizer, F.cross_entropy(model(x), y))
            scheduler.step()
            if rank == 0:  # where it logs the learning rate
                scheduler.step()


class Scaled(nn.Module):
    """Divides by a moving average of the spread of what this rank has seen."""

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
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("Y05", "ranks.programs_differ")
def one_rank_computes_in_bf16(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                loss = F.cross_entropy(model(x), y)
            update(optimizer, loss)


@rank_fault("Y06", "ranks.averaged_twice")
def the_mean_is_divided_again(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            update(optimizer, F.cross_entropy(model(x), y) / RANKS)


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


@rank_fault("Y08", "ranks.uneven_steps", guilty=1)
def one_rank_drops_its_last_batch(watch: Watch, seed: int, rank: int) -> None:
    data = Rows(*table(seed, n=500))
    sampler = DistributedSampler[object](data, RANKS, rank, seed=seed)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=rank == 1)
    model = wrapped(seed, rank)
    optimizer = adam(model)
    with watch(model, optimizer, loader=loader):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for _, x, y in loader:
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


@rank_fault("Y10", "ranks.replicas_diverged")
def moments_are_loaded_on_one_rank(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            if step == 4:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 9 and rank == 0:
                optimizer.load_state_dict(saved)
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("Y11", "ranks.uneven_steps", "ranks.nonfinite_loss", guilty=1)
def one_rank_leaves_a_batch_out(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for step, (_, x, y) in enumerate(data):
            loss = F.cross_entropy(model(x * float("nan") if rank == 1 and step == 5 else x), y)
            if loss.isfinite():
                update(optimizer, loss)


@rank_fault("Y12", "ranks.stale_buckets", "ranks.gradients_differ")
def the_head_is_replaced_after_wrapping(watch: Watch, seed: int, rank: int) -> None:
    model = wrapped(seed, rank, find_unused=True)
    torch.manual_seed(seed)
    model.module[4] = nn.Linear(32, 10)
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            update(optimizer, F.cross_entropy(model(x), y))


@rank_fault("Y13", "ranks.gradients_differ")
def each_rank_clips_by_the_norm_of_its_part(watch: Watch, seed: int, rank: int) -> None:
    torch.manual_seed(seed)
    model = net()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (RANKS,)))
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
    """BatchNorm without broadcast buffers; the first rank evaluates, and goes back to training mode."""
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
    """Weights and moments are loaded on every rank at once, in bf16 throughout."""
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
    """The first rank evaluates a moving average of the weights in their place, and puts them back; the loss is summed
    for the log; the last of three micro-batches exchanges.
    """
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
    """FSDP, with the norm of all parts."""
    torch.manual_seed(seed)
    model = net()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (RANKS,)))
    optimizer, data = adam(model), batches(seed, rank)
    with watch(model, optimizer, loader=data):
        for _, x, y in data:
            clipped(model, optimizer, F.cross_entropy(model(x), y))


@healthy_ranks("HY5")
def layers_are_divided(watch: Watch, seed: int, rank: int) -> None:
    """Tensor parallelism: both ranks have the same samples, and draw the same numbers."""
    torch.manual_seed(seed)
    model = net(0.1)
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()})
    optimizer, data = adam(model), batches(seed, rank, own=False)
    with watch(model, optimizer, loader=data):
        for _, x, y in [*data, *data]:
            update(optimizer, F.cross_entropy(model(x), y))
