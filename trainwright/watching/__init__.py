"""Watches a training loop: records its steps, runs experiments on some of them, and collects findings."""
