"""Checks that serve one domain: packs that are chosen by ``tw.watch(checks=["default", "rl"])``."""
