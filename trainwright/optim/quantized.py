"""AdamW with moments stored in 8 or 4 bits, by torchao."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.shards import is_divided
from trainwright.errors import UsageError, import_optional
from trainwright.optim.groups import Group
from trainwright.optim.guarded import GuardedOptimizer, State, require_betas, require_rates

MIN_QUANTIZED_VALUES = 4096
"""Smaller tensors have unquantized moments, as in torchao and bitsandbytes."""
CHUNK_VALUES = 2**20
"""Values of a tensor that are updated together without compilation. Each needs about 60 bytes of temporaries."""
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Name of each moment, and True if it has a sign."""


class _QuantizedAdamW(GuardedOptimizer):
    """The update is torchao's ``single_param_adam``; the state consists of plain tensors.

    torchao stores each moment as a tensor subclass, which a checkpoint could only pickle. Here the state contains its
    parts (``exp_avg_codes``, ``exp_avg_scale``), and the subclass wraps them during an update. Quantization works on
    blocks of ``block_size`` consecutive values, so a tensor can be updated in chunks of blocks with the same bits.
    """

    values_per_code = 1
    module: str
    """torchao's module of the tensor subclass."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        block_size: int,
        compiled: bool | None,
    ) -> None:
        require_rates(lr=lr, eps=eps, weight_decay=weight_decay)
        require_betas("betas", betas)
        if not isinstance(block_size, int) or block_size < 2 or block_size & (block_size - 1):
            raise UsageError(f"block_size must be a power of 2; got {block_size!r}", remedy="try block_size=256")
        self._torchao(self.module)  # a missing package is reported before the first step
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "block_size": block_size, "compiled": compiled})

    @abstractmethod
    def _wrapped(self, codes: Tensor, scale: Tensor, table: Tensor, signed: bool, parameter: Tensor) -> Tensor:
        """Return torchao's tensor around the parts of a moment."""

    @classmethod
    def _torchao(cls, module: str) -> Any:
        return import_optional(f"torchao.{module}", needed_for=f"the optimizer {cls.__name__.lower()}")

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        if any(is_divided(parameter) for parameter in self.param_groups[-1]["params"]):
            raise UsageError(
                f"{type(self).__name__} cannot update weights that ranks divide: its blocks would cross their borders",
                remedy="use adamw with parallel.shard or parallel.tensor, or parallel.replicate with this optimizer",
            )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state. torch casts it to the dtype of its parameter, but codes and scales keep theirs."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, saved in state_dict["state"].items():
            state = self.state[parameters[number]]
            for name, value in saved.items():
                if name.endswith(("_codes", "_scale")):
                    state[name] = value.detach().clone().to(state[name].device)

    def _tensors(self, _group: Group) -> tuple[str, ...]:
        return ("step", *(name for name, _ in MOMENTS))

    def _state_of(self, parameter: Tensor, group: Group) -> State:
        size, block = parameter.numel(), group["block_size"]
        if size < MIN_QUANTIZED_VALUES or size % block:
            return super()._state_of(parameter, group)
        state: State = self.state[parameter]
        if not state:
            device = parameter.device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name, _ in MOMENTS:
                state[f"{name}_codes"] = torch.zeros(size // self.values_per_code, dtype=torch.uint8, device=device)
                state[f"{name}_scale"] = torch.zeros(size // block, dtype=torch.float32, device=device)
        return state

    def _update(self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        lr = torch.tensor(group["lr"], dtype=torch.float32)  # torchao computes with a float32 tensor
        rest = (lr, *group["betas"], group["weight_decay"], group["eps"], True, False)
        for parameter, grad, state in zip(parameters, grads, states, strict=True):
            state["step"] += 1
            flat, flat_grad = (each.detach().contiguous().view(-1) for each in (parameter, grad))
            if isinstance(flat, FakeTensor) and flat.device.type != "cpu" and group["compiled"] is not False:
                _trace_fused_update(flat, flat_grad, state)
                continue
            is_compiled = _is_compiled(group["compiled"], flat)
            update = self._torchao("optim.adam").single_param_adam
            update = torch.compile(update, fullgraph=True, dynamic=False) if is_compiled else update
            for part, moments in self._parts(
                flat, state, group["block_size"], flat.numel() if is_compiled else CHUNK_VALUES
            ):
                update(flat[part], flat_grad[part], state["step"], *moments, None, *rest)
            if flat.data_ptr() != parameter.data_ptr():
                parameter.copy_(flat.view_as(parameter))

    def _parts(self, flat: Tensor, state: State, block_size: int, most: int) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield slices of at most ``most`` values, or of one block, with their moments."""
        if "exp_avg" in state:
            yield slice(None), [state[name].view(-1) for name, _ in MOMENTS]
            return
        chunk = max(most, block_size)
        for begin in range(0, flat.numel(), chunk):
            part = slice(begin, min(begin + chunk, flat.numel()))
            codes = slice(part.start // self.values_per_code, part.stop // self.values_per_code)
            blocks = slice(part.start // block_size, part.stop // block_size)
            moments = []
            for name, signed in MOMENTS:
                table = self._code_table(flat, signed)
                parts = state[f"{name}_codes"][codes], state[f"{name}_scale"][blocks]
                moments.append(self._wrapped(*parts, table, signed, flat[part]))
            yield part, moments

    def _code_table(self, like: Tensor, signed: bool) -> Tensor:
        module = self._torchao(self.module)
        values = module.get_qmap_signed() if signed else module.get_qmap_unsigned()
        if isinstance(like, FakeTensor):
            return torch.tensor(values, device=like.device)
        return _cached_table(values, like.device)


@cache
def _cached_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _trace_fused_update(flat: Tensor, flat_grad: Tensor, state: State) -> None:
    """Read and write the same memory as a compiled update, because a plan for a GPU cannot trace a compiled kernel."""
    flat.add_(flat_grad)
    for name, value in state.items():
        if name != "step":
            value.add_(1)


def _is_compiled(requested: bool | None, tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cuda" if requested is None else requested


class AdamW8bit(_QuantizedAdamW):
    """AdamW with moments of 8 bits, as ``torchao.optim.AdamW8bit`` computes it.

    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861. A block of ``block_size``
    consecutive values shares a scale in fp32. Tensors of fewer than 4,096 values, or whose size is not a multiple of
    ``block_size``, have moments in the dtype of the parameter.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        block_size: Values that share a scale, a power of 2.
        compiled: True: torch.compile fuses the update. None: on CUDA only. The first steps then take longer. Without it
            an update launches about 100 kernels per tensor.
    """

    module = "optim.subclass_8bit"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        block_size: int = 256,
        compiled: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, block_size, compiled)

    def _wrapped(self, codes: Tensor, scale: Tensor, table: Tensor, signed: bool, parameter: Tensor) -> Tensor:
        wrapped: Tensor = self._torchao(self.module).OptimState8bit(codes, scale, table, signed, dtype=parameter.dtype)
        return wrapped


class AdamW4bit(_QuantizedAdamW):
    """AdamW with moments of 4 bits, as ``torchao.optim.AdamW4bit`` computes it.

    Li et al. 2023, "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507. The arguments are the same as for
    ``AdamW8bit``.
    """

    values_per_code = 2
    module = "optim.subclass_4bit"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        block_size: int = 128,
        compiled: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, block_size, compiled)

    def _wrapped(self, codes: Tensor, scale: Tensor, table: Tensor, signed: bool, parameter: Tensor) -> Tensor:
        shape, dtype = parameter.shape, parameter.dtype
        wrapped: Tensor = self._torchao(self.module).OptimState4bit(codes, scale, table, signed, shape, dtype=dtype)
        return wrapped
