"""Packed samples in a model that ranks divide: the losses of one process, and the comparison with samples alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, sys
from pathlib import Path
import torch
import trainwright as tw
from tests.finetune.tiny import llama, supervised
from transformers import FalconConfig, FalconForCausalLM

torch.set_num_threads(1)
for name, settings in json.loads(sys.argv[1]).items():
    torch.manual_seed(3)
    falcon = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = FalconForCausalLM(falcon) if name == "falcon" else llama()
    given = {"folder": name, "precision": "fp32", "seed": 1, "log.doctor": False, **settings}
    try:
        result = tw.fit(model, supervised(), "hf_causal_lm", batch=4, steps=2, lr=1e-2, quiet=True, settings=given)
    except tw.TrainwrightError as error:
        print(json.dumps([0.0, str(error)]))
        continue
    notes = json.loads((Path(result.run) / "plan.json").read_text())["notes"]
    print(json.dumps([result.loss, next(each["why"] for each in notes if each["topic"] == "packing")]))
"""
BFD: dict[str, Any] = {"data.packing": {"by": "bfd", "max_length": 40}}
FREE: dict[str, Any] = {"data.packing": "padding_free"}


def trained(count: int, folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return the loss of each run and the note on packing, or 0 and the error, as the first rank prints them."""
    done = ranks.finish(FIT, count, json.dumps(runs), cwd=folder, timeout=250)
    return dict(zip(runs, map(json.loads, done[0].stdout.splitlines()), strict=True))


def test_divided_weights_train_packed_samples_as_one_process(tmp_path: Path) -> None:
    shard: dict[str, Any] = {"parallel.shard": 2}
    tensor: dict[str, Any] = {"parallel.tensor": 2}
    alone = trained(1, tmp_path, {"bfd": BFD, "free": FREE})
    runs = {
        "bfd-shard": BFD | shard,
        "free-shard": FREE | shard,
        "bfd-tensor": BFD | tensor,
        "free-tensor": FREE | tensor,
    }
    divided = trained(2, tmp_path, {**runs, "falcon": BFD | shard})
    _, error = divided.pop("falcon")
    assert "lets a sample see the tokens of other samples" in error
    for name, (loss, note) in divided.items():
        assert loss == pytest.approx(alone[name.split("-")[0]][0], abs=1e-5), name
        assert "attention stays within each sample" in note
