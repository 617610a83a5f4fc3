"""Runs trials of a recipe, each with its own settings, process and run folder. Does not import torch."""

from trainwright.trials.trial import Trial, TrialProcess, read_trial, run_trial

__all__ = ["Trial", "TrialProcess", "read_trial", "run_trial"]
