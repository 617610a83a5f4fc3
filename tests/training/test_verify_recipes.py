"""Recipes in the box, killed and resumed, are the same bits; precision and workers take turns over them.

One of each kind: convolutions, an LSTM, Muon, adapters. ``benchmarks/verify_recipes.py`` goes through all recipes in
all combinations.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.training.small_recipes import PRECISIONS, WORKERS, small_trial
from trainwright.commands.verify import trial
from trainwright.commands.verify.resume import verify_resume

KINDS = ("resnet-digits.yaml", "lstm-text.yaml", "demo.yaml", "gpt-lora.yaml")
TURNS = dict(zip(KINDS, itertools.cycle((precision, each) for each in WORKERS for precision in PRECISIONS)))
BLOCKS = tuple(f"{part}.args.block_size=32" for part in ("model", "data.train", "data.val"))
SMALLER = {"demo.yaml": ("model.args.layers=1", *BLOCKS), "gpt-lora.yaml": ("batch.size=4", *BLOCKS)}
"""A trial trains three times."""


def run_part(part: trial.TrialPart, output: Path, environment: Mapping[str, str]) -> int:
    """As ``verify.resume.in_new_python``: in a process that is forked from this one, with what it has imported."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.environ.update(environment)
            sys.argv = ["-c", json.dumps(asdict(part))]
            trial.main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prove_all() -> None:
    """Prints of each recipe whether the bits were equal, the precision and what the proof says.

    Each part of a trial is a process of its own. None of them imports PEFT or scikit-learn, which takes longer than
    what it trains.
    """
    pytest.importorskip("peft")
    pytest.importorskip("sklearn.datasets")
    proofs = {}
    for name, (precision, workers) in TURNS.items():
        asked = small_trial(name, precision, workers, steps=3)
        asked = replace(asked, settings=(*asked.settings, *SMALLER.get(name, ())))
        proof = verify_resume(asked, run_part=run_part)
        proofs[name] = (proof.equal, proof.precision, proof.lines())
    print(json.dumps(proofs))


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    code = "from tests.training.test_verify_recipes import prove_all; prove_all()"
    done = forked.run(code, cwd=tmp_path_factory.mktemp("proofs"), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_in_the_box_resumes_to_the_same_bits(name: str, proofs: Any) -> None:
    equal, precision, lines = proofs[name]
    assert equal, "\n".join(lines)
    assert precision == TURNS[name][0]
    assert (name, precision) != ("lstm-text.yaml", "fp16"), "oneDNN has no LSTM in fp16 on a CPU"
