"""Watches a run of Hugging Face's Trainer: ``Trainer(..., callbacks=[WatchCallback(out="runs/mine")])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.adapters import innermost, required
from trainwright.runlog.records import Found
from trainwright.watching.watch import watch

if TYPE_CHECKING:
    from trainwright.watching.watch import Watch

_transformers: Any = required("transformers", needed_for="trainwright.adapters.transformers")
required("accelerate", needed_for="trainwright.adapters.transformers")


class WatchTrainerCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """``tw.watch`` from the begin of ``train`` to its end, or to the exception that ends it. Takes its options."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.watch: Watch | None = None
        self._undo: Any = None

    def findings(self) -> list[Found]:
        """What is known by now, the first cause first."""
        return [] if self.watch is None else self.watch.findings()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._leave(None)
        optimizer, loader = given["optimizer"], given["train_dataloader"]
        self.watch = watch(
            given["model"],
            innermost(optimizer),
            loader=getattr(loader, "base_dataloader", loader),
            scaler=getattr(optimizer, "scaler", None),
            scheduler=getattr(given["lr_scheduler"], "scheduler", given["lr_scheduler"]),
            **{"accumulation": args.gradient_accumulation_steps} | self._options,
        )
        self.watch.__enter__()
        self._undo = _on_exception(self._leave)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self.watch is not None and self._undo is not None:
            self._undo()
            self._undo = None
            self.watch.__exit__(None if error is None else type(error), error, None)


def _on_exception(leave: Any) -> Any:
    """Tells ``leave`` what comes out of an epoch: the Trainer has no event for that. Returns how to undo it."""
    trainer = _transformers.Trainer
    name = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"  # the second in older versions
    original = getattr(trainer, name)

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            leave(error)
            raise

    setattr(trainer, name, guarded)
    return lambda: setattr(trainer, name, original)
