"""Optimizers in the host's memory: on a CPU, where host and device are one, the same bits as without."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.assembly.optim_net import DECAY, LR, STEPS, Net, net
from trainwright.checkpoint.average import Ema
from trainwright.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import make_step
from trainwright.errors import UsageError
from trainwright.models.gpt import gpt
from trainwright.models.lora import add_lora
from trainwright.optim import offload as room
from trainwright.optim.choose import make_optimizer
from trainwright.optim.clip import make_clip
from trainwright.optim.groups import GroupRule
from trainwright.optim.offload import MASTER, offloaded

RULES = [GroupRule("head.*", lr_scale=0.3), GroupRule("conv.weight", weight_decay=0.5)]
BOX: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("sgd", {"momentum": 0.9}),
    "sgd-dampened": ("sgd", {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {"amsgrad": True}),
    "adamw": ("adamw", {"betas": [0.9, 0.95]}),
    "adamw-foreach": ("adamw", {"foreach": True}),
    "adamw-loop": ("adamw", {"foreach": False, "fused": False}),
    "lamb": ("lamb", {}),
    "lars": ("lars", {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}


def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
    logits = model(ids_BT)
    logits = logits[0] if isinstance(logits, tuple) else logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def batch(step: int) -> StepBatch:
    ids = torch.randint(0, 7, (6, 9), generator=torch.Generator().manual_seed(step))
    return StepBatch(tuple(MicroBatch(ids[i : i + 3], np.arange(i, i + 3)) for i in (0, 3)))


def state_of(name: str, *, offload: bool, model: nn.Module | None = None, ema: bool = True) -> TrainState:
    model = net(torch.float32) if model is None else model
    use, args = BOX[name]
    decay, rules = (0.0, RULES[:1]) if name == "rprop" else (DECAY, RULES)  # Rprop has no weight decay
    rules = rules if isinstance(model, Net) else []
    optimizer = make_optimizer(use, model, lr=LR, weight_decay=decay, rules=rules, args=args, offload=offload)
    return TrainState(model, optimizer, ema=Ema(model, 0.9) if ema else TrainState(model, optimizer).ema)


def trained(state: TrainState, steps: range = range(STEPS), objective: Callable[..., Tensor] = loss) -> TrainState:
    """With a schedule and with clipping that bites."""
    advance = make_step(
        objective, schedule=lambda step, _: 0.5 + 0.5 * math.cos(step / STEPS), clip=make_clip("norm", 0.5)
    )
    for step in steps:
        advance(state, batch(step))
    return state


def everything(state: TrainState) -> dict[str, Tensor]:
    """Weights, averages and moments by name."""
    found = {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    found |= {f"ema {name}": each for name, each in getattr(state.ema, "shadow", {}).items()}
    for name, parameter in state.model.named_parameters():
        for key, each in state.optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = each if isinstance(each, Tensor) else torch.tensor(each)
    return found


def assert_same(one: TrainState, two: TrainState) -> None:
    left, right = everything(one), everything(two)
    assert left.keys() == right.keys()
    assert [name for name in left if not same_bits(left[name], right[name])] == []
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in s.optimizer.param_groups] for s in (one, two)]
    assert groups[0] == groups[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [*((name, True, False) for name in BOX), ("adamw", True, True), ("adamw", False, True), ("sgd", True, True)],
)
def test_a_checkpoint_is_resumed_with_and_without(name: str, first: bool, then: bool, tmp_path: Path) -> None:
    straight = trained(state_of(name, offload=False))
    begun = trained(state_of(name, offload=first), range(9))
    if first:
        assert type(begun.optimizer).__mro__[1] is room.Offloaded
        assert type(begun.optimizer).__name__ == type(straight.optimizer).__name__
        assert len(begun.optimizer.param_groups) > (1 if name == "rprop" else 2)
    path, _ = save_checkpoint(begun, tmp_path)
    again = state_of(name, offload=then, model=net(torch.float32, seed=5))
    load_checkpoint(again, path)
    assert_same(straight, trained(again, range(9, STEPS)))


def test_a_loaded_master_replaces_one_that_rounds_to_the_same_weight() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = offloaded(torch.optim.SGD)([weight], lr=1e-4)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(weight, torch.ones_like(weight)), "two of these steps do not change it"
    torch.testing.assert_close(optimizer.state[weight][MASTER], torch.full((3,), 1 - 2e-4))


def test_groups_of_a_loaded_dict_replace_those_that_were_there() -> None:
    groups = []
    for factory in (torch.optim.SGD, offloaded(torch.optim.SGD)):
        optimizer = factory([nn.Parameter(torch.ones(3))], lr=0.1)
        saved = copy.deepcopy(optimizer.state_dict())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # notes the first rate in the groups
        assert "initial_lr" in optimizer.param_groups[0]
        optimizer.load_state_dict(saved)
        groups.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    assert groups[0] == groups[1] and groups[0]["lr"] == 0.1


def written(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def written_past_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def loaded(model: nn.Module) -> None:
    model.load_state_dict(net(torch.float32, seed=9).state_dict())


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("change", [written, written_past_autograd, loaded, replaced])
def test_weights_that_are_changed_outside_reach_the_host(change: Callable[[nn.Module], None]) -> None:
    states = []
    for offload in (False, True):
        state = trained(state_of("adamw", offload=offload), range(5))
        change(state.model)
        states.append(trained(state, range(5, 10)))
    assert_same(*states)


def test_what_is_not_changed_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    fetch = room._Host.fetch_weight
    monkeypatch.setattr(room._Host, "fetch_weight", lambda host, p: (copied.append(p), fetch(host, p)))  # type: ignore[func-returns-value]
    state = trained(state_of("adamw", offload=True), range(3))
    assert copied == []
    with torch.no_grad():
        state.model.head.bias.add_(1)  # type: ignore[union-attr, operator]
    trained(state, range(3, 4))
    assert [each is state.model.head.bias for each in copied] == [True]  # type: ignore[union-attr]


def poisoned(model: nn.Module, ids_BT: Tensor) -> Tensor:
    return loss(model, ids_BT) * math.nan


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_a_step_that_is_skipped_changes_nothing(name: str, at: int) -> None:
    plain, moved = (trained(state_of(name, offload=each, ema=False), range(at)) for each in (False, True))
    before = {key: each.clone() for key, each in everything(moved).items()}
    trained(moved, range(at, at + 1), poisoned)
    assert moved.ledger.total == 1
    after = everything(moved)
    assert [key for key in before if not same_bits(before[key], after[key])] == []
    trained(plain, range(at, at + 1), poisoned)
    assert_same(trained(plain, range(at + 1, at + 4)), trained(moved, range(at + 1, at + 4)))


def test_loss_scaling_and_its_overflow() -> None:
    states = []
    for offload in (False, True):
        state = state_of("adamw", offload=offload)
        state.scaler = LossScaler(initial=2.0**127)
        states.append(trained(state, objective=lambda model, ids: 1000 * loss(model, ids)))
    assert states[0].ledger.total == states[1].ledger.total > 0
    assert_same(*states)


def test_tied_weights_and_adapters() -> None:
    def tiny() -> nn.Module:
        torch.manual_seed(3)
        return gpt(vocab_size=7, layers=1, heads=2, d_model=8, block_size=9, tied=True)

    assert_same(*(trained(state_of("adamw", offload=each, model=tiny()), range(6)) for each in (False, True)))
    pytest.importorskip("peft")
    states = [trained(state_of("adamw", offload=each, model=adapted(tiny())), range(6)) for each in (False, True)]
    assert_same(*states)
    optimizer: Any = states[1].optimizer
    assert len(optimizer._hosts) == sum(p.requires_grad for p in states[1].model.parameters())


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(4)
    return add_lora(model, rank=2, alpha=4.0, dropout=0.0, targets=())


def narrow(seed: int = 0) -> Net:
    return net(torch.float32, seed).to(torch.bfloat16)


@pytest.mark.slow
def test_sixteen_bit_weights_are_updated_in_float32(tmp_path: Path) -> None:
    straight = trained(state_of("adamw", offload=True, model=narrow(), ema=False))
    for parameter in straight.model.parameters():
        own = straight.optimizer.state[parameter]
        assert own[MASTER].dtype == own["exp_avg"].dtype == torch.float32
        assert torch.equal(own[MASTER].bfloat16(), parameter)
    begun = trained(state_of("adamw", offload=True, model=narrow(), ema=False), range(7))
    path, _ = save_checkpoint(begun, tmp_path)
    again = state_of("adamw", offload=True, model=narrow(5), ema=False)
    load_checkpoint(again, path)
    assert_same(straight, trained(again, range(7, STEPS)))


def test_steps_too_small_for_sixteen_bits_add_up() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = offloaded(torch.optim.SGD)([weight], lr=1e-3)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 0.99))
    with torch.no_grad():
        weight[0] = 5.0
    optimizer.step()
    master = optimizer.state[weight][MASTER]
    assert master.tolist() == pytest.approx([4.999, 0.989, 0.989], abs=1e-5)


def test_moments_of_a_plain_run_in_sixteen_bits_are_taken_over() -> None:
    plain, moved = (make_optimizer("adamw", narrow(), lr=LR, offload=offload) for offload in (False, True))
    for optimizer in (plain, moved):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.step() if optimizer is plain else optimizer.load_state_dict(plain.state_dict())
    moved.step()
    assert {float(own["step"]) for own in moved.state.values()} == {3.0}


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("adafactor", {}, "next to nothing"),
        ("muon", {}, "matrix products"),
        ("sgd", {}, "keeps nothing"),
        ("lars", {"momentum": 0}, "keeps nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        make_optimizer(name, net(), lr=LR, args=args, offload=True)
    assert "adamw" in refused.value.remedy


def test_what_needs_the_loss_within_a_step_is_refused_as_ever() -> None:
    with pytest.raises(UsageError, match="closure"):
        make_optimizer(torch.optim.LBFGS, nn.Linear(2, 1), lr=LR, offload=True)


def test_names_and_other_groups_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="takes no names"):
        offloaded(torch.optim.SGD)(model.named_parameters(), lr=LR)
    with pytest.raises(UsageError, match="other groups"):
        offloaded(lambda groups, lr: torch.optim.SGD(groups[0]["params"][:1], lr=lr))(model.parameters(), lr=LR)


def test_torchs_own_state_dict_goes_both_ways() -> None:
    states = [trained(state_of("adamw", offload=each, ema=False), range(4)) for each in (False, True)]
    plain, moved = (state.optimizer for state in states)
    kept = moved.state_dict()
    moved.load_state_dict(plain.state_dict())
    plain.load_state_dict(kept)
    assert_same(*(trained(state, range(4, 8)) for state in states))


def test_a_copy_goes_on_by_itself() -> None:
    state = trained(state_of("adamw", offload=True, ema=False), range(4))
    model, optimizer = copy.deepcopy((state.model, state.optimizer))
    twin = TrainState(model, optimizer, step=state.step)
    assert not set(model.parameters()) & set(state.model.parameters())
    assert_same(trained(state, range(4, 8)), trained(twin, range(4, 8)))


def test_hooks_hear_of_one_optimizer() -> None:
    heard: list[Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *rest: heard.append(optimizer))
    try:
        state = trained(state_of("adamw", offload=True), range(2))
    finally:
        handle.remove()
    assert [each is state.optimizer for each in heard] == [True, True]


def test_groups_that_are_added_and_torchs_schedules() -> None:
    finals = []
    for make in (torch.optim.AdamW, offloaded(torch.optim.AdamW)):
        model = net(torch.float32)
        optimizer = make(model.up.parameters(), lr=LR)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": LR / 2, "weight_decay": 0.3})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(6):
            model.zero_grad()
            loss(model, batch(step).micro[0].data).backward()
            assert optimizer.step(lambda: 3.0) == 3.0
            schedule.step()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*finals, strict=True))


def test_weights_lie_on_the_host_as_they_do_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PIECE_BYTES", 128)  # each in a piece of its own, or two in one
    finals = []
    for make in (torch.optim.AdamW, offloaded(torch.optim.AdamW)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_parameter("none", nn.Parameter(torch.empty(0)))
        optimizer = make(model.parameters(), lr=LR)
        for step in range(4):
            model.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        finals.append([p.detach().clone() for p in model.parameters()])
    hosts = [host.weight for host in optimizer._hosts.values()]  # type: ignore[attr-defined]
    assert [h.stride() for h in hosts] == [p.stride() for p in model.parameters()]
    assert all(same_bits(a, b) for a, b in zip(*finals, strict=True))


def test_sparse_and_complex_parameters() -> None:
    finals = []
    for wrap in (lambda factory: factory, offloaded):
        torch.manual_seed(0)
        table, numbers = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.randn(4, dtype=torch.complex64))
        optimizers = wrap(torch.optim.SparseAdam)(table.parameters(), lr=LR), wrap(torch.optim.Adam)([numbers], lr=LR)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (table(torch.tensor([step, 1])).square().sum() + numbers.abs().square().sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
        finals.append([table.weight.detach(), torch.view_as_real(numbers.detach())])
    assert all(same_bits(a, b) for a, b in zip(*finals, strict=True))


def test_whatever_the_default_device_is() -> None:
    model = nn.Linear(3, 2)
    expected = copy.deepcopy(model)
    plain = torch.optim.AdamW(expected.parameters(), lr=LR, foreach=False)
    with torch.device("meta"):
        optimizer = offloaded(torch.optim.AdamW)(model.parameters(), lr=LR, foreach=False)
        for parameter in [*model.parameters(), *expected.parameters()]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    plain.step()
    assert {each.device.type for own in optimizer.state.values() for each in own.values()} == {"cpu"}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


class Breaks(torch.optim.SGD):
    """Once, when it has updated a part."""

    broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.broken:
            self.broken = True
            self.param_groups[0]["params"][0].add_(1e6)
            raise ArithmeticError("half-way")
        super().step()


def test_an_update_that_fails_leaves_the_weights() -> None:
    model = nn.Linear(3, 2)
    optimizer = offloaded(Breaks)(model.parameters(), lr=1.0)
    expected = [p.detach() - 1 for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.step()
    assert all(same_bits(a, b.detach()) for a, b in zip(expected, model.parameters(), strict=True))
