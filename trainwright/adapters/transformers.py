"""Watches a run of Hugging Face's Trainer: ``Trainer(..., callbacks=[WatchTrainerCallback(out="runs/mine")])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from trainwright.adapters import WatchChoices
from trainwright.errors import import_optional
from trainwright.runs.records import Found
from trainwright.watching.watch import watch

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from trainwright.watching.watch import Watch

_transformers: Any = import_optional("transformers", needed_for="trainwright.adapters.transformers")
import_optional("accelerate", needed_for="trainwright.adapters.transformers")


class WatchTrainerCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """Watch a run of the Trainer from the beginning of ``train`` to its end, or to the exception that ends it.

    Args:
        **options: The options of ``tw.watch``, except for the objects that the trainer provides.
    """

    def __init__(self, **options: Unpack[WatchChoices]) -> None:
        self._options = options
        self.watch: Watch | None = None
        self._undo: Callable[[], None] | None = None

    def findings(self) -> list[Found]:
        """The findings so far, the primary cause first."""
        return [] if self.watch is None else self.watch.findings()

    def on_train_begin(
        self, args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **objects: Any
    ) -> None:
        self._leave(None)
        optimizer = objects["optimizer"]
        self.watch = watch(
            objects["model"],
            optimizer,
            loader=objects["train_dataloader"],
            scaler=getattr(optimizer, "scaler", None),
            scheduler=objects["lr_scheduler"],
            **{"accumulation": args.gradient_accumulation_steps} | self._options,
        )
        self.watch.__enter__()
        self._undo = _on_exception(self._leave)

    def on_train_end(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_objects: object
    ) -> None:
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self.watch is not None and self._undo is not None:
            self._undo()
            self._undo = None
            self.watch.__exit__(None if error is None else type(error), error, None)


def _on_exception(leave: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call ``leave`` with the exception that ends an epoch, because the Trainer has no event for it.

    Returns a function that removes this hook.
    """
    trainer = _transformers.Trainer
    name = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"  # older versions have no _run_epoch
    original = getattr(trainer, name)

    def guarded(self: object, *args: object, **kwargs: object) -> object:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            leave(error)
            raise

    setattr(trainer, name, guarded)
    return lambda: setattr(trainer, name, original)
