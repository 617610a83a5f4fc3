"""The laws of ``laws.md``, with the known causes that break them. The family has no names of its own."""

from __future__ import annotations

from trainwright.doctor.law import Law
from trainwright.doctor.loss import laws
from trainwright.doctor.loss.baselines import baselines_are_subtracted
from trainwright.doctor.loss.bounds import loss_has_a_bound
from trainwright.doctor.loss.centred import targets_are_centred
from trainwright.doctor.loss.counted import every_row_counts
from trainwright.doctor.loss.divergence import divergence_is_of_the_sample
from trainwright.doctor.loss.games import judges_see_the_same, players_are_at_odds, slopes_are_bounded
from trainwright.doctor.loss.learned import knows_more_than_nothing
from trainwright.doctor.loss.paired import pairs_are_learned
from trainwright.doctor.loss.probabilities import probabilities_add_up, there_is_room_to_learn
from trainwright.doctor.loss.room import terms_leave_room
from trainwright.doctor.loss.terms import every_term_matters

_NOTHING_LEARNED = (
    *("data.label_*", "data.unshuffled", "data.constant_*", "data.double_*", "data.unnormalised_*"),
    *(
        "loss.*",
        "opt*.*",
        "init.*",
        "grad*.*",
        "model.*",
        "sched*.*",
        "prec.*",
        "mode.*",
        "num.*",
        "gradient.accum*",
        "ckpt.*",
    ),
    *("law.vitals.*", "law.update.*", "law.gradient.*", "law.function.*"),
)
"""Whatever keeps a model from learning."""
LAWS: tuple[Law, ...] = (
    Law(
        "loss.starts_at_chance",
        laws.starts_at_chance,
        effort="replay",
        named_by=("init.*", "data.*", "num.*", "loss.*", "model.attention_logit_growth"),
    ),
    Law("loss.knows_more_than_nothing", knows_more_than_nothing, effort="replay", named_by=_NOTHING_LEARNED),
    Law("loss.pairs_are_learned", pairs_are_learned, effort="replay", named_by=_NOTHING_LEARNED),
    Law(
        "loss.targets_are_the_minimum",
        laws.targets_are_the_minimum,
        effort="replay",
        named_by=("loss.*", "grad.graph_cut*"),
    ),
    Law(
        "loss.like_is_compared_with_like",
        laws.like_is_compared_with_like,
        effort="replay",
        named_by=("loss.*", "data.*"),
    ),
    Law(
        "loss.batch_is_cut_anywhere",
        laws.batch_is_cut_anywhere,
        effort="replay",
        named_by=("loss.*",),
    ),
    Law("loss.every_term_matters", every_term_matters, effort="replay", named_by=("loss.*", "grad.graph_cut*")),
    Law("loss.terms_leave_room", terms_leave_room, effort="replay", named_by=("loss.*",)),
    Law("loss.every_row_counts", every_row_counts, effort="replay", named_by=("loss.*", "data.*", "model.dead_relu")),
    Law(
        "loss.targets_are_centred",
        targets_are_centred,
        effort="replay",
        named_by=("loss.*", "data.*", "init.*", "opt*.*"),
    ),
    Law("loss.players_are_at_odds", players_are_at_odds, effort="replay", named_by=("loss.*",)),
    Law("loss.judges_see_the_same", judges_see_the_same, effort="replay", named_by=("loss.*", "data.*")),
    Law("loss.loss_has_a_bound", loss_has_a_bound, effort="replay", named_by=("loss.*",)),
    Law("loss.divergence_is_of_the_sample", divergence_is_of_the_sample, effort="replay", named_by=("loss.*",)),
    Law("loss.slopes_are_bounded", slopes_are_bounded, effort="replay", named_by=("loss.*",)),
    Law("loss.baselines_are_subtracted", baselines_are_subtracted, effort="replay", named_by=("loss.*",)),
    Law("loss.probabilities_add_up", probabilities_add_up, named_by=("loss.*",)),
    Law("loss.there_is_room_to_learn", there_is_room_to_learn, effort="replay", named_by=("loss.*", "data.*")),
)
