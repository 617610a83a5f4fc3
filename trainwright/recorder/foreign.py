"""Optimizers that are not torch's, such as those of keras. A call of their ``step`` or ``apply`` is an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.recorder.listener import has_listeners, tell

UPDATING = ("step", "apply")
"""Methods that make an update. The first one that an object has is used."""
RATES = ("learning_rate", "lr")


class ForeignOptimizer(Optimizer):
    """Represents an optimizer that is not torch's. Holds the trained parameters and makes no update itself."""

    def __init__(self, foreign: object, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": _rate_of(foreign)})
        self.foreign = foreign
        self.kind = f"{type(foreign).__module__.partition('.')[0]}.{type(foreign).__name__}"

    @staticmethod
    def can_stand_for(given: object) -> bool:
        """Returns True if ``given`` has a method that may make an update."""
        return not isinstance(given, nn.Module) and _updating(given) is not None

    @property
    def reason(self) -> str:
        """The reason why no step can be replayed."""
        return f"the optimizer is a {self.kind}, which is not one of torch's"

    @property
    def limits(self) -> str:
        """The limits of watching this optimizer."""
        return (
            f"{self.reason}: no step is replayed, its state is not examined, and an update that is not finite is "
            "reported and not left out"
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which each update is reported as one of this optimizer."""
        name = _updating(self.foreign)
        assert name is not None
        setattr(self.foreign, name, self._announced(getattr(self.foreign, name)))
        try:
            yield
        finally:
            delattr(self.foreign, name)

    def _announced(self, original: Callable[..., object]) -> Callable[..., object]:
        def update(*args: object, **kwargs: object) -> object:
            if not has_listeners():
                return original(*args, **kwargs)
            self.param_groups[0]["lr"] = _rate_of(self.foreign)
            tell("on_step", self, ())
            result = original(*args, **kwargs)
            tell("on_stepped", self)
            return result

        return update


def _updating(given: object) -> str | None:
    return next((name for name in UPDATING if callable(getattr(given, name, None))), None)


def _rate_of(foreign: object) -> float:
    """Returns the learning rate; if it is unknown 1, as a placeholder above 0."""
    for name in RATES:
        try:
            return float(getattr(foreign, name))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
    return 1.0
