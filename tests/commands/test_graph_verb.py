"""The picture of a step agrees with the graph that autograd really builds, and with what is really kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from trainwright.assembly.checkpointing import apply_checkpointing, find_blocks
from trainwright.cli import app
from trainwright.commands.graph import draw_graph, profile_graph
from trainwright.models.gpt import gpt
from trainwright.models.lora import add_lora
from trainwright.models.lstm import lstm
from trainwright.models.resnet import resnet
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.profile import GraphProfile, fold
from trainwright.plan.trace.fake_tensors import fake_batch, fake_tensors
from trainwright.plan.trace.graph_profiler import GraphProfiler
from trainwright.plan.trace.traced_step import TracedObjects, trace_step
from trainwright.recipe import load
from trainwright.runs.folder import RunFolder

RECIPES = Path(__file__).parents[2] / "recipes"
Case = tuple[nn.Module, Any, Callable[..., Tensor]]


class TwoInputs(nn.Module):
    """A bilinear form, one of its inputs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) * self.right(y) + x.sum(1, keepdim=True)


def over_ids(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def of_text(model: nn.Module) -> Case:
    ids = torch.randint(0, 50, (2, 9))
    return model, (ids[:, :-1], ids[:, 1:].contiguous()), over_ids


def hf(architecture: str, **options: Any) -> Case:
    pytest.importorskip("transformers")
    from trainwright.models.hf import hf_model

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return over_ids(model(batch[0]).logits, batch[1])

    model, data, _ = of_text(hf_model(architecture=architecture, vocab_size=50, **options))
    return model, data, loss


def small_gpt(**options: Any) -> nn.Module:
    return gpt(**{"vocab_size": 50, "block_size": 8, "layers": 4, "heads": 2, "d_model": 16, **options})


def case(name: str) -> Case:
    torch.manual_seed(0)
    made: dict[str, Callable[[], Case]] = {
        "gpt": lambda: of_text(small_gpt(dropout=0.1)),
        "gpt-modern": lambda: of_text(small_gpt(norm="rms", positions="rope", activation="swiglu", tied=False)),
        "lora": lambda: of_text(add_lora(small_gpt(), rank=2, alpha=4.0, targets=["query", "value"], dropout=0.0)),
        "lstm": lambda: of_text(lstm(vocab_size=50, d_model=16, layers=2)),
        "resnet": lambda: (
            resnet(depth=20, channels=1, width=4, classes=10).train(),
            (torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))),
            F.cross_entropy,
        ),
        "two-inputs": lambda: (
            TwoInputs(),
            (torch.randn(3, 6), torch.randn(3, 4), torch.randint(0, 8, (3,))),
            F.cross_entropy,
        ),
        "hf-gpt2": lambda: hf("GPT2LMHeadModel", n_layer=3, n_head=2, n_embd=16, n_positions=8),
        "hf-bert": lambda: hf(
            "BertForMaskedLM",
            num_hidden_layers=3,
            num_attention_heads=2,
            hidden_size=16,
            intermediate_size=32,
            max_position_embeddings=8,
        ),
    }
    return made[name]()


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-modern", "lora", "hf-gpt2", "hf-bert")]
NAMES = ["gpt", "lstm", "resnet", "two-inputs", *SLOWLY]


def loss_of(model: nn.Module, data: Any, loss: Callable[..., Tensor]) -> Tensor:
    if loss.__name__ == "loss":
        return loss(model, data)
    *inputs, target = data
    return loss(model(*inputs), target)


def read(name: str) -> tuple[GraphProfile, Tensor, nn.Module, Any, int]:
    """The profile of a real step; and what an independent count of saved storages gives."""
    model, data, loss = case(name)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *data)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, data, loss)
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in known)
    kept.clear()
    profiler = GraphProfiler(model)
    out = loss_of(model, data, loss)
    profile = profiler.read(out, data)
    profiler.close()
    return profile, out, model, data, size


def names_of(profile: GraphProfile) -> list[str]:
    """Operators, where reshape has one name for what it does with and without values."""
    return [node.op.replace("ReshapeAlias", "View") for node in profile.nodes]


@pytest.mark.parametrize("name", NAMES)
def test_nodes_edges_and_bytes_are_those_of_the_real_graph(name: str) -> None:
    profile, loss, model, _, size = read(name)
    seen: dict[Any, None] = {}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [behind for behind, _ in node.next_functions if behind is not None]  # type: ignore[union-attr]
    edges = sorted((n.name(), m.name()) for n in seen for m, _ in n.next_functions if m is not None)
    inner = [n.name() for n in seen if not hasattr(n, "variable")]
    leaves = {id(n.variable) for n in seen if hasattr(n, "variable")}
    trained = {name for name, p in model.named_parameters() if id(p) in leaves}

    assert sorted(node.op for node in profile.nodes if not node.leaf) == sorted(inner)
    assert {node.leaf for node in profile.nodes if node.leaf} == trained
    tails = {"AccumulateGrad": "torch::autograd::AccumulateGrad"}
    ours = [(n.op, profile.nodes[i].op) for n in profile.nodes for i in n.inputs]
    assert sorted((a, tails.get(b, b)) for a, b in ours) == edges
    saved = {each.storage: each for node in profile.nodes for each in node.saved if each.role == "activations"}
    numbers = sum(each.bytes for each in saved.values() if each.bytes == 8)  # `x * 2.0`: torch shows no hook the 2.0
    assert profile.saved_bytes - numbers == size > 0
    loss.backward()  # what was read is still whole
    assert all(p.grad is not None for p in model.parameters() if id(p) in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_step_has_the_same_graph(name: str) -> None:
    real, *_ = read(name)

    def make(place: torch.device) -> TracedObjects:
        model, data, loss = case(name)
        wrapped = (lambda model, batch: loss(model, batch)) if loss.__name__ == "loss" else loss
        return TracedObjects(model, wrapped, None, fake_batch(data, place))

    fake = profile_graph(make)
    assert names_of(fake) == names_of(real)
    assert [node.inputs for node in fake.nodes] == [node.inputs for node in real.nodes]
    assert [node.module for node in fake.nodes] == [node.module for node in real.nodes]
    assert [module.parameters for module in fake.modules] == [module.parameters for module in real.modules]
    assert fake.modules[0].path == "" and sum(module.forward_flops for module in fake.modules) > 0
    if name == "lstm":  # the workspace of oneDNN has no size in a fake tensor: it is counted beside them
        assert fake.saved_bytes < real.saved_bytes
        assert fake.saved_bytes + fake.elsewhere_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    else:
        assert fake.fresh_bytes == real.fresh_bytes
        assert fake.elsewhere_bytes < 100  # the loss itself, and the like


@pytest.mark.parametrize("name", NAMES)
def test_folded_rows_add_up_to_the_unfolded_model(name: str) -> None:
    profile, _, model, *_ = read(name)
    tree = fold(profile, depth=99)
    root = tree.rows[0]
    assert root.parameters == sum(p.numel() for p in model.parameters())
    assert root.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for depth in range(1, tree.depth + 1):
        cut = fold(profile, depth=depth)
        assert sum(run.saved_bytes for run in cut.runs) == root.saved_bytes == profile.saved_bytes
        assert sum(run.nodes for run in cut.runs) == sum(not node.leaf for node in profile.nodes)
        assert cut.rows[0] == root
    for index, row in enumerate(tree.rows):
        later = tree.rows[index + 1 :]
        inside = [
            r for r in later if r.depth == row.depth + 1 and r.path.startswith(f"{row.path}." if row.path else "")
        ]
        assert sum(r.parameters for r in inside) <= row.parameters
        assert sum(r.saved_bytes for r in inside) <= row.saved_bytes


def test_equal_blocks_are_one_row_also_where_they_share_a_module() -> None:
    rows = {row.path: row for row in fold(read("gpt-modern")[0], depth=99).rows}
    assert rows["blocks.0-3"].count == 4
    assert "blocks.0-3.attention.rope" in rows


@pytest.mark.slow
def test_a_first_block_that_keeps_less_stands_alone() -> None:
    rows = {row.path: row for row in fold(read("lora")[0], depth=99).rows}
    names = sorted(path for path, row in rows.items() if row.kind == "Block")
    assert len(names) == 2 and names[0].endswith(".0") and names[1].endswith(".1-3")
    assert rows[names[0]].saved_bytes < rows[names[1]].saved_bytes // 3


def test_tied_weights_count_once_and_are_named() -> None:
    model = small_gpt()
    profiler = GraphProfiler(model)
    _, data, _ = of_text(model)
    profile = profiler.read(over_ids(model(data[0]), data[1]), data)
    profiler.close()
    head = next(module for module in profile.modules if module.path == "head")
    assert head.parameters == 0 and head.tied == ("tokens.weight",)


def test_shared_storages_count_once() -> None:
    """x is saved by both products; its square root keeps its own result, which the view of it shares."""
    x = torch.rand(100, requires_grad=True)
    model = nn.Identity()
    profiler = GraphProfiler(model)
    y = model(x).exp()  # keeps y
    loss = (y * y.view(10, 10).view(100)).sum()  # keeps y twice
    profile = profiler.read(loss, ())
    assert sum(len(node.saved) for node in profile.nodes) == 3
    assert profile.saved_bytes == 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt-modern", "resnet", "hf-bert"])
def test_a_checkpoint_frees_what_is_promised(name: str) -> None:
    """Against the kept bytes of a traced step in which that block is computed again."""

    def kept(checkpointing: Checkpointing | None) -> int:
        def make(place: torch.device) -> TracedObjects:
            model, data, loss = case(name)
            wrapped = (lambda model, batch: loss(model, batch)) if loss.__name__ == "loss" else loss
            return TracedObjects(model, wrapped, None, fake_batch(data, place))

        return sum(trace_step(make, device="cpu", checkpointing=checkpointing).kept.values())

    profile, _, model, *_ = read(name)
    blocks = find_blocks(model)
    paths = {id(module): path for path, module in model.named_modules()}
    whole = kept(None)
    buffers = 4096 if name == "resnet" else 64  # BatchNorm's, of which the second forward pass starts from a copy
    for index in (1, len(blocks) - 1):
        keep: list[tuple[str, ...] | None] = [None] * len(blocks)
        keep[index] = ()
        module = next(module for module in profile.modules if module.path == paths[id(blocks[index])])
        freed = whole - kept(Checkpointing(tuple(keep)))
        assert freed == pytest.approx(profile.freed_bytes(module), abs=buffers)
        assert profile.freed_bytes(module) > 1000


def test_what_is_checkpointed_already_is_not_counted_and_not_computed_again() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.run, x.exp(), use_reentrant=False)
            return out

        def run(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)

    model, x = Model(), torch.rand(4, 8, requires_grad=True)
    profiler = GraphProfiler(model)
    profile = profiler.read(model(x).sum(), (x,))
    profiler.close()
    assert model.calls == 1
    assert sum(node.hidden for node in profile.nodes) >= 2
    assert profile.saved_bytes == 4 * 8 * 4  # the result of exp, no more


def test_under_fake_tensors_a_checkpointed_gpt_is_read_the_same() -> None:
    with fake_tensors():
        model, data, _ = of_text(small_gpt())
        apply_checkpointing(model, Checkpointing.every(4))
        profiler = GraphProfiler(model)
        profile = profiler.read(over_ids(model(data[0]), data[1]), data)
        profiler.close()
    plain, *_ = read("gpt")
    assert sum(node.hidden for node in profile.nodes) > 0
    assert profile.saved_bytes < plain.saved_bytes / 2


@pytest.mark.slow
def test_a_gpt_of_twelve_layers_is_readable_on_one_screen() -> None:
    loaded = load(RECIPES / "gpt2-124m.yaml", overrides=["batch.micro=1", "data.train.args.block_size=64"])
    drawn = draw_graph(loaded)
    lines = drawn.lines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 120
    assert any("0-11 x 12" in line for line in lines)
    assert drawn.headline.parameters == 124_439_808
    assert any("activation_checkpointing: block" in line for line in lines)


@pytest.mark.slow
def test_more_than_fits_into_memory_can_be_drawn() -> None:
    """50 G parameters: 200 GB, which nothing here holds."""
    sets = ["layers: 4", "heads: 64", "d_model: 32768", "vocab_size: 50257", "block_size: 64"]
    loaded = load(
        RECIPES / "gpt-tiny.yaml",
        overrides=[f"model.args={{{', '.join(sets)}}}", "batch.size=1", "batch.micro=1"],
    )
    drawn = draw_graph(loaded)
    assert drawn.headline.parameters > 50e9
    assert any("0-3 x 4" in line for line in drawn.lines())


@pytest.mark.slow
def test_the_verb_prints_draws_and_answers_in_json(tmp_path: Path) -> None:
    file = tmp_path / "graph.svg"
    args = ["graph", str(RECIPES / "gpt-tiny.yaml"), "--depth", "2", "--svg", str(file), "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["folded"]["depth"] == 2
    assert answer["saved_bytes"] == answer["folded"]["rows"][0]["saved_bytes"]
    assert len(answer["nodes"]) == answer["headline"]["nodes"] and len(answer["edges"]) == answer["headline"]["edges"]
    assert file.read_text().startswith("<svg")


@pytest.mark.slow
def test_the_picture_of_a_run_lies_in_its_folder(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    run.log.touch()
    shutil.copy(RECIPES / "gpt-tiny.yaml", run.recipe)
    result = CliRunner().invoke(app, ["graph", str(run.path), "--depth", "1"])
    assert result.exit_code == 0 and (run.path / "graph.svg").read_text().startswith("<svg"), result.output
    run.recipe.unlink()
    for folder, reason in ((tmp_path, "holds no run"), (run.path, "no recipe.yaml")):
        for verb in ("graph", "plan"):
            result = CliRunner().invoke(app, [verb, str(folder)])
            assert result.exit_code == 2 and reason in " ".join(result.output.split())
