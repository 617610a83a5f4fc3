"""Optimizers: parameter groups, those of torch and our own, and optimizer offload."""

from __future__ import annotations

from trainwright.build.optim.choose import make_optimizer, with_momentum_buffers
from trainwright.build.optim.groups import GroupRule, param_groups
from trainwright.build.optim.guarded import GuardedOptimizer
from trainwright.build.optim.lamb import Lamb
from trainwright.build.optim.lars import Lars
from trainwright.build.optim.muon import Muon, muon_groups
from trainwright.build.optim.offload import offloaded

__all__ = [
    "GroupRule",
    "GuardedOptimizer",
    "Lamb",
    "Lars",
    "Muon",
    "make_optimizer",
    "muon_groups",
    "offloaded",
    "param_groups",
    "with_momentum_buffers",
]
