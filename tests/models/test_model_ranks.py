"""ViT, BERT and the mixture of experts on two ranks: the losses and weights of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, sys
import torch
import trainwright as tw
from trainwright.engine.losses import cross_entropy, language_model
from trainwright.models.bert import bert
from trainwright.models.moe import moe_gpt
from trainwright.models.vit import vit

draw = torch.Generator().manual_seed(0)
ids = torch.randint(11, (24, 9), generator=draw)
x, y = torch.randn(24, 3, 8, 8, generator=draw), torch.randint(3, (24,), generator=draw)
text = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": 16}
kinds = {
    "bert": (lambda: bert(**text, tied=False), (ids[:, :-1], ids[:, 1:]), language_model),
    "vit": (lambda: vit(image_size=8, patch=4, layers=2, heads=2, d_model=16, classes=3), (x, y), cross_entropy),
    "moe": (lambda: moe_gpt(**text, tied=False, bias_rate=0.5), (ids[:, :-1], ids[:, 1:]), language_model),
}
torch.set_num_threads(1)
for name, settings in json.loads(sys.argv[1]).items():
    torch.manual_seed(3)
    model, data, loss = kinds[name.partition("-")[0]]
    tw.fit(model(), data, loss, lr=1e-2, batch=8, until="4steps", precision="fp32", quiet=True,
           settings={"folder": name, "checkpoint.every": "4steps", "log.doctor": False, "schedule.use": "constant",
                     "optimizer.clip.at": 0.5, "optimizer.args": {"eps": 1e-3}, **settings})
"""


def trained(count: int, folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    ranks.finish(FIT, count, json.dumps(runs), cwd=folder, timeout=250)


def weights(folder: Path) -> dict[str, Tensor]:
    (newest,) = folder.glob("run/checkpoints/step-*4")
    return ranks.tensors_in(newest)


def test_two_ranks_divide_layers_and_stages_of_encoders(tmp_path: Path) -> None:
    trained(1, tmp_path, {"bert": {}, "vit": {}})
    tensor, pipeline = {"parallel.tensor": 2}, {"parallel.pipeline": 2, "batch.micro": 4}
    divided = {f"{kind}-{len(layout)}": layout for kind in ("bert", "vit") for layout in (tensor, pipeline)}
    trained(2, tmp_path, divided)
    for name in divided:
        expected = weights(tmp_path / name.partition("-")[0])
        torch.testing.assert_close(weights(tmp_path / name), expected, rtol=0, atol=1e-6)


def test_experts_are_balanced_once_a_step_however_the_weights_are_divided(tmp_path: Path) -> None:
    """The load of all ranks decides, also with gradients that are exchanged only once a step (zero: 1)."""
    trained(1, tmp_path, {"moe": {"batch.micro": 4}})
    divided: dict[str, dict[str, Any]] = {
        "moe-copies": {"batch.micro": 2},
        "moe-shards": {"batch.micro": 2, "parallel.shard": 2},
        "moe-zero1": {"batch.micro": 2, "parallel.shard": 2, "parallel.zero": 1},
    }
    trained(2, tmp_path, divided)
    expected = weights(tmp_path / "moe")
    assert max(float(expected[name].abs().max()) for name in expected if name.endswith("mlp.bias")) in (0.5, 1.0, 1.5)
    for name in divided:
        torch.testing.assert_close(weights(tmp_path / name), expected, rtol=0, atol=1e-6)
