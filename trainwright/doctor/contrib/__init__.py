"""Packs of checks for one domain, chosen by ``tw.watch(checks=["default", "rl"])``."""
