"""What the watch does to a loop of one's own: nothing, unless an update is not finite or a spike is to be left out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.spikes import Spike
from trainwright.engine.spikes import OnSpike
from trainwright.errors import UsageError
from trainwright.recorder.veto import ALWAYS
from trainwright.runs.reader import read
from trainwright.runs.records import Skipped
from trainwright.watching.session import NonFiniteStep
from trainwright.watching.watch import Watch


def train(steps: int, out: Path, *, bad: dict[int, float], **how: object) -> tuple[nn.Module, list[Tensor], Watch]:
    """``bad``: factor on the loss, by step. Returns the model, the first weight after each step, the watch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    weights = []
    with tw.watch(model, optimizer, out=out, quiet=True, examine="listen", **how) as watch:
        for step in range(1, steps + 1):
            x, y = torch.randn(8, 4), torch.randint(3, (8,))
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * bad.get(step, 1.0)).backward()
            optimizer.step()
            weights.append(model.weight.detach().clone())
    return model, weights, watch


def test_a_nonfinite_update_does_not_reach_the_weights(tmp_path: Path) -> None:
    _, weights, watch = train(6, tmp_path / "run", bad={4: math.nan})
    assert torch.equal(weights[3], weights[2]) and not torch.equal(weights[4], weights[3])
    skipped = [r for r in read(watch.folder.log).records if isinstance(r, Skipped)]
    assert [(r.step, r.reason) for r in skipped] == [(4, "gradients")]


def test_a_nonfinite_sparse_gradient_does_not_reach_the_weights() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with tw.watch(table, optimizer, out=None, quiet=True, examine="listen"):
        for factor in (1.0, math.nan):
            before = table.weight.detach().clone()
            optimizer.zero_grad()
            (table(torch.tensor([1, 1, 4])).square().sum() * factor).backward()
            optimizer.step()
            assert torch.equal(table.weight, before) == math.isnan(factor)


@pytest.mark.parametrize("how", ["written after clipping", "clipping of others"])
def test_what_clipping_has_seen_is_not_what_is_trusted(tmp_path: Path, how: str) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with tw.watch(model, optimizer, out=tmp_path / "run", quiet=True, examine="listen"):
        other(torch.randn(8, 4)).sum().backward()
        model(torch.randn(8, 4)).sum().backward()
        if how == "clipping of others":
            model.weight.grad[0, 0] = math.nan
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.weight.grad[0, 0] = math.nan
        optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("gradient", "dtype", "is_applied"),
    [
        (1e30, torch.float32, True),
        (math.inf, torch.float32, False),
        (math.nan, torch.float32, False),
        (6e4, torch.float16, True),
    ],
)
def test_gradients_are_finite_though_their_squares_overflow(
    gradient: float, dtype: torch.dtype, is_applied: bool
) -> None:
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-32 if dtype == torch.float32 else 1e-5)
    before = model.weight.detach().clone()
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
        recorded = watch.session.ring.steps[-1].grad_norm
    assert watch.session.num_vetoed == (not is_applied)
    assert torch.equal(model.weight, before) != is_applied
    assert math.isfinite(float(recorded)) == is_applied


@pytest.mark.slow
@pytest.mark.parametrize("how", ["written after clipping", "clipping of a part", "by another norm"])
def test_what_a_clip_has_left_is_taken_for_the_norm_only_where_it_was_found_so(how: str) -> None:
    torch.manual_seed(0)
    model, norms = nn.Linear(4, 3), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    clipped = [model.bias] if how == "clipping of a part" else list(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(1, ALWAYS + 10):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
            nn.utils.clip_grad_norm_(clipped, 0.05, norm_type=math.inf if how == "by another norm" else 2.0)
            if step == ALWAYS + 9 and how == "written after clipping":
                model.weight.grad[0, 0] = math.nan
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
            optimizer.step()
    assert torch.equal(model.weight, before) == (how == "written after clipping")
    recorded = [step.grad_norm for step in watch.session.ring.steps]
    assert all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(recorded[:-1], norms[-len(recorded) : -1]))


def test_stop_ends_the_loop_and_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteStep, match="step 4"):
        train(6, tmp_path / "run", bad={4: math.inf}, on_nonfinite="stop")


def test_observe_lets_it_through(tmp_path: Path) -> None:
    _, weights, _ = train(4, tmp_path / "run", bad={4: math.nan}, on_nonfinite="observe")
    assert weights[3].isnan().all()


def spikes_found(watch: Watch) -> list[tuple[str, str, int]]:
    return [(found.code, found.severity, found.step) for found in watch.findings() if found.code == "gradient.spike"]


def test_a_spike_is_only_warned_of(tmp_path: Path) -> None:
    _, weights, watch = train(24, tmp_path / "run", bad={20: 5000.0})
    assert not torch.equal(weights[19], weights[18])
    assert spikes_found(watch) == [("gradient.spike", "warning", 20)]


@pytest.mark.slow
def test_a_run_without_a_spike_is_not_warned_of(tmp_path: Path) -> None:
    _, _, watch = train(40, tmp_path / "run", bad={20: 4.0})
    assert spikes_found(watch) == []


def test_a_policy_of_the_users_own_decides(tmp_path: Path) -> None:
    seen: list[Spike] = []

    def policy(spike: Spike) -> str:
        seen.append(spike)
        return "skip" if spike.step == 20 else "warn"

    _, weights, watch = train(24, tmp_path / "run", bad={20: 100.0, 22: 100.0}, on_spike=policy)
    assert [spike.step for spike in seen] == [20, 22] and seen[0].grad_norm > 8 * seen[0].usual > 0
    assert torch.equal(weights[19], weights[18]) and not torch.equal(weights[21], weights[20])
    assert spikes_found(watch) == [("gradient.spike", "warning", 20)]


def test_a_spike_is_skipped(tmp_path: Path) -> None:
    _, weights, _ = train(24, tmp_path / "run", bad={20: 100.0}, on_spike="skip")
    assert torch.equal(weights[19], weights[18]) and not torch.equal(weights[20], weights[19])


def test_a_spike_rolls_back_to_a_snapshot(tmp_path: Path) -> None:
    _, weights, watch = train(24, tmp_path / "run", bad={20: 100.0}, on_spike="rollback")
    skipped = [r.step for r in read(watch.folder.log).records if isinstance(r, Skipped)]
    assert skipped[-1] == 20 and skipped == list(range(skipped[0], 21)) and len(skipped) > 1
    assert torch.equal(weights[19], weights[skipped[0] - 2])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["warn", "skip"])
@pytest.mark.parametrize("by", ["another optimizer", "more is trained"])
def test_a_stage_of_larger_gradients_is_no_spike(how: OnSpike, by: str) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(body, head)
    first = torch.optim.SGD(model.parameters() if by == "more is trained" else head.parameters(), 0.01)
    second = first if by == "more is trained" else torch.optim.SGD(body.parameters(), 0.01)
    body.requires_grad_(by == "another optimizer")
    with tw.watch(
        model, [first] if second is first else [first, second], out=None, quiet=True, examine="listen", on_spike=how
    ) as watch:
        for step in range(1, 41):
            if step == 20:
                body.requires_grad_(True)
            model.zero_grad()
            (F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))) * (100 if step >= 20 else 1)).backward()
            before = head.weight.detach().clone(), body.weight.detach().clone()
            (first if step < 20 else second).step()
            assert not torch.equal(head.weight, before[0]) or not torch.equal(body.weight, before[1])
    assert spikes_found(watch) == []


@pytest.mark.slow
def test_a_rollback_does_not_count_an_update_twice_that_was_left_out_before(tmp_path: Path) -> None:
    _, _, watch = train(40, tmp_path / "run", bad={34: math.nan, 36: 100.0}, on_spike="rollback")
    skipped = [r.step for r in read(watch.folder.log).records if isinstance(r, Skipped)]
    assert skipped[0] == 34 and skipped[-1] == 36 and sorted(set(skipped)) == sorted(skipped) and len(skipped) > 2


@pytest.mark.slow
def test_what_was_left_out_is_left_out_again(tmp_path: Path) -> None:
    """A loop that is begun again from its start, on the same order of samples, with the skip list of the first."""
    x, y = torch.randn(256, 4), torch.randint(3, (256,))
    x[160:168] *= 1e4

    def run(out: str, **how: object) -> tuple[list[Tensor], Watch]:
        torch.manual_seed(0)
        model, weights = nn.Linear(4, 3), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        with tw.watch(
            model, optimizer, loader=loader, out=tmp_path / out, quiet=True, examine="listen", **how
        ) as watch:
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                weights.append(model.weight.detach().clone())
        return weights, watch

    first, _ = run("first", on_spike="skip")
    again, watch = run("again", skip=tmp_path / "first")
    assert torch.equal(first[20], first[19]) and not torch.equal(first[19], first[18])
    assert all(map(torch.equal, first, again))
    skipped = [r for r in read(watch.folder.log).records if isinstance(r, Skipped)]
    assert [(r.step, r.reason) for r in skipped] == [(21, "skip list")]


def test_a_wrong_word_is_named() -> None:
    with pytest.raises(UsageError, match="on_spike"):
        tw.watch(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), out=None, on_spike="ignore")
