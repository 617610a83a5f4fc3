"""Separates the last linear layer of a language model from the rest, so that the full logits are never stored.

A model is supported if its forward has a keyword-only argument ``hidden=False`` (True: return the input of the head
instead of logits), and if it has the attribute ``head`` (an nn.Linear). A model that bounds its logits also needs the
attribute ``logit_softcap``. Causal models of ``transformers`` are supported if their logits are the output of their
last layer, bounded or not. That is tested once per model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.utils.parametrize import is_parametrized

from trainwright.checkpoint.shards import is_sharded
from trainwright.engine.evaluate import evaluating

_HF_SOFTCAPS: WeakKeyDictionary[nn.Module, float | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Head:
    """logits_BTV = hidden_BTD @ weight_VD.T + bias_V, bounded by ``softcap`` unless that is 0."""

    weight: Tensor
    bias: Tensor | None
    softcap: float = 0.0


def head_of(model: nn.Module) -> Head | None:
    """Return the head of a model that can return hidden states; None for any other model."""
    own = _unwrapped(model)
    head = getattr(own, "head", None)
    if not _takes_hidden(type(own).forward) or not _is_plain(head) or is_sharded(own):
        return None
    return Head(head.weight, head.bias, float(getattr(own, "logit_softcap", 0.0)))


def hf_head_of(model: nn.Module) -> Head | None:
    """Return the head of a causal model of ``transformers`` whose ``base_model`` returns the input of the head, or
    None.

    Returns None for a model that is wrapped for several ranks, because the wrapper acts on calls of the full model.
    """
    own = getattr(model, "_orig_mod", model)
    find = getattr(own, "get_output_embeddings", None)
    head = find() if callable(find) else None
    base = getattr(own, "base_model", own)
    if base is own or not isinstance(base, nn.Module) or not _is_plain(head) or is_sharded(own):
        return None
    softcap = _hf_softcap(own)
    return None if softcap is None else Head(head.weight, head.bias, softcap)


def hidden_of_hf(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Call a model, for which ``hf_head_of`` returns a head, with these keyword arguments and return hidden_BTD.

    Compiles the base model if the model is compiled.
    """
    own = getattr(model, "_orig_mod", model)
    base: Any = own.base_model
    if getattr(model, "_compiled_call_impl", None) is not None and base._compiled_call_impl is None:
        base.compile()
    hidden: Tensor = base(**inputs)[0]
    return hidden


def _unwrapped(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return model.module if parallel else model


def _takes_hidden(forward: object) -> bool:
    return "hidden" in (getattr(forward, "__kwdefaults__", None) or ())


def _is_plain(head: object) -> TypeGuard[nn.Linear]:
    """Return True if ``head`` is a plain linear layer: no adapter, no weight computed by a hook, not sharded."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    has_weight = "weight" in head._parameters or is_parametrized(head, "weight")
    return has_weight and not hasattr(head.weight, "device_mesh")


def _hf_softcap(model: nn.Module) -> float | None:
    """Return the bound of the logits, 0 for none; None if they are not the output of the head.

    Tested once per model.
    """
    if model not in _HF_SOFTCAPS:
        cap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
        if detect_fake_mode(list(model.parameters())) is not None:
            return cap  # fake tensors: nothing can be compared
        _HF_SOFTCAPS[model] = cap if _is_confirmed(model, cap) else None
    return _HF_SOFTCAPS[model]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_confirmed(model: Any, softcap: float) -> bool:
    """Return True if ``base_model`` returns the input of the head, and the logits are the head's output with this
    softcap.

    A hook replaces the output of the head by known numbers, small and large.
    """
    head, inputs = model.get_output_embeddings(), []
    known_V = torch.linspace(-60, 60, head.out_features, device=head.weight.device)

    def replaced(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(args[0])
        return known_V.to(output.dtype).expand_as(output)

    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
    handle = head.register_forward_hook(replaced)
    try:
        with evaluating(model), torch.autocast(head.weight.device.type, enabled=False):
            logits = model.forward(input_ids=ids_BT).logits.float()
            hidden = model.base_model.forward(input_ids=ids_BT)[0]
    except Exception:  # its forward needs other arguments than the ids
        return False
    finally:
        handle.remove()
    expected = softcap * torch.tanh(known_V / softcap) if softcap else known_V
    same = logits.shape == (1, 2, len(known_V)) and torch.allclose(logits, expected.expand_as(logits), rtol=2e-2)
    return same and len(inputs) == 1 and torch.equal(inputs[0], hidden)
