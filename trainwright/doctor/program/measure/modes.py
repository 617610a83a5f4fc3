"""Random functions that ignore the mode of the model."""

from __future__ import annotations

from torch import Tensor

from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import argument, function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

DROPOUTS = frozenset(
    {
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
    }
)
RANDOM_MASKS = frozenset({"bernoulli", "bernoulli_"})


def drop_rate(name: str, args: Args, kwargs: Kwargs) -> float:
    """The rate at which a function drops values although it is called in eval mode; 0 for any other function."""
    if name in DROPOUTS:
        is_on = argument(args, kwargs, 2, "training", kwargs.get("train", True))
        return float(argument(args, kwargs, 1, "p", 0.5)) if is_on else 0.0
    if name == "scaled_dot_product_attention":
        return float(argument(args, kwargs, 4, "dropout_p", 0.0))
    if name not in RANDOM_MASKS:
        return 0.0
    rates = argument(args, kwargs, 1, "p", 0.5 if name == "bernoulli_" else argument(args, kwargs, 0, "input", 0.5))
    is_mask = not isinstance(rates, Tensor) or bool((rates == rates.flatten()[:1]).all())
    return 0.5 if is_mask else 0.0  # a code is drawn with probabilities that were calculated


@experiment("in_eval_mode", when="first", steps=0.8)
def in_eval_mode(session: ReplaySession) -> Facts:
    """Functions within the models that drop values at random although every module is in eval mode."""
    modules = ModuleStack(session.modules)
    found: dict[tuple[str | None, str], Facts] = {}

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        if modules.innermost is not None and (rate := drop_rate(name, args, kwargs)):
            found.setdefault((modules.innermost, name), {"module": modules.innermost, "op": name, "p": rate})
        return function(*args, **kwargs)

    session.run(Intervention(mode="eval", ops=collect, model=modules.following), upto="forward")
    return {"drops": list(found.values())}
