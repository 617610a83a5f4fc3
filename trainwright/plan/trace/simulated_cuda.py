"""A simulated CUDA device for machines without one: operators choose the kernels and precisions that CUDA would.

Fake ``cuda`` tensors abort the process without a GPU, because the autograd engine needs the device. So a backend
written in Python (PrivateUse1) takes its place. It has no kernels: only shapes are computed. Sources: torch's
``aten/src/ATen/autocast_mode.h`` (the lists), ``native/transformers/cuda/sdp_utils.cpp``, ``native/Dropout.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from trainwright.errors import UsageError
from trainwright.plan.trace.operator_call import OpResult

NAME = "simulated_cuda"
aten = torch.ops.aten
LOW_PRECISION = (
    "linear mm bmm matmul addmm baddbmm addmv mv addr conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu einsum scaled_dot_product_attention lstm.input lstm_cell gru_cell"
)
FULL_PRECISION = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm cosine_similarity nll_loss "
    "nll_loss2d nll_loss_nd cosine_embedding_loss poisson_nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp prod prod.dim_int softmax.int "
    "log_softmax.int cumprod cumsum sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim"
)
MAX_FUSED_HEAD_DIM = 256  # largest head dimension that the fused attention kernels accept


class CastCache:
    """Weights in low precision, which autocast keeps until the end of the forward pass."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Drop the copies that nothing else holds."""
        self._kept.clear()

    def low(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``tensor`` in ``dtype``; for a weight, the cached copy."""
        if tensor.dtype is dtype or not _can_cast(tensor):
            return tensor
        keep = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
        if not (keep and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = (tensor, tensor.to(dtype))
        return self._kept[id(tensor)][1]


CASTS = CastCache()


def _can_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type == NAME


class _Backend(backend_registration._DummyBackendModule):
    """Functions that torch calls on a backend: autocast's dtypes, random state, and availability."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _device: object = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: Tensor, device: object = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def device(self, _index: object) -> AbstractContextManager[None]:
        return nullcontext()

    def is_available(self) -> bool:
        return False  # so that no other code chooses it


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False


_LIBRARIES: list[torch.library.Library] = []


def register_simulated_cuda() -> torch.device:
    """Return the simulated device, registered with torch at the first call, for the rest of the process.

    Raises UsageError if another backend has taken torch's only slot for a backend of this kind.
    """
    if not _LIBRARIES:
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise UsageError(
                f"a CUDA device cannot be simulated here: the backend {taken!r} occupies torch's only slot for it",
                remedy="plan in a process that does not load that backend, or for the device cpu",
            )
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend(), hook=_Hook())
        _register()
    return torch.device(NAME, 0)


def _register() -> None:
    anything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in LOW_PRECISION.split():
        _register_cast(library, name, _low)
    for name in FULL_PRECISION.split():
        _register_cast(library, name, _full)
    for name, kernel in (
        ("scaled_dot_product_attention", _attention),
        ("dropout", _dropout),
        ("rms_norm", _rms_norm),
    ):
        library.impl(name, kernel, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    _LIBRARIES.extend((anything, library))


def _register_cast(library: torch.library.Library, name: str, cast: Callable[[Tensor], Tensor]) -> None:
    packet_name, _, overload = name.partition(".")
    packet = getattr(aten, packet_name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return  # this version of torch has no such operator
    op = getattr(packet, overload or "default")

    def kernel(*args: object, **kwargs: object) -> OpResult:
        with _without_autocast():
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)

    library.impl(name, kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]


@contextmanager
def _without_autocast() -> Iterator[None]:
    key = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    assert key is not None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        yield


def _low(tensor: Tensor) -> Tensor:
    return CASTS.low(tensor, torch.get_autocast_dtype(NAME))


def _full(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if _can_cast(tensor) and tensor.element_size() < 4 else tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that CUDA chooses: flash for 16 bits without a mask, else memory-efficient, else math."""
    if query.dim() != 4 or query.shape[-1] > MAX_FUSED_HEAD_DIM or query.dtype is torch.float64:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _first(
            aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)
        )
    if attn_mask is None and query.element_size() == 2:
        return _first(aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale))
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    inputs = (query, key, value, bias, needs_grad, dropout_p, is_causal)
    return _first(aten._scaled_dot_product_efficient_attention(*inputs, scale=scale))


def _first(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as numbers to add to the scores; its last dimension in memory is padded to a multiple of 16."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if missing := -mask.shape[-1] % 16:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[-2])


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Call the fused dropout of CUDA, which keeps a mask of bools."""
    if not train or p == 0.0 or x.numel() == 0:
        return x
    return _first(aten.native_dropout(x, p, True))


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Call the fused RMSNorm of CUDA, which keeps one number per row."""
    return _first(aten._fused_rms_norm(x, shape, weight, eps))
