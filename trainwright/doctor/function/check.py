"""The laws of ``laws.md``, with the known causes that break them. The family has no names of its own."""

from __future__ import annotations

from trainwright.doctor.function import laws
from trainwright.doctor.function.attention import attention_is_an_average, attention_tells_apart
from trainwright.doctor.law import Law

LAWS: tuple[Law, ...] = (
    Law(
        "function.samples_are_independent",
        laws.samples_are_independent,
        effort="replay",
        named_by=("model.mixes_samples", "model.bn_*"),
    ),
    Law(
        "function.evaluation_repeats",
        laws.evaluation_repeats,
        effort="replay",
        named_by=("evaluation.dropout_ignores_mode", "model.bn_*"),
    ),
    Law("function.padding_is_not_seen", laws.padding_is_not_seen, effort="replay", named_by=("model.mixes_samples",)),
    Law(
        "function.past_does_not_see_the_future",
        laws.past_does_not_see_the_future,
        effort="replay",
        named_by=("model.future_leak", "loss.no_shift"),
    ),
    Law(
        "function.inputs_matter",
        laws.inputs_matter,
        effort="replay",
        named_by=("model.dead_relu", "init.*", "data.constant_input", "num.*", "grad.vanishing"),
    ),
    Law(
        "function.evaluated_is_what_is_trained",
        laws.evaluated_is_what_is_trained,
        effort="replay",
        named_by=("model.*", "mode.*", "num.*"),
    ),
    Law(
        "function.attention_is_an_average", attention_is_an_average, effort="replay", named_by=("model.mixes_samples",)
    ),
    Law("function.attention_tells_apart", attention_tells_apart, effort="replay", named_by=("num.*", "grad.vanishing")),
    Law("function.ties_hold", laws.ties_hold, named_by=("optim.stale_params",)),
)
