"""Plans for many ranks: growth from two blocks matches a full trace, and counted traffic matches the exchange."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests import ranks
from tests.plan.traces import GIB
from trainwright.assembly.assemble import Parts
from trainwright.cli import app
from trainwright.data.unwrap import unwrap
from trainwright.engine.losses import language_model
from trainwright.errors import UsageError
from trainwright.models.gpt import gpt
from trainwright.plan.devices import ClusterNode, find_device, known_devices
from trainwright.plan.machine import read_machine
from trainwright.plan.many_ranks import best_of, choice_notes, grow_layout
from trainwright.plan.parallel import Degrees, solve_layout
from trainwright.plan.trace.blueprint import make_blueprint
from trainwright.plan.trace.layouts import LayoutSurvey
from trainwright.plan.trace.local_device import nominal_cpu
from trainwright.plan.trace.many_ranks import options_of, rank_model, survey_ranks
from trainwright.plan.trace.resolve import has_open_settings, is_for, read_resolved, resolve
from trainwright.plan.traffic import StepTraffic
from trainwright.recipe import Loaded, from_mapping, load

RECIPES = Path(__file__).parents[2] / "recipes"
GPT = {"vocab_size": 61, "block_size": 16, "layers": 3, "heads": 3, "d_model": 21}
"""Sizes that two and four ranks do not divide: FSDP pads them."""


def deep(layers: int, *settings: str) -> Loaded:
    ask = [f"model.args.layers={layers}", "batch.size=96", *settings]
    return load(RECIPES / "gpt-tiny.yaml", overrides=ask, environ={})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "block"])
def test_what_is_grown_from_two_blocks_is_what_is_traced(policy: str) -> None:
    device = find_device("h100-80gb", known_devices())
    survey = LayoutSurvey(make_blueprint(deep(4)), device, "bf16")
    model = rank_model(survey, [policy])
    assert model.blocks is not None and model.layers == 4
    found = grow_layout(model.layouts[policy].scaled, model.blocks, model.layers).at(12, 2)
    traced = survey.trace(12, chunked=False, checkpointing=survey.checkpointing(policy), accumulation=2)
    assert found.peak.total == pytest.approx(traced.peak.total, rel=0.01)
    assert found.flops == pytest.approx(traced.flops, rel=0.01)
    assert sum(found.resident.values()) == pytest.approx(sum(traced.resident.values()), rel=1e-3)


COUNT = """
import json, sys
from collections import Counter
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import trainwright as tw
from trainwright.models.gpt import gpt

settings, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
         "all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}
counts, starts = Counter(), []

class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, torch.distributed.tensor.DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = NAMES.get(func._overloadpacket.__name__)
        if name and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
            whole = max(each.nbytes for each in tensors)  # the gathered output, the scattered input
            if whole > 1024:  # not the numbers that ranks agree on
                counts[name] += whole
                counts[name + " calls"] += 1
        return result

def loss(model, batch):
    starts.append(dict(counts))
    logits, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return tw.Loss(nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel())

torch.manual_seed(3)
ids = torch.randint(options["vocab_size"], (64, options["block_size"] + 1), generator=torch.Generator().manual_seed(0))
with Counting():
    given = {"log.doctor": False, "checkpoint.every": None, "batch.size": 16}
    tw.fit(gpt(**options), (ids[:, :-1], ids[:, 1:]), loss, until="2steps", quiet=True, precision="fp32",
           settings={**given, **settings})
each = int(settings.get("batch.accumulation", 1))
first, second = starts[-2 * each], starts[-each]
print(json.dumps({name: second[name] - first.get(name, 0) for name in second}))
"""


EVEN = {**GPT, "vocab_size": 62, "heads": 4, "d_model": 24}
"""Sizes that tensor parallelism can divide."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "accumulation", "policy"),
    [
        (Degrees(replicate=2, shard=2), 2, "none"),
        (Degrees(shard=2, tensor=2), 2, "block"),
        (Degrees(replicate=2, context=2), 2, "block"),
    ],
    ids=str,
)
def test_the_bytes_of_a_plan_are_those_that_ranks_exchange(
    tmp_path: Path, degrees: Degrees, accumulation: int, policy: str
) -> None:
    options = GPT if degrees.tensor == 1 else EVEN
    settings = {f"parallel.{axis}": getattr(degrees, axis) for axis in ("replicate", "shard", "tensor", "context")}
    settings |= {"batch.micro": 16 // degrees.data // accumulation, "batch.accumulation": accumulation}
    settings["model.activation_checkpointing"] = policy
    done = ranks.finish(COUNT, degrees.ranks, json.dumps(settings), json.dumps(options), cwd=tmp_path)
    counted = json.loads(done[0].stdout.splitlines()[-1])
    model = rank_model(survey_of(gpt(**options)), [policy], tensor=degrees.tensor, context=degrees.context)
    activations, micro = model.activations[policy], settings["batch.micro"]
    step = StepTraffic(degrees, 3, model.weights, activations, micro, accumulation)
    planned = Counter[str]()
    for row in step.traffic(ClusterNode(), overlaps=False):
        planned[row.collective] += row.num_bytes
        planned[f"{row.collective} calls"] += row.calls
    assert dict(planned) == {name: count for name, count in counted.items() if count}


def survey_of(model: nn.Module) -> LayoutSurvey:
    """Survey a model whose samples are token ids, in fp32 on a CPU."""
    ids = torch.zeros(64, GPT["block_size"], dtype=torch.int64)
    recipe = from_mapping({"model": "live:model", "data": {"train": "live:train"}, "batch": {"size": 16}})
    parts = Parts(model, unwrap((ids, ids)), {}, language_model)
    return LayoutSurvey(make_blueprint(recipe, parts), nominal_cpu(read_machine()), "fp32")


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    words = ["plan", str(RECIPES / "llama-7b.yaml"), "--ranks", "1024", "--device", "h100-80gb"]
    few_traces = ["loss.chunked=false", "model.args.heads=31", "model.args.d_model=3968", "precision=tf32"]
    # Nothing that 2 divides; without autocast copies and parts of the weights are traced alike.
    settings = (word for each in ("batch.size=2048", *few_traces) for word in ("--set", each))
    done = CliRunner().invoke(app, [*words, *settings, "--json"])
    plan = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, plan["fits"]) == (3, False)  # as written every rank holds the whole model
    assert psutil.Process().memory_info().rss < 8 * GIB
    best = plan["best"]
    assert best["fits"] and best["degrees"]["shard"] > 1
    assert {(row["axis"], row["collective"]) for row in best["traffic"]} >= {("shard", "all-gather")}
    assert 0.2 < best["mfu"] < 0.6
    assert best["step_s"] == pytest.approx(best["busy_s"] + best["exposed_s"] + best["bubble_s"])


@pytest.mark.slow
def test_ranks_without_samples_and_too_many_ranks_are_said() -> None:
    words = ["plan", str(RECIPES / "gpt-tiny.yaml"), "--device", "h100-80gb"]
    words += ["--set", "batch.size=8", "--set", "model.args.layers=1"]
    done = CliRunner().invoke(app, [*words, "--ranks", "64"])
    assert "56 ranks have none" in done.output
    refused = CliRunner().invoke(app, [*words, "--ranks", "3", "--set", "parallel.replicate=2"])
    assert refused.exit_code == 2 and "the number of ranks, 3" in refused.stderr


@pytest.mark.slow
def test_auto_divides_weights_where_copies_do_not_fit_and_is_kept() -> None:
    parallel = ("parallel.replicate=auto", "parallel.shard=auto")
    open_too = ("batch.micro=auto", "model.activation_checkpointing=auto")
    loaded = deep(4, *parallel, *open_too, "loss.chunked=false", "precision=fp32")
    roomy, tight = (find_device("a100-40gb", known_devices()).with_memory(size << 20) for size in (2048, 639))
    whole, parts = resolve(loaded, roomy, ranks=4), resolve(loaded, tight, ranks=4)
    assert whole.degrees == {"replicate": 4, "shard": 1, "tensor": 1, "pipeline": 1, "context": 1}
    assert parts.degrees is not None and parts.degrees["replicate"] < 4
    assert vars(solve_layout(parts.loaded.recipe, 4)) == {**parts.degrees, "expert": 1}
    assert isinstance(parts.loaded.recipe.batch.micro, int) and not has_open_settings(parts.loaded.recipe, 4)
    stored = json.loads(json.dumps(parts.to_json()))
    assert is_for(stored, loaded.recipe, 4) and not is_for(stored, loaded.recipe, 8)
    assert read_resolved(loaded, stored).loaded.recipe == parts.loaded.recipe
    assert {note.topic for note in parts.notes} == {"parallel", "micro-batch", "checkpointing"}


def test_where_no_layout_fits_it_is_said() -> None:
    """Half of a MiB for each of two ranks is in none."""
    data = unwrap((torch.zeros(8, 512), torch.zeros(8, dtype=torch.int64)))
    loaded = from_mapping({"model": "live:model", "data": {"train": "live:train"}, "parallel": "auto"})
    device = find_device("a100-40gb", known_devices()).with_memory(633 << 20)
    with pytest.raises(UsageError, match="no layout of 2 ranks fits"):
        resolve(loaded, device, ranks=2, parts=Parts(nn.Linear(512, 512), data, {}, nn.CrossEntropyLoss()))


def test_a_decision_of_an_older_version_divides_no_sequences() -> None:
    layout = {"replicate": 2, "shard": 2, "tensor": 1, "pipeline": 1}
    older = {"micro": 4, "recompute": None, "offload": False, "layout": layout, "policy": "none"}
    ask = read_resolved(deep(2, "parallel=auto"), older).loaded.recipe.parallel
    assert (ask.shard, ask.context, ask.open_axes) == (2, 1, ())


def test_auto_in_a_recipe() -> None:
    ask = deep(2, "parallel=auto").recipe
    assert ask.parallel.open_axes == ("shard", "tensor", "pipeline", "context") and ask.parallel.replicate == "auto"
    assert solve_layout(deep(2, "parallel.tensor=auto", "parallel.replicate=2").recipe, 8) == Degrees(2, tensor=4)
    assert not has_open_settings(ask) and has_open_settings(ask, 2)  # one process has nothing to decide
    assert solve_layout(deep(2, "parallel.shard=auto", "parallel.replicate=2").recipe, 8) == Degrees(2, 4)


def of_sequences(positions: int, **sections: Any) -> tuple[Loaded, Parts]:
    """Return a model with a number of heads that two ranks cannot divide, and with tied embeddings."""
    model = gpt(vocab_size=64, block_size=positions, layers=6, heads=3, d_model=384)
    ids = torch.zeros(8, positions, dtype=torch.int64)
    ask = {"parallel": "auto", "precision": "fp32", "batch": {"size": 2, "micro": "auto"}, **sections}
    loaded = from_mapping({"model": "live:model", "data": {"train": "live:train"}, **ask})
    return loaded, Parts(model, unwrap((ids, ids)), {}, language_model)


@pytest.mark.slow
def test_auto_divides_long_sequences_where_only_that_fits_or_is_best() -> None:
    device = find_device("h100-80gb", known_devices())
    loaded, parts = of_sequences(4096)
    many = survey_ranks(loaded, device, parts=parts, decides=True)
    roomy = best_of(options_of(many, loaded.recipe, 2))
    assert roomy.fits and roomy.degrees.context == 1
    whole = {"model": {"use": "live:model", "activation_checkpointing": "none"}}
    recipe, tight = of_sequences(4096, **whole)[0].recipe, replace(many, device=device.with_memory(1280 << 20))
    options = options_of(tight, recipe, 2)
    assert {option.degrees for option in options if option.fits} == {Degrees(context=2)}
    notes = choice_notes(best_of(options), options, tight.device)
    assert notes[0].choice == "{context: 2}" and "but does not fit" in notes[0].why
    one = replace(many, size=1)  # a sample that two ranks can share in no other way
    assert best_of(options_of(one, recipe, 2)).degrees == Degrees(context=2)
    assert {row.what for row in one.place(Degrees(context=2), 3, "none", 1).traffic} == {"gradients", "keys, values"}


@pytest.mark.slow
def test_auto_leaves_short_sequences_whole() -> None:
    loaded, parts = of_sequences(256)
    many = survey_ranks(loaded, find_device("h100-80gb", known_devices()), parts=parts, decides=True)
    assert not any(context > 1 for _, context in many.models)
    assert {option.degrees.context for option in options_of(many, loaded.recipe, 2)} == {1}


AUTO = """
import json, sys
import torch
import trainwright as tw
from trainwright.engine.losses import language_model
from trainwright.models.gpt import gpt

torch.manual_seed(3)
model = gpt(vocab_size=32, block_size=16, layers=4, heads=2, d_model=16, tied=False)
ids = torch.randint(32, (24, 17), generator=torch.Generator().manual_seed(0))
until, resume, policy = json.loads(sys.argv[1])
result = tw.fit(model, (ids[:, :-1].clone(), ids[:, 1:].clone()), language_model, until=until, lr=1e-2, quiet=True,
                resume=resume, settings={"batch.size": 1, "parallel": "auto", "precision": "fp32", "log.doctor": False,
                                         "schedule.use": "constant", "model.activation_checkpointing": policy})
print(result.loss)
"""


@pytest.mark.process
@pytest.mark.slow
def test_auto_divides_the_model_where_there_are_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """A batch of one sample leaves nothing to copies; a resume keeps what was chosen, and losses are those of one."""

    def loss(count: int, folder: str, until: str, resume: str | None = None) -> float:
        (tmp_path / folder).mkdir(exist_ok=True)
        policy = "auto" if count > 1 else "none"  # which no loss depends on
        done = ranks.finish(AUTO, count, json.dumps([until, resume, policy]), cwd=tmp_path / folder)
        return float(done[0].stdout)

    loss(2, "auto", "2steps")
    degrees = json.loads((tmp_path / "auto/runs/run/plan.json").read_text())["degrees"]
    assert degrees["tensor"] * degrees["pipeline"] == 2
    assert loss(2, "auto", "3steps", "runs/run") == pytest.approx(loss(1, "alone", "3steps"), abs=1e-6)
    assert json.loads((tmp_path / "auto/runs/run/plan.json").read_text())["degrees"] == degrees
