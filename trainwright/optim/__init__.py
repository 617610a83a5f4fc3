"""Optimizers: parameter groups, those of torch and of Trainwright, and optimizer offload."""

from __future__ import annotations

from trainwright.optim.choose import make_optimizer, with_momentum_buffers
from trainwright.optim.groups import GroupRule, param_groups
from trainwright.optim.guarded import GuardedOptimizer
from trainwright.optim.lamb import Lamb
from trainwright.optim.lars import Lars
from trainwright.optim.muon import Muon, muon_groups
from trainwright.optim.offload import offloaded

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
