"""What of a model does not listen to its mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

DROPS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
)
DRAWS = frozenset({"bernoulli", "bernoulli_"})


class Modules:
    """Inside ``following()``: the dotted path of the module that runs, None outside of all."""

    def __init__(self, bench: ReplaySession) -> None:
        self._modules = bench.modules
        self._stack: list[str] = []

    @property
    def now(self) -> str | None:
        return self._stack[-1] if self._stack else None

    @contextmanager
    def following(self) -> Iterator[None]:
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._stack.clear()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._stack.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del self._stack[-1:]


def drop_rate(name: str, args: Any, kwargs: Any) -> float:
    """With which a function that was called in eval mode drops; 0 for one that does not."""
    if name in DROPS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return float(p) if training else 0.0
    if name == "scaled_dot_product_attention":
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return 0.5 if name in DRAWS else 0.0


@experiment("in_eval_mode", when="first")
def in_eval_mode(bench: ReplaySession) -> dict[str, Any]:
    """Functions that drop values at random in the models although every module is in eval mode."""
    modules = Modules(bench)
    found: dict[tuple[str | None, str], dict[str, Any]] = {}

    def around(function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "?")
        if modules.now is not None and (rate := drop_rate(name, args, kwargs)):
            found.setdefault((modules.now, name), {"module": modules.now, "op": name, "p": rate})
        return function(*args, **kwargs)

    bench.run(Intervention(mode="eval", ops=around, model=modules.following), upto="forward")
    return {"drops": list(found.values())}
