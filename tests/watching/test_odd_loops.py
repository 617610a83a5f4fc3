"""Attaching to odd loops does no harm: the same bits, no exception, torch as before, and what is not seen is said."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as optimizer_module
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import dataloader

import trainwright as tw
from tests.watching.loops import (
    Watching,
    X,
    Y,
    both,
    exams,
    loop_of,
    net,
    plain_step,
    plain_steps,
    replays,
    said,
    sgd,
    weights,
)
from trainwright.runs.records import Watched
from trainwright.watching.session import NonFiniteStep

# models of other shapes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(ids))))
        return out


def test_shared_weights() -> None:
    ids = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(1))

    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        assert model.head.weight is model.embed.weight

    assert replays(both(loop_of(step, Tied)))


def test_gradients_of_each_sample_by_torch_func() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer, named = sgd(model), dict(model.named_parameters())

        def loss_of(weights_now: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, weights_now, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0), randomness="different")
        with watching(model, optimizer):
            for _ in range(6):
                F.cross_entropy(model(X), Y)  # for the log
                found = each({name: p.detach() for name, p in named.items()}, X, Y)
                for name, parameter in named.items():
                    parameter.grad = found[name].clamp(-0.1, 0.1).mean(0)
                optimizer.step()
        return weights(model)

    watch = both(loop)
    assert watch.step == 6 and watch.session.failures == []


@pytest.mark.slow
def test_a_gan_with_two_optimizers() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        G, D = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        of_G, of_D = sgd(G, lr=0.01), sgd(D, lr=0.01)
        with watching([G, D], [of_G, of_D]):
            for _ in range(12):
                fake = G(torch.randn(32, 4))
                of_D.zero_grad()
                (F.softplus(-D(X)) + F.softplus(D(fake.detach()))).mean().backward()
                of_D.step()
                D.requires_grad_(False)
                of_G.zero_grad()
                F.softplus(-D(fake)).mean().backward()
                of_G.step()
                D.requires_grad_(True)
        return weights(G, D)

    watch = both(loop)
    assert watch.step == 12
    assert replays(watch)


@pytest.mark.slow
def test_a_frozen_backbone() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        backbone, head = net(), nn.Linear(3, 3)
        backbone.requires_grad_(False)
        model, optimizer = nn.Sequential(backbone, head), sgd(head)
        with watching(model, optimizer):
            plain_steps(model, optimizer)
            backbone[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(backbone[3].parameters()), "lr": 0.01})
            plain_steps(model, optimizer)
        return weights(model)

    assert replays(both(loop))


def test_only_parts_of_the_model_are_called() -> None:
    """The first step is not understood; from the second on the parts are heard too."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        hidden = torch.tanh(model.encode(X))
        (F.cross_entropy(model.heads[0](hidden), Y) + F.cross_entropy(model.heads[1](hidden), Y)).backward()
        optimizer.step()

    watch = both(loop_of(step, Parts))
    assert [values.get("same_losses") for values in exams(watch, "again")][1:] == [True] * 6
    assert said(watch) == ""


def test_a_part_is_replaced_and_called_directly() -> None:
    """DeepCluster: each epoch has a new head with an optimizer of its own."""

    def loop(watching: Watching) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"features": nn.Linear(6, 8), "head": nn.Linear(8, 3)})
        optimizer = sgd(model["features"])
        with watching(model, optimizer):
            for _ in range(3):
                model["head"] = nn.Linear(8, 3)
                optimizers = [optimizer, sgd(model["head"])]
                for _ in range(4):
                    loss = F.cross_entropy(model["head"](torch.tanh(model["features"](X))), Y)
                    for each in optimizers:
                        each.zero_grad()
                    loss.backward()
                    for each in optimizers:
                        each.step()
        return weights(model)

    assert said(both(loop)) == ""


@pytest.mark.slow
def test_a_wrapper_around_the_watched_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    def loop(watching: Watching, *, inside: bool) -> list[Tensor]:
        model = net()
        wrapped = Wrapper(model)
        optimizer = sgd(model)
        with watching(model if inside else wrapped, optimizer):
            plain_steps(wrapped, optimizer)
        return weights(model)

    assert replays(both(lambda watching: loop(watching, inside=True)))
    assert replays(both(lambda watching: loop(watching, inside=False)))


def test_data_parallel() -> None:
    assert replays(both(loop_of(plain_step, lambda: nn.DataParallel(net()))))


def test_sparse_gradients() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(0, 20, (8, 4))), Y[:8]).backward()
        optimizer.step()

    def adam(model: nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()), lr=0.05)

    assert replays(both(loop_of(step, lambda: nn.EmbeddingBag(20, 3, sparse=True), adam)))


@pytest.mark.slow
def test_a_model_is_changed_inside() -> None:
    """Moved to another dtype, and given a new head that a replay would not put back."""

    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer):
            plain_steps(model, optimizer, 5)
            model.double()
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(X.double()), Y).backward()
                for p in model.parameters():
                    optimizer.state[p] = {}
                optimizer.step()
            model.float()
            optimizer.state.clear()
            model[3] = nn.Linear(12, 3)
            optimizer.add_param_group({"params": list(model[3].parameters())})
            plain_steps(model, optimizer, 20)
        return weights(model)

    both(loop)


# gradients of other kinds


def test_lbfgs_with_a_closure() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        with watching(model, optimizer):
            losses = [optimizer.step(closure) for _ in range(8)]  # type: ignore[arg-type]
        return [*weights(model), *(loss.detach() for loss in losses)]

    watch = both(loop)
    assert watch.step == 8
    assert "closure several times" in said(watch)


def test_generators_are_given_to_torch_unread() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watching(model, optimizer):
            for _ in range(6):
                losses = [F.cross_entropy(model(X), Y), model(X).square().mean()]
                ones = [torch.ones(()), torch.ones(())]
                grads = torch.autograd.grad(  # type: ignore[call-overload]
                    (each for each in losses),
                    (p for p in model.parameters() if p.requires_grad),
                    grad_outputs=(each for each in ones),
                    create_graph=True,
                )
                penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
                optimizer.zero_grad()
                torch.autograd.backward(
                    (each for each in (*losses, penalty)),
                    inputs=model.parameters(),  # type: ignore[arg-type]
                )
                optimizer.step()
        return weights(model)

    both(loop)


def test_a_loop_that_never_calls_backward() -> None:
    watch = both(loop_of(lambda model, optimizer: model(X).sum()))
    assert watch.step == 0
    assert "neither backward() nor a step" in said(watch)


def test_a_loop_that_never_steps_holds_no_graph() -> None:
    """Hundreds of forward passes with a graph: each is let go as without the watch."""
    model = net()
    with tw.watch(model, sgd(model), out=None, quiet=True, memory_bytes=200_000) as watch:
        seen = []
        for _ in range(600):
            output = model(X)
            seen.append(weakref.ref(output))
        del output
        gc.collect()
        assert sum(ref() is not None for ref in seen) <= 1
        segment = watch.session.recording.current
        assert len(segment.program) <= 300
    assert watch.session.failures == []


def test_training_by_autograd_grad() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        loss = F.cross_entropy(model(X), Y)
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            p.grad = grad
        optimizer.step()

    watch = both(loop_of(step, n=8))
    assert watch.step == 8
    assert "torch.autograd.grad" in said(watch)
    assert all(r.loss < 2 for r in watch.records if type(r).__name__ == "Watched")


def test_gradients_without_any_loss_that_is_heard() -> None:
    """Not even ``stop`` takes a loss that it does not know for one that is not finite."""

    def step(model: Any, optimizer: Optimizer) -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    assert "no loss was seen" in said(both(loop_of(step, n=8), on_nonfinite="stop"))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_an_update_where_autograd_is_off(off: Callable[[], AbstractContextManager[object]]) -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        F.cross_entropy(model(X), Y).backward()
        with off():
            optimizer.step()
        optimizer.zero_grad()

    watch = both(loop_of(step))
    assert said(watch) == ""
    assert replays(watch)


@pytest.mark.slow
def test_a_part_of_the_loss_where_autograd_is_off() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        logits = model(X)
        with torch.no_grad():
            weight = logits.softmax(1).amax(1)
        (weight * F.cross_entropy(logits, Y, reduction="none")).mean().backward()
        optimizer.step()

    watch = both(loop_of(step))
    assert said(watch) == ""
    assert replays(watch)


def test_gradients_are_edited_by_hand() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()

    watch = both(loop_of(step))
    assert "changed by hand" in said(watch)
    (found,) = [each for each in watch.findings() if each.code == "loop.unseen"]
    assert found.cause == "the loop trains in a way that is not recorded" and "not passed" not in found.remedy


def test_a_penalty_on_gradients() -> None:
    def step(critic: Any, optimizer: Optimizer) -> None:
        mixed = (X + 0.1 * torch.randn_like(X)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        optimizer.zero_grad()
        (F.softplus(critic(X)).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    def critic() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    assert replays(both(loop_of(step, critic, lambda model: sgd(model, lr=0.01))))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_with_a_graph_of_their_own() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None

    assert "create_graph" in said(both(loop_of(step, lambda: nn.Linear(6, 3), n=6)))


def test_a_retained_graph() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        out = model(X)
        F.cross_entropy(out, Y).backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()

    watch = both(loop_of(step, n=8))
    assert replays(watch)
    assert said(watch) == ""


@pytest.mark.parametrize("keyword", [False, True])
def test_backward_from_a_tensor_with_the_gradient_that_it_is_given(keyword: bool) -> None:
    """As where a gradient is cached, guessed, or comes from another process."""

    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        out = model(X)
        gradient = (out.detach().softmax(1) - F.one_hot(Y, out.shape[1])) / len(X)
        if keyword:
            torch.autograd.backward([out], grad_tensors=[gradient])
        else:
            out.backward(gradient)
        optimizer.step()

    watch = both(loop_of(step, n=8))
    assert replays(watch) and "no loss was seen" in said(watch)


def test_backward_to_some_parameters_only() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward(inputs=list(model[3].parameters()))
        optimizer.step()

    again = exams(both(loop_of(step, n=8)), "again")
    assert again[-1]["same_losses"] and again[-1]["norm_now"] == again[-1]["norm_then"]


def test_another_model_is_trained_beside() -> None:
    """Its backward passes and steps are not ours."""

    def loop(watching: Watching) -> list[Tensor]:
        model, other = net(), net()
        optimizer, of_other = sgd(model), sgd(other)
        with watching(model, optimizer):
            for _ in range(10):
                optimizer.zero_grad()
                out = model(X)
                of_other.zero_grad()
                F.cross_entropy(other(X), out.argmax(1).detach()).backward()
                of_other.step()
                F.cross_entropy(out, Y).backward()
                optimizer.step()
        return weights(model, other)

    assert replays(both(loop))


def test_inputs_that_want_a_gradient_keep_theirs() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model, prompt = net(), torch.randn(32, 6, requires_grad=True)
        optimizer = sgd(model)
        seen = []
        with watching(model, optimizer):
            for _ in range(10):
                optimizer.zero_grad()
                F.cross_entropy(model(prompt), Y).backward()
                optimizer.step()
                assert prompt.grad is not None
                seen.append(prompt.grad.clone())  # it adds up
        return [*weights(model), *seen]

    both(loop)


def test_a_parameter_that_nobody_was_told_of() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aside = nn.Linear(6, 3), [torch.zeros(3, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x) + self.aside[0]
            return out

    def loop(watching: Watching) -> list[Tensor]:
        model = Hidden()
        optimizer = sgd(model)
        with watching(model, optimizer):
            plain_steps(model, optimizer)
        assert model.aside[0].grad is not None
        return [*weights(model), model.aside[0].grad]

    both(loop, but="optim.params_not_registered")


def test_an_optimizer_step_inside_of_backward() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        with watching(model, list(optimizers.values())):
            for _ in range(8):
                F.cross_entropy(model(X), Y).backward()
        return weights(model)

    both(loop)


def test_nothing_has_a_gradient() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        F.cross_entropy(model(X), Y)
        optimizer.step()

    both(loop_of(step, lambda: net().requires_grad_(False), lambda model: torch.optim.SGD(model.parameters(), lr=0.1)))


# what the user has besides


def test_hooks_of_the_users_own() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.register_forward_hook(lambda module, args, out: out + 1)
        model[3].register_full_backward_hook(lambda module, grads, outs: None)
        model[3].weight.register_hook(lambda grad: grad * 0.5)
        optimizer.register_step_pre_hook(lambda *given: None)
        with watching(model, optimizer):
            handle = model.register_forward_hook(lambda module, args, out: out * 2)
            plain_steps(model, optimizer)
            handle.remove()  # so at the end the last steps cannot be run again
        assert len(model._forward_hooks) == 1 and len(model._forward_pre_hooks) == 1
        return weights(model)

    first, *again, last = exams(both(loop), "again")  # one hook was added after the first state was kept
    assert all(values["same_losses"] for values in again)
    assert "other hooks" in first["blind"] and "other hooks" in last["blind"]


def test_a_copy_and_a_pickle_made_inside() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer) as watch:
            average = AveragedModel(model)
            twin = copy.deepcopy(model)
            for _ in range(8):
                plain_steps(model, optimizer, 1)
                average.update_parameters(model)
                average(X)
                F.cross_entropy(twin(X), Y)
            if watch is not None:
                assert watch.step == 8
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
            pickle.loads(pickle.dumps((model, optimizer)))
        return [*weights(model, average), again.eval()(X), model.eval()(X), twin.eval()(X)]

    watch = both(loop)
    assert replays(watch)


def test_a_forward_pass_that_fails_and_is_caught() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer):
            for step in range(10):
                if step % 3 == 1:
                    with pytest.raises(RuntimeError, match="shapes"):
                        model(X[:, :4])
                plain_steps(model, optimizer, 1)
        return weights(model)

    watch = both(loop)
    assert watch.step == 10
    assert any(values.get("same_losses") for values in exams(watch, "again"))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_comes_through_as_it_is(kind: type[BaseException]) -> None:
    model = net()
    optimizer = sgd(model)
    mine, before = kind("mine"), torch_as_it_is()
    with pytest.raises(kind) as caught, tw.watch(model, optimizer, out=None, quiet=True):
        plain_steps(model, optimizer, 3)
        model(X)
        raise mine
    assert caught.value is mine
    assert not model._forward_hooks and torch_as_it_is() == before


def test_stop_ends_the_loop_by_an_exception_of_ours() -> None:
    model = net()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteStep), tw.watch(model, optimizer, out=None, quiet=True, on_nonfinite="stop"):
        (model(X).sum() * float("nan")).backward()
        optimizer.step()


@pytest.mark.slow
def test_nested_watches_and_one_after_the_other() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer) as outer:
            plain_steps(model, optimizer, 4)
            with watching(model, optimizer) as inner:
                plain_steps(model, optimizer, 4)
            plain_steps(model, optimizer, 4)
        if outer is not None:
            assert (outer.step, inner.step) == (12, 4)
            assert replays(outer) and replays(inner)
        with watching(model, optimizer) as later:
            plain_steps(model, optimizer, 4)
        assert later is None or (later.step == 4 and replays(later))
        return weights(model)

    both(loop)


@pytest.mark.slow
def test_two_watches_of_two_models() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        one, two = net(), net()
        of_one, of_two = sgd(one), sgd(two)
        with watching(one, of_one) as first, watching(two, of_two) as second:
            for _ in range(6):
                plain_steps(one, of_one, 1)
                plain_steps(two, of_two, 1)
        assert first is None or (first.step == second.step == 6 and replays(first) and replays(second))
        return weights(one, two)

    both(loop)


def test_other_threads_are_not_heard() -> None:
    torch.manual_seed(0)
    model, other = net(), net()
    optimizer, of_other = sgd(model), sgd(other)
    errors: list[BaseException] = []

    def beside(steps: int, called: nn.Module) -> None:
        try:
            for _ in range(steps):
                of_other.zero_grad()
                F.cross_entropy(other(X), Y).backward()
                called(X)
                of_other.step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=beside, args=(40, other))
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        thread.start()
        plain_steps(model, optimizer, 10)
        thread.join()
        for _ in range(10):
            plain_steps(model, optimizer, 1)
            thread = threading.Thread(target=beside, args=(1, model))  # while no step is being looked at
            thread.start()
            thread.join()
    assert errors == [] and watch.session.failures == [] and watch.step == 20


def test_a_loop_in_another_thread() -> None:
    model = net()
    optimizer = sgd(model)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        thread = threading.Thread(target=plain_steps, args=(model, optimizer))
        thread.start()
        thread.join()
    assert watch.step == 0
    [found] = [each for each in watch.findings() if each.code == "loop.unseen"]
    assert "in the thread of the watch" in found.symptom


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [1, 1_000, 20_000])
def test_the_recorder_keeps_to_its_bytes(memory_bytes: int) -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        with watching(model, optimizer) as watch:
            for _ in range(30):
                plain_steps(model, optimizer, 1)
                assert watch is None or watch.held_bytes <= memory_bytes
        return weights(model)

    watch = both(loop, memory_bytes=memory_bytes)
    assert ("memory_bytes" in said(watch)) == (memory_bytes < 20_000)


# torch itself

_OWNERS: tuple[Any, ...] = (
    torch.autograd, Tensor, Optimizer, nn.Module, torch.amp.GradScaler, clip_grad, nn.utils, lr_scheduler.LRScheduler,
    lr_scheduler.SequentialLR, lr_scheduler.ReduceLROnPlateau, lr_scheduler.ChainedScheduler,
    dataloader._BaseDataLoaderIter, dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter,
    torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS,
)  # fmt: skip


def torch_as_it_is() -> list[Any]:
    """Every attribute of what the watch touches, its global hooks, and torch's stack of modes."""
    attributes = [
        (str(owner), name, id(value))
        for owner in _OWNERS
        for name, value in sorted(vars(owner).items(), key=str)
        if name != "__slotnames__"  # copyreg's cache: pickling adds it
    ]
    hooks = [
        len(optimizer_module._global_optimizer_pre_hooks),
        len(optimizer_module._global_optimizer_post_hooks),
        len(nn.modules.module._global_forward_hooks),
        torch.overrides._len_torch_function_stack(),  # type: ignore[attr-defined]
    ]
    return [*attributes, *hooks]


@pytest.mark.parametrize("ending", ["well", "by an exception", "in the middle of a step"])
def test_torch_is_as_it_was(ending: str) -> None:
    model = net()
    optimizer = sgd(model)  # the first of its class changes the class
    before = torch_as_it_is()
    raising: Any = pytest.raises(ValueError, match="mine") if ending != "well" else nullcontext()
    with raising, tw.watch(model, optimizer, out=None, quiet=True):
        assert torch_as_it_is() != before
        plain_steps(model, optimizer, 3)
        loss = model(X).sum()
        if ending == "in the middle of a step":
            loss = loss * 2
        if ending != "well":
            raise ValueError("mine")
    assert torch_as_it_is() == before
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_module_without_shapes_beside_the_loop() -> None:
    later = nn.LazyLinear(3)
    model = net()
    with tw.watch(model, optimizer := sgd(model), out=None, quiet=True) as watch:
        plain_steps(model, optimizer, 30)
    assert watch.session.failures == [] and later.has_uninitialized_params()


def test_outputs_are_indexed_with_numpy() -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        chosen = np.where(Y.numpy() > 0)
        optimizer.zero_grad()
        F.cross_entropy(model(X)[chosen], Y[chosen]).backward()
        optimizer.step()

    assert replays(both(loop_of(step)))


def test_parameters_without_the_argument_of_torch() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vars = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in nn.Linear(6, 3).parameters()])

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.vars[0], self.vars[1])

        def parameters(self) -> Any:  # type: ignore[override]
            return iter(self.vars)

    watch = both(loop_of(plain_step, Own))
    assert said(watch) == ""
    assert replays(watch)


@pytest.mark.parametrize("is_before", [True, False], ids=["before backward", "after backward"])
def test_the_loss_of_a_step_is_that_of_backward(is_before: bool) -> None:
    def step(model: Any, optimizer: Optimizer) -> None:
        def inner() -> None:
            torch.autograd.grad(1000 + F.cross_entropy(model(X), Y), list(model.parameters()))

        optimizer.zero_grad()
        if is_before:
            inner()
        F.cross_entropy(model(X), Y).backward()
        if not is_before:
            inner()
        optimizer.step()

    watch = both(loop_of(step))
    assert all(each.loss < 10 for each in watch.records if isinstance(each, Watched))
