"""Recipes in the box, killed and resumed, are the same bits; precision and workers take turns over them.

One of each kind: convolutions, an LSTM, Muon, adapters. ``benchmarks/verify_recipes.py`` goes through all recipes in
all combinations.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests import forked
from tests.training.small_recipes import PRECISIONS, WORKERS, small_trial
from trainwright.verbs.verify.resume import verify_resume

KINDS = ("resnet-digits.yaml", "lstm-text.yaml", "demo.yaml", "gpt-lora.yaml")
TURNS = list(zip(KINDS, itertools.cycle((precision, each) for each in WORKERS for precision in PRECISIONS)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "turn"), TURNS, ids=[name for name, _ in TURNS])
def test_a_recipe_in_the_box_resumes_to_the_same_bits(
    name: str, turn: tuple[str, tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    precision, workers = turn
    assert (name, precision) != ("lstm-text.yaml", "fp16"), "oneDNN has no LSTM in fp16 on a CPU"
    proof = verify_resume(small_trial(name, precision, workers, steps=3), run_part=forked.run_part)
    assert proof.equal, "\n".join(proof.lines())
    assert proof.precision == precision
