"""Checks of reinforcement learning."""
