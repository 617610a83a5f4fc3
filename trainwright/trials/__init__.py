"""Runs of a recipe with other settings, each in a process and a run folder of its own. Does not import torch."""

from trainwright.trials.trial import Trial, TrialProcess, read_trial, run_trial

__all__ = ["Trial", "TrialProcess", "read_trial", "run_trial"]
