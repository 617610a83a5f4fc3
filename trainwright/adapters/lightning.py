"""Watches a Lightning run: ``Trainer(callbacks=[WatchCallback(out="runs/mine")])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from trainwright.adapters import WatchChoices
from trainwright.errors import import_optional
from trainwright.runs.records import Found
from trainwright.watching.watch import watch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from trainwright.watching.watch import Watch

_Callback: Any = import_optional("lightning.pytorch", needed_for="trainwright.adapters.lightning").Callback


class WatchCallback(_Callback):  # type: ignore[misc]
    """Watch a run of Lightning from the beginning of ``fit`` to its end, or to the exception that ends it.

    It records calls of the LightningModule, and of its direct submodules if ``training_step`` calls these instead.

    Args:
        **options: The options of ``tw.watch``, except for the objects that the trainer provides.
    """

    def __init__(self, **options: Unpack[WatchChoices]) -> None:
        self._options = options
        self.watch: Watch | None = None
        self._is_open = False

    def findings(self) -> list[Found]:
        """The findings so far, the primary cause first."""
        return [] if self.watch is None else self.watch.findings()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)
        self.watch = watch(
            pl_module,
            trainer.optimizers,
            loader=trainer.train_dataloader,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            **{"accumulation": trainer.accumulate_grad_batches} | self._options,
        )
        self.watch.__enter__()
        self._is_open = True
        self.watch.listen_to_children()

    def on_train_end(self, _trainer: Trainer, _pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(self, _trainer: Trainer, _pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        if self.watch is not None and self._is_open:
            self._is_open = False
            self.watch.__exit__(None if error is None else type(error), error, None)
