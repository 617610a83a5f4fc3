"""Watching a loop: the recorder hears it, experiments look closely, findings are kept and told."""
