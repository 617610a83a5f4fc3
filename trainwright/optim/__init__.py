"""Optimizers: parameter groups, those of torch and of Trainwright, and optimizer offload."""
