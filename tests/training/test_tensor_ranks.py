"""A model whose layers, stages or sequences are divided among ranks trains as in one process: log and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainwright as tw
from tests import ranks
from tests.training.ranked import compare
from trainwright.engine.losses import language_model
from trainwright.errors import RecipeError
from trainwright.models.gpt import gpt
from trainwright.models.moe import moe_gpt

pytestmark = [pytest.mark.process, pytest.mark.slow]

SMALL: dict[str, Any] = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": 16, "tied": False}
TIED = {"tied": True}
DEEP = {**TIED, "layers": 4}
FIT = """
import json, os, sys
import torch
import trainwright as tw
from torch import nn
from trainwright.engine.losses import hf_causal_lm, language_model
from trainwright.models.gpt import gpt
from trainwright.models.moe import moe_gpt

class Own(nn.Module):  # a model of a user's, without any plan
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.out = nn.Linear(16, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(x + self.down(self.up(x).relu()))

class Rows(nn.Module):  # with blocks that no attribute names
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for row in self.rows:
            x = row(x)
        return self.out(x)

def made(changed):
    if "architecture" in changed:
        from trainwright.models.hf import hf_model
        return hf_model(vocab_size=11, **changed)
    if isinstance(changed, str):
        return {"own": Own, "rows": Rows}[changed]()
    return (moe_gpt if "experts" in changed else gpt)(**{**json.loads(sys.argv[2]), **changed})

draw = torch.Generator().manual_seed(0)
ids = torch.randint(11, (23, 9), generator=draw)
target = ids[:, 1:].masked_fill(torch.rand(23, 8, generator=draw) < 0.3, -100)  # samples weigh different numbers
torch.set_num_threads(1)
for name, settings in json.loads(sys.argv[1]).items():
    torch.manual_seed(3)
    changed = settings.pop("model", {})
    model = made(changed)
    loss = hf_causal_lm if "architecture" in changed else language_model
    given = {"log.every": "1steps", "evaluation.every": "3steps", "evaluation.batches": 9, "folder": name,
             "optimizer.clip.at": 0.5, "schedule.use": "constant", "optimizer.args": {"eps": 1e-3},
             "checkpoint.every": "3steps", "log.doctor": "RANK" in os.environ, **settings}  # alone it repeats steps
    result = tw.fit(model, (ids[:, :-1], target), loss, val=(ids[:7, :-1], target[:7]), lr=1e-2,
                    batch=given.pop("batch", 8), until=given.pop("until", "4steps"),
                    precision=given.pop("precision", "fp32"), quiet=True, resume=given.pop("resume", None),
                    settings=given)
    print(json.dumps({"loss": result.loss, "val_loss": result.val_loss}))
"""


def trained(count: int, folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Trains all of them, one after the other; every rank says the same of each."""
    done = ranks.finish(FIT, count, json.dumps(runs), json.dumps(SMALL), cwd=folder, timeout=250)
    said = [[json.loads(line) for line in each.stdout.splitlines()] for each in done]
    assert len(said[0]) == len(runs) and all(each == said[0] for each in said)


def weights(folder: Path) -> dict[str, Tensor]:
    newest = max(folder.glob("run/checkpoints/step-*"))
    return ranks.tensors_in(newest)


def logged(folder: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The records of these kinds; of a step that was taken again, the last."""
    records = [*map(json.loads, (folder / "run/log.jsonl").read_text().splitlines())]
    for each in (record["probed"] for record in records if "probed" in record):
        for name in {"expert_load_max", "expert_load_min"} & each.keys():
            del each[name]  # a mean over ranks and micro-batches of the loads of each
    yield from {(each["kind"], each["step"]): each for each in records if each["kind"] in kinds}.values()


def require_same(folder: Path, name: str, reference: str = "whole", *, resumed: bool = False) -> None:
    kinds = ("step",) if resumed else ("step", "evaluated")
    compare([*logged(folder / name, *kinds)], [*logged(folder / reference, *kinds)])
    theirs, mine = weights(folder / reference), weights(folder / name)
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        apart = float((tensor - theirs[key]).abs().max())
        assert torch.allclose(tensor, theirs[key], atol=1e-6), (name, key, apart)


MODERN = {"norm": "rms", "positions": "rope", "activation": "swiglu", "bias": False, "tied": True, "bigram": 30}
PLAN = {"embed": "row", "up": "column", "down": "row", "out": "column_gathered"}
TWO: dict[str, dict[str, Any]] = {
    "sequence": {
        "parallel.tensor": 2,
        "parallel.sequence": True,
        "batch.micro": 4,
        "model.activation_checkpointing": "block",
    },
    "context": {"parallel.context": 2, "batch.micro": 3, "model.ema": 0.9, "model.activation_checkpointing": "block"},
    "gpipe": {"parallel.pipeline": 2, "parallel.schedule": "gpipe", "batch.micro": 3},
    "1f1b": {"parallel.pipeline": 2, "batch.micro": 3, "model.ema": 0.9, "model": TIED},
    "interleaved": {
        "model": DEEP,
        "parallel.pipeline": 2,
        "parallel.schedule": "interleaved",
        "batch.micro": 3,
        "model.activation_checkpointing": "block",
    },
    "zero_bubble": {"model": DEEP, "parallel.pipeline": 2, "parallel.schedule": "zero_bubble", "batch.micro": 3},
    "zbv": {"model": DEEP, "parallel.pipeline": 2, "parallel.schedule": "zbv", "batch.micro": 3},
    "dualpipev": {
        "model": DEEP,
        "parallel.pipeline": 2,
        "parallel.schedule": "dualpipev",
        "batch.micro": 2,
        "model.activation_checkpointing": "block",
    },
}
REFERENCES = {
    "sequence": "whole",
    "context": "ema",
    "gpipe": "whole",
    "1f1b": "tied",
    "interleaved": "deep",
    "zero_bubble": "deep",
    "zbv": "deep",
    "dualpipev": "deep",
}


def test_two_ranks_divide_layers_stages_and_sequences(tmp_path: Path) -> None:
    """23 samples in batches of 8: the last step of an epoch, the third of four, is short.

    Layers alone, without sequences, are divided in what goes on from a checkpoint, and in a model of one's own.
    """
    own, half = {"model": "own"}, {"precision": "fp16"}
    alone: dict[str, dict[str, Any]] = {
        "whole": {},
        "ema": {"model.ema": 0.9},
        "tied": {"model": TIED, "model.ema": 0.9},
        "modern": {"model": MODERN},
        "deep": {"model": DEEP},
        "own": own,
        "half": half,
    }
    begun: dict[str, dict[str, Any]] = {"begun": {"until": "3steps"}, "begun-too": {"until": "3steps", "model": TIED}}
    trained(1, tmp_path, {**alone, **begun})
    divided = {
        **TWO,
        "modern-context": {"parallel.context": 2, "model": MODERN},
        "own-tensor": {**own, "parallel.tensor": 2, "parallel.plan": PLAN},
        "half-stages": {**half, "parallel.pipeline": 2, "batch.micro": 3},
        "into-tensor": {"resume": "begun/run", "parallel.tensor": 2},
        "into-stages": {"resume": "begun-too/run", "parallel.pipeline": 2, "batch.micro": 2, "model": TIED},
    }
    trained(2, tmp_path, divided)
    for name in TWO:
        require_same(tmp_path, name, REFERENCES[name])
    require_same(tmp_path, "modern-context", "modern")
    require_same(tmp_path, "own-tensor", "own")
    for one, other in zip(logged(tmp_path / "half-stages", "step"), logged(tmp_path / "half", "step"), strict=True):
        assert one["skipped"] == other["skipped"] == 0
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    require_same(tmp_path, "begun", resumed=True)
    require_same(tmp_path, "begun-too", "tied", resumed=True)


def test_four_ranks_divide_layers_and_samples_and_go_on_in_one(tmp_path: Path) -> None:
    shallow = {"model": {"layers": 1}}  # each layer is divided alike
    deeper = {"model": {**DEEP, "layers": 8}}
    alone: dict[str, dict[str, Any]] = {
        "whole": {"model": TIED},
        "shallow": shallow,
        "deep": {"model": DEEP},
        "deeper": deeper,
    }
    longer = {f"{name}-longer": {**settings, "until": "5steps"} for name, settings in alone.items()}
    trained(1, tmp_path, {**alone, **longer})
    layouts: dict[str, dict[str, Any]] = {
        "tensor-shards": {**shallow, "parallel.tensor": 2, "parallel.shard": 2, "batch.micro": 2},
        "context-tensor": {**shallow, "parallel.tensor": 2, "parallel.context": 2, "parallel.sequence": True},
        "stages-copies": {"model": TIED, "parallel.pipeline": 2, "parallel.replicate": 2, "batch.micro": 2},
        "stages-shards": {"model": TIED, "parallel.pipeline": 2, "parallel.shard": 2, "batch.micro": 2},
        "stages-tensor": {"model": TIED, "parallel.pipeline": 2, "parallel.tensor": 2, "batch.micro": 2},
        "stages": {"model": DEEP, "parallel.pipeline": 4, "batch.micro": 2},
        "zbv": {**deeper, "parallel.pipeline": 4, "parallel.schedule": "zbv", "batch.micro": 2},
    }
    trained(4, tmp_path, layouts)
    models = {id(settings["model"]): name for name, settings in alone.items()}
    reference = {name: models[id(settings["model"])] for name, settings in layouts.items()}
    for name, one in reference.items():
        require_same(tmp_path, name, one)
    goes_on = {name: {**alone[one], "resume": f"{name}/run", "until": "5steps"} for name, one in reference.items()}
    trained(1, tmp_path, goes_on)
    for name, one in reference.items():
        require_same(tmp_path, name, f"{one}-longer", resumed=True)


EXPERTS = {"experts": 4, "active": 2, "bias_rate": 0.1, "expert_width": 8, "activation": "swiglu"}


def test_ranks_divide_experts_and_go_on_on_another_number(tmp_path: Path) -> None:
    """The third of four steps has one sample, so that most ranks send no token of their own."""
    moe: dict[str, Any] = {"model": EXPERTS, "batch": 11}
    muon = {**moe, "optimizer.use": "muon", "optimizer.args": {"adamw_eps": 1e-3, "ns_dtype": "float32"}}
    half, longer = {**moe, "precision": "bf16"}, {**moe, "until": "6steps"}
    alone = {"ema": {**moe, "model.ema": 0.9}, "whole": moe, "muon": muon, "half": half, "longer": longer}
    trained(1, tmp_path, alone)
    two = {"parallel.expert": 2}
    again = {"model.activation_checkpointing": "block"}
    divided = {"two": {**alone["ema"], **two, **again, "batch.micro": 3}, "half-two": {**half, **two}}
    trained(2, tmp_path, divided)
    copies = {**moe, **two, "parallel.replicate": 2, "batch.micro": 2}
    shards = {**moe, **two, "parallel.shard": 2}
    four = {
        "four": {**moe, "parallel.expert": 4},
        "copies": copies,
        "shards": {**shards, **again, "batch.micro": 2},
        "zero1-shards": {**shards, "model.ema": 0.9, "parallel.zero": 1, "batch.micro": 1},
        "muon-shards": {**muon, **shards},
    }
    trained(4, tmp_path, four)
    for name, reference in {
        "two": "ema",
        "four": "whole",
        "copies": "whole",
        "shards": "whole",
        "zero1-shards": "ema",
        "muon-shards": "muon",
    }.items():
        require_same(tmp_path, name, reference)
    for one, other in zip(logged(tmp_path / "half-two", "step"), logged(tmp_path / "half", "step"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
    trained(1, tmp_path, {"four": {**longer, "resume": "four/run"}})
    trained(2, tmp_path, {"copies": {**longer, **two, "resume": "copies/run"}})
    trained(4, tmp_path, {"shards": {**longer, **two, "parallel.shard": 2, "resume": "shards/run"}})
    for name in ("four", "copies", "shards"):
        require_same(tmp_path, name, "longer", resumed=True)


HF: dict[str, dict[str, Any]] = {
    "llama": {
        "architecture": "LlamaForCausalLM",
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "architecture": "GPT2LMHeadModel",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "tie_word_embeddings": False,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}
ROWS = {"embed": "first", "rows.*": "block", "out": "last"}


def test_two_ranks_divide_models_that_were_not_made_for_it(tmp_path: Path) -> None:
    """Models of ``transformers`` use their own plan, others a table; with one and several micro-batches."""
    pytest.importorskip("transformers")
    models = {**HF, "rows": "rows", "small": {**HF["llama"], "num_hidden_layers": 1}}
    trained(1, tmp_path, {name: {"model": model} for name, model in models.items()})
    ask: dict[str, Any] = {"parallel.pipeline": 2, "batch.micro": 3}
    divided: dict[str, dict[str, Any]] = {
        "llama-1f1b": {"model": HF["llama"], **ask, "model.activation_checkpointing": "block"},
        "small-tensor": {"model": models["small"], "parallel.tensor": 2, "batch.micro": 4},
        "gpt2-gpipe": {"model": HF["gpt2"], "parallel.pipeline": 2, "parallel.schedule": "gpipe"},
        "rows-1f1b": {"model": "rows", **ask, "parallel.stages": ROWS},
    }
    trained(2, tmp_path, divided)
    for name in divided:
        require_same(tmp_path, name, name.partition("-")[0])


@pytest.mark.parametrize(
    ("settings", "changed", "error"),
    [
        ({"parallel.tensor": 4}, {}, r"must divide evenly: 2 attention heads(?s:.)*tensor: 2"),
        ({"parallel.pipeline": 4, "parallel.schedule": "interleaved"}, DEEP, r"has 4(?s:.)*pipeline: 2"),
        ({"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.replicate": 2}, {}, r"the number of ranks, 4"),
        (
            {"parallel.context": 2, "parallel.replicate": 2, "model.compile": True},
            {},
            "does not work with parallel.context",
        ),
        (
            {
                "parallel.pipeline": 2,
                "parallel.replicate": 2,
                "parallel.schedule": "zero_bubble",
                "model.compile": True,
            },
            DEEP,
            "was not shown to work with model.compile",
        ),
        (
            {"parallel.tensor": 2, "parallel.replicate": 2, "parallel.async_tensor": True, "device": "cpu"},
            {},
            "needs parallel.sequence(?s:.)*needs model.compile(?s:.)*needs CUDA devices",
        ),
        ({"parallel.expert": 4}, {}, "GPT has no experts that ranks can divide"),
        ({"parallel.expert": 4}, {"experts": 6}, r"must divide the 6 experts(?s:.)*expert: 3"),
        ({"parallel.expert": 2, "parallel.tensor": 2}, EXPERTS, "was not shown to work with parallel.tensor"),
        ({"parallel.expert": 4, "model.compile": True}, EXPERTS, "model.compile: does not work with parallel.expert"),
        (
            {"parallel.tensor": 2, "parallel.replicate": 2, "model.lora": {"rank": 2, "dora": True}},
            {},
            r"model.lora: does not work with parallel.tensor(?s:.)*dora: true",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_before_ranks_meet(
    settings: dict[str, Any], changed: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This is the only rank of four: it would wait for the others."""
    monkeypatch.chdir(tmp_path)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    ids = torch.zeros(4, 8, dtype=torch.long)
    with pytest.raises(RecipeError, match=error):
        model = (moe_gpt if "experts" in changed else gpt)(**{**SMALL, **changed})
        tw.fit(model, (ids, ids), language_model, settings=settings, quiet=True)
