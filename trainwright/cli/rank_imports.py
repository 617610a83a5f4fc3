"""Imports of a rank that trains, for the fork server of ``trainwright.cli.torchrun``."""

from importlib import import_module

from trainwright.cli.app import importing_torch

with importing_torch():
    import_module("torch._dynamo")  # the first optimizer of a process imports it
    import_module("trainwright.training.run")
