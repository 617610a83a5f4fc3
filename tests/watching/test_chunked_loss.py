"""A loss in chunks is one operation to the doctor: the same bits watched or not, and each step can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.commands.replay import rerun
from trainwright.engine import chunked
from trainwright.engine.loss import Loss
from trainwright.engine.losses import hf_causal_lm, language_model
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.replay.bundle import keep
from trainwright.replay.session import ReplaySession

STEPS, KEEP, VOCABULARY = 6, 3, 40


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 7)


def ours() -> tuple[nn.Module, Callable[..., Loss]]:
    return gpt(vocab_size=VOCABULARY, block_size=8, layers=1, heads=2, d_model=16, dropout=0.1), language_model


def of_transformers() -> tuple[nn.Module, Callable[..., Loss]]:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
    return hf_model(architecture="GPT2LMHeadModel", **sizes), hf_causal_lm


def train(make: Callable[[], Any], precision: str, *, watched: bool) -> tuple[list[dict[str, Tensor]], list[Any], Any]:
    """What the weights were after each step, the losses, and the watch."""
    torch.manual_seed(5)
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"fp16": torch.float16}.get(precision)
    weights, losses = [], []
    around: Any = tw.watch(model, optimizer, out=None, quiet=True, keep=KEEP) if watched else nullcontext()
    with around as watch:
        for _ in range(STEPS):
            ids = torch.randint(VOCABULARY, (4, 9))
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                made = loss_of(model, (ids[:, :-1], ids[:, 1:]), chunked=True)
                loss = made.total / made.weight
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return weights, losses, watch


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "precision"), [(ours, "fp32"), (ours, "fp16"), (of_transformers, "fp32")])
def test_the_same_bits_watched_and_replayed(make: Callable[[], Any], precision: str) -> None:
    alone, losses_alone, _ = train(make, precision, watched=False)
    live, losses, watch = train(make, precision, watched=True)
    assert torch.equal(torch.stack(losses_alone), torch.stack(losses))
    assert all(map(same, alone, live))
    session = watch.session
    assert session.failures == []
    for step in range(STEPS - KEEP + 1, STEPS + 1):
        played = ReplaySession(session.runner.replayer, session.ring, step).run(upto="step")
        assert played.error is None
        assert float(played.losses[0]) == float(losses[step - 1])
        assert same(played.after, live[step - 1])
    names = [each.name for each in session.ring.steps[-1].program if hasattr(each, "name")]
    assert "chunked_cross_entropy" in names
    assert "nll_loss" not in names


BUILDS = """\
from trainwright.models.gpt import gpt

def made():
    return gpt(vocab_size=40, block_size=8, layers=1, heads=2, d_model=16, dropout=0.1)
"""


@pytest.mark.slow
def test_a_step_that_was_written_to_disk_is_the_same_bits(tmp_path: Path) -> None:
    _, losses, watch = train(ours, "fp32", watched=True)
    player, ring = watch.session.runner.replayer, watch.session.ring
    path = keep(tmp_path / "bundles", player, ring, STEPS, {"loss": float(losses[-1])})
    assert path is not None
    (tmp_path / "mine.py").write_text(BUILDS)
    done = rerun(path, model=f"{tmp_path / 'mine.py'}:made")
    assert done.same_bits, done.lines()
    assert {each.what for each in done.compared} >= {"losses"}
