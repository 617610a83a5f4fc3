"""BatchNorm with batch statistics over all ranks, as one process computes them from the full micro-batch.

torch's SyncBatchNorm supports no CPU tensors. It also cannot exclude samples. That is needed in a short last batch,
where a rank that has no sample left computes with a copy of another rank's sample, which must not count twice. This
implementation runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.distributed.group import SOLO, World
from trainwright.errors import UsageError


class BatchStatistics(torch.autograd.Function):
    """Mean and variance per channel over the samples of all ranks, and the number of values.

    With n_r values on rank r, of mean m_r and sum of squared deviations S_r, and N = sum(n_r): m = sum(n_r m_r) / N,
    and N v = sum(S_r + n_r (m_r - m)^2) (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979). The gradient of a value x is (dm + 2 (x - m) dv) / N with dm and dv summed over
    the ranks, as in Ioffe & Szegedy, "Batch normalization", 2015, section 3. One exchange of 2 C + 1 numbers in
    forward, one of 2 C in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool, world: World) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the statistics.

        ``x`` is (samples, C, ...). If ``counts`` is False, the values of this rank have weight 0.
        """
        own_mean = x.mean(dims := _all_but_channels(x))
        own_squares = (x - _per_channel(own_mean, x)).square().sum(dims)
        count = own_mean.new_full((1,), _values_per_channel(x) * counts, dtype=torch.float64)
        table = world.gather(torch.cat([count, own_mean.double(), own_squares.double()]))
        table = table.where(table[:, :1] > 0, 0.0)  # the mean of no values is NaN
        counts_r1, (means_rc, squares_rc) = table[:, :1], table[:, 1:].chunk(2, dim=1)
        total = counts_r1.sum()
        mean = (counts_r1 * means_rc).sum(0) / total
        squares = (squares_rc + counts_r1 * (means_rc - mean).square()).sum(0)
        mean = mean.to(x.dtype)
        variance = (squares / total).to(x.dtype)
        total = total.to(x.dtype)
        ctx.save_for_backward(x, mean, total)
        ctx.counts, ctx.world = counts, world
        ctx.mark_non_differentiable(total)
        return mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor, _: object) -> tuple[Tensor, None, None]:
        x, mean, total = ctx.saved_tensors
        ctx.world.sum_(summed := [of_mean.contiguous().clone(), of_variance.contiguous().clone()])
        of_mean, of_variance = (_per_channel(each, x) for each in summed)
        grad = (of_mean + 2 * (x - _per_channel(mean, x)) * of_variance) / total
        return grad if ctx.counts else torch.zeros_like(x), None, None


class SyncedNorms(NamedTuple):
    """The BatchNorms of a model that use statistics of all ranks of ``world``, only in the passes of a step.

    Elsewhere (dry run, evaluation) nothing is exchanged. The model itself is unchanged, and checkpoints fit the plain
    model.
    """

    norms: Sequence[_BatchNorm] = ()
    world: World = SOLO

    @classmethod
    def of(cls, roots: Sequence[object], world: World) -> SyncedNorms:
        """Collect the BatchNorms of ``roots``. Raises UsageError for a subclass with another forward pass."""
        modules = {m: None for root in roots if isinstance(root, nn.Module) for m in root.modules()}
        norms = [module for module in modules if isinstance(module, _BatchNorm)]
        for norm in norms:
            if type(norm).forward is not _BatchNorm.forward:
                raise UsageError(
                    f"parallel.sync_batchnorm: a {type(norm).__name__} overrides the forward pass, and what it does "
                    "with the statistics of a batch is not known",
                    remedy="use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d, or leave parallel.sync_batchnorm out",
                )
        return cls(norms, world)

    @property
    def exchange(self) -> bool:
        return bool(self.norms) and self.world.size > 1

    @contextmanager
    def synchronised(self, *, counts: bool) -> Iterator[None]:
        """Context in which the norms use statistics of all ranks, which must run the same norms in the same order.

        ``counts``: this rank has samples that count.
        """
        before = [vars(norm).get("forward") for norm in self.norms]
        try:
            for norm in self.norms if self.world.size > 1 else ():
                vars(norm)["forward"] = partial(_forward, norm, counts=counts, world=self.world)
            yield
        finally:
            for norm, forward in zip(self.norms, before, strict=True):
                vars(norm).pop("forward", None)
                if forward is not None:
                    vars(norm)["forward"] = forward


LOCAL_STATISTICS = SyncedNorms()
"""Every rank uses the statistics of its samples."""


def _forward(norm: _BatchNorm, x: Tensor, *, counts: bool, world: World) -> Tensor:
    """Compute ``norm`` on a batch that is divided among ranks. x: (samples, C, ...)."""
    if not norm.training:
        return _BatchNorm.forward(norm, x)
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance, total = BatchStatistics.apply(exact, counts, world)  # type: ignore[no-untyped-call]
    if not counts or _values_per_channel(x) < 2:
        _require_two(total)  # costs a host sync, only if few samples are left
    if norm.track_running_stats:
        _update_running(norm, mean.detach(), variance.detach(), total)
    normal = (exact - _per_channel(mean, x)) * _per_channel((variance + norm.eps).rsqrt(), x)
    if norm.affine:
        normal = normal * _per_channel(norm.weight, x) + _per_channel(norm.bias, x)
    return normal.to(x.dtype)


@torch.no_grad()
def _update_running(norm: _BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    """Update as torch does: with the unbiased variance. A momentum of None means a cumulative average."""
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    of_all = norm.num_batches_tracked.to(norm.running_mean.dtype).reciprocal()
    share = of_all if norm.momentum is None else torch.full_like(of_all, norm.momentum)
    norm.running_mean.lerp_(mean.to(norm.running_mean), share)
    norm.running_var.lerp_((variance * (total / (total - 1))).to(norm.running_var), share)


def _require_two(total: Tensor) -> None:
    if total < 2:
        raise UsageError(
            "BatchNorm got one value per channel from all ranks together, which has no variance",
            remedy="choose another batch.size, so that an epoch does not end with one sample, or use GroupNorm",
        )


def _values_per_channel(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values_c: Tensor, x: Tensor) -> Tensor:
    """Return a view of shape (1, C, 1, ...) that broadcasts with ``x``."""
    return values_c.view(1, -1, *[1] * (x.dim() - 2))
