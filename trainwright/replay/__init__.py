"""Replays recorded steps, unchanged or with one thing changed, and restores all state afterwards."""
