"""Replays of the forward pass with one argument, or the order of the tokens, changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.checkpoint.weights import fill_zeros
from trainwright.doctor.facts.layers import InputsFacts
from trainwright.doctor.measure.function import Outputs, max_distance, other_random_numbers
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Call, Constant, Slot, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import InputHandler, change_leaves, function_name
from trainwright.replay.replayer import UNCHANGED, Intervention
from trainwright.replay.session import ReplaySession

MAX_ARGUMENTS = 6
MIN_TOKENS = 4
ROUNDING = 3e-5  # Largest distance that is rounding, in standard deviations of the outputs
ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention"})


@replay(InputsFacts, when="checkup", steps=1.2, value=2.0)
def inputs(session: ReplaySession) -> InputsFacts:
    """Replays the forward pass with the rows of each argument in another order, and with the tokens in another order.

    Arguments are changed in train mode because some are used only there, and with two seeds because some are used only
    at random.
    """
    calls = session.recorded_step.calls
    if len(calls) != 1 or not session.size or session.size < 2:
        return InputsFacts()
    every = _leaves(session, calls[0])
    places = [place for place, (_, leaf) in enumerate(every) if _varies(leaf, session.size)][:MAX_ARGUMENTS]
    with session.live():
        fill_zeros(("", each) for each in session.replayer.subject.parameters)

        def run(change: Intervention) -> Outputs:
            return plain(tensors_of(session.replayer.run(session.recorded_step, change, upto="forward").outputs))

        without = places if len(places) > 1 else []
        for change in (UNCHANGED, Intervention(fresh_rng=True, model=other_random_numbers)):
            if not without:
                break
            base = run(change)
            moved = {n: run(replace(change, inputs=_at(n, lambda leaf: leaf.roll(1, 0)))) for n in without}
            is_steady = _are_equal(base, run(change))
            without = [place for place in without if is_steady and _are_equal(base, moved[place])]
        names = tuple(every[place][0] for place in without)
        return InputsFacts(len(places), names, *_order(session, run))


def _are_equal(ones: Outputs, others: Outputs) -> bool:
    return bool(ones) and len(ones) == len(others) and all(map(torch.equal, ones, others))


def _varies(leaf: Tensor, size: int) -> bool:
    return bool(leaf.dim()) and len(leaf) == size and bool((leaf != leaf[:1]).any())


def _leaves(session: ReplaySession, call: Call) -> list[tuple[str, Tensor]]:
    """Returns the tensors among the arguments in the order of ``mapped``, each with its name in the signature."""
    try:
        signature = inspect.signature(session.roots[call.root].forward)
        names = [*signature.bind_partial(*call.args).arguments]
    except (TypeError, ValueError):
        names = []
    arguments = [(names[n] if n < len(names) else f"argument {n}", each) for n, each in enumerate(call.args)]
    return [pair for name, each in (*arguments, *call.kwargs.items()) for pair in _tensors(name, each)]


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    tensor = value.tensor if isinstance(value, Constant) else value
    if isinstance(tensor, Tensor | Slot):
        yield name, tensor if isinstance(tensor, Tensor) else torch.empty(())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}[{key!r}]", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}[{number}]", each)


def _at(place: int, change: Callable[[Tensor], Tensor]) -> InputHandler:
    """Returns a handler that changes the tensor at ``place`` among the arguments."""

    def handler(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        at = 0

        def visit(leaf: object) -> object:
            nonlocal at
            if not isinstance(leaf, Tensor):
                return leaf
            at += 1
            return change(leaf) if at == place + 1 else leaf

        return mapped(args, visit), mapped(kwargs, visit)

    return handler


def _order(session: ReplaySession, run: Callable[[Intervention], Outputs]) -> tuple[bool, bool]:
    """Returns ``keeps_order`` and ``needs_order`` of InputsFacts."""
    tokens = [each for each in session.inputs if each.dim() == 2 and not each.is_floating_point()]
    are_ids, vectors = bool(tokens), [each for each in session.inputs if each.dim() == 3 and each.is_floating_point()]
    tokens = tokens or vectors
    if len(tokens) != 1 or (length := tokens[0].shape[1]) < MIN_TOKENS:
        return True, False
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0), device="cpu").to(tokens[0].device)
    if bool((tokens[0][:, order] == tokens[0]).all()):
        return True, False
    attends = False

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        nonlocal attends
        result, name = function(*args, **kwargs), function_name(function)
        is_table = isinstance(result, Tensor) and result.shape[-2:] == (length, length)
        attends |= name in ATTENTION or (name == "softmax" and is_table)
        return result

    before = run(Intervention(mode="eval", ops=call))
    if not attends or not before:
        return True, False

    def reordered(leaf: object) -> object:
        is_by_token = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
        return leaf[:, order] if isinstance(leaf, Tensor) and is_by_token else leaf

    def moved(one: Tensor, other: Tensor) -> float:
        if not one.is_floating_point():
            return 0.0
        dims = [dim for dim, size in enumerate(one.shape) if dim and size == length]
        return max_distance([one.index_select(dims[0], order) if dims else one], [other])

    after = run(Intervention(mode="eval", inputs=change_leaves(reordered)))
    held = [
        each
        for module in session.modules.values()
        for each in (*module._buffers.values(), *(module._parameters.values() if are_ids else ()))
    ]  # a model of sets of vectors may have parameters of this shape, such as queries
    tables = [each for each in held if each is not None and each.dim() == 3 and 1 in each.shape[:2]]
    is_by_token = are_ids and any(length in each.shape[1:] for each in before)
    needs = is_by_token or any(max(each.shape[:2]) >= length for each in tables)
    return max(map(moved, before, after)) > ROUNDING, needs
