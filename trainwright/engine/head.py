"""A language model's last linear layer apart from what comes before it, so that its logits need not be made whole.

A model of one's own takes part when its forward has a keyword ``hidden=False``, written after a ``*`` (True: give what
the head reads instead of logits), and it has the attributes ``head`` (an nn.Linear) and, where it bounds its logits,
``logit_softcap``. Causal models of ``transformers`` take part when their logits are those of their last layer, but for
a bound: that is tried out once for each model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from trainwright.engine.evaluate import evaluating

_HF_SOFTCAPS: WeakKeyDictionary[nn.Module, float | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Head:
    """logits_BTV = hidden_BTD @ weight_VD.T + bias_V, bounded by ``softcap`` unless that is 0."""

    weight: Tensor
    bias: Tensor | None
    softcap: float = 0.0


def head_of(model: nn.Module) -> Head | None:
    """The head of a model that can be asked for hidden states; None for any other."""
    own = _unwrapped(model)
    head = getattr(own, "head", None)
    if not _takes_hidden(type(own).forward) or not _is_plain(head):
        return None
    return Head(head.weight, head.bias, float(getattr(own, "logit_softcap", 0.0)))


def hf_head_of(model: nn.Module) -> Head | None:
    """The head of a causal model of ``transformers`` whose ``base_model`` gives what it reads; None for any other.

    A model that is wrapped for several ranks is another one: they work around the call of the whole.
    """
    own = getattr(model, "_orig_mod", model)
    find = getattr(own, "get_output_embeddings", None)
    head = find() if callable(find) else None
    base = getattr(own, "base_model", own)
    if base is own or not isinstance(base, nn.Module) or not _is_plain(head):
        return None
    softcap = _hf_softcap(own)
    return None if softcap is None else Head(head.weight, head.bias, softcap)


def hidden_of_hf(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """hidden_BTD of a model that has an ``hf_head_of``. Compiled where the whole is."""
    own = getattr(model, "_orig_mod", model)
    base: Any = own.base_model
    if getattr(model, "_compiled_call_impl", None) is not None and base._compiled_call_impl is None:
        base.compile()
    hidden: Tensor = base(input_ids=ids_BT)[0]
    return hidden


def _unwrapped(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return model.module if parallel else model


def _takes_hidden(forward: object) -> bool:
    return "hidden" in (getattr(forward, "__kwdefaults__", None) or ())


def _is_plain(head: object) -> TypeGuard[nn.Linear]:
    """Whether it is nothing but a linear layer: no adapter in it, no weight that a hook makes, not sharded."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    has_weight = "weight" in head._parameters or is_parametrized(head, "weight")
    return has_weight and not hasattr(head.weight, "device_mesh")


def _hf_softcap(model: nn.Module) -> float | None:
    """The bound of its logits, 0 for none; None where they are made in another way. Tried out once for each model."""
    if model not in _HF_SOFTCAPS:
        cap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
        if type(next(model.parameters())) is not nn.Parameter:
            return cap  # fake tensors: nothing can be compared
        _HF_SOFTCAPS[model] = cap if _tried_out(model, cap) else None
    return _HF_SOFTCAPS[model]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tried_out(model: Any, softcap: float) -> bool:
    """Whether ``base_model`` gives what the head reads, and the model returns what its head gives, but for a softcap.

    The head is made to give known numbers, small and large, instead of its own.
    """
    head, heard = model.get_output_embeddings(), []
    known_V = torch.linspace(-60, 60, head.out_features, device=head.weight.device)

    def answer(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        heard.append(args[0])
        return known_V.to(output.dtype).expand_as(output)

    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
    handle = head.register_forward_hook(answer)
    try:
        with evaluating(model), torch.autocast(head.weight.device.type, enabled=False):
            given = model.forward(input_ids=ids_BT).logits.float()
            hidden = model.base_model.forward(input_ids=ids_BT)[0]
    except Exception:  # whatever its forward wants beside the ids: it is none that we know how to ask
        return False
    finally:
        handle.remove()
    expected = softcap * torch.tanh(known_V / softcap) if softcap else known_V
    same = given.shape == (1, 2, len(known_V)) and torch.allclose(given, expected.expand_as(given), rtol=2e-2)
    return same and len(heard) == 1 and torch.equal(heard[0], hidden)
