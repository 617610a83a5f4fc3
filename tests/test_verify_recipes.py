"""Each recipe in the box, killed and resumed, is the same bits; precision and workers take turns over the recipes.

``benchmarks/verify_recipes.py`` goes through all combinations.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from test_runs import SMALL

from trainwright.demo import recipe_folder
from trainwright.verify import Trial, verify_resume

TURNS = list(zip(SMALL, itertools.cycle(itertools.product(("fp32", "bf16", "fp16"), ((2, 3), (0, 0))))))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "turn"), TURNS, ids=[name for name, _ in TURNS])
def test_a_recipe_in_the_box_resumes_to_the_same_bits(
    name: str, turn: tuple[str, tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    precision, workers = turn
    settings = ("evaluation.batch=4", *SMALL[name], f"precision={precision}")
    proof = verify_resume(Trial(recipe_folder() / name, 3, *workers, settings))
    assert proof.equal, "\n".join(proof.lines())
    assert proof.precision == precision
