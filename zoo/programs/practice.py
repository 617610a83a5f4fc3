"""Techniques as others write them, in notebooks, at work and after papers; they are part of ``TABLE``."""

from __future__ import annotations

from collections.abc import Callable

from zoo.programs import detection as det
from zoo.programs import discrete_choices as dc
from zoo.programs import distributions as ds
from zoo.programs import forecasts as fc
from zoo.programs import games as gm
from zoo.programs import language_models as lm
from zoo.programs import likelihoods as lik
from zoo.programs import pictures as pic
from zoo.programs import recommenders as rec
from zoo.programs import regimes as reg
from zoo.programs import representations as rep
from zoo.programs import second_order as so
from zoo.programs import sequences_decoded as seq
from zoo.programs import signals as sig
from zoo.programs import structures as st
from zoo.programs import tabular as tab
from zoo.programs import texts as txt
from zoo.programs import weak_labels as weak
from zoo.programs.everyday_more import EVERYDAY
from zoo.programs.learners import LEARNERS
from zoo.programs.machines import MACHINES
from zoo.programs.training import Training

PRACTICE: dict[Callable[[Training], None], str] = {
    tab.entity_columns: "table",
    tab.weighted_labels: "table",
    tab.churn_notebook: "table",
    tab.house_multitask: "regress",
    rec.rating_factors: "regress",
    rec.two_towers: "table",
    rec.next_items: "text",
    rec.clicks_stream: "table",
    weak.candidate_labels: "table",
    weak.bag_proportions: "image",
    weak.early_learning: "image",
    weak.meta_pseudo_labels: "table",
    weak.bandit_logs: "table",
    weak.dual_clicks: "regress",
    weak.asked_labels: "table",
    det.box_and_class: "image",
    det.road_masks: "image",
    det.centre_points: "image",
    pic.ctc_captcha: "image",
    pic.masked_patches: "image",
    pic.unet_denoise: "image",
    pic.pixel_by_pixel: "image",
    pic.finetuned_backbone: "image",
    rep.simsiam: "image",
    rep.self_distillation_centred: "image",
    rep.mined_triplets: "image",
    rep.attentive_student: "image",
    seq.seq2seq_scheduled: "text",
    seq.transcribed: "series",
    seq.tagged_sequences: "text",
    txt.support_tickets: "text",
    txt.subword_entities: "text",
    lm.tied_char_lm: "text",
    lm.hypersphere_gpt: "text",
    lm.orthogonalised_momentum: "text",
    fc.revin_forecast: "series",
    fc.load_walk_forward: "series",
    fc.self_exciting: "series",
    fc.pump_anomalies: "rebuild",
    sig.complex_spectrum: "series",
    sig.harmonic_synth: "series",
    sig.diagonal_state_space: "series",
    sig.singular_margin: "series",
    sig.soft_time_warping: "series",
    st.citation_graph: "table",
    st.padded_sets: "regress",
    st.parse_trees: "text",
    st.acyclic_graph: "regress",
    st.poincare_tree: "table",
    reg.range_test: "table",
    reg.shrink_and_perturb: "table",
    reg.dark_experience: "table",
    reg.vmapped_folds: "regress",
    reg.power_compressed: "table",
    reg.gcn_citations: "table",
    lik.discrete_hazards: "table",
    lik.coral_ratings: "table",
    lik.zero_inflated_claims: "regress",
    lik.mixture_density: "regress",
    lik.calibrated_ensemble: "regress",
    lik.inducing_points: "regress",
    dc.rotated_codes: "rebuild",
    dc.concrete_selector: "rebuild",
    dc.relax_estimator: "table",
    dc.two_of_four: "regress",
    dc.sparse_variational_dropout: "table",
    so.unknown_diffusivity: "regress",
    so.signed_distance: "rebuild",
    so.ridge_head: "regress",
    so.hutchinson_diagonal: "regress",
    so.natural_gradient_ica: "rebuild",
    gm.td3: "regress",
    gm.opponent_shaping: "table",
    gm.optimistic_instruments: "regress",
    gm.imputation_game: "rebuild",
    ds.sinkhorn_generator: "rebuild",
    ds.noise_contrastive: "rebuild",
    ds.switched_average: "rebuild",
    ds.one_class_radius: "rebuild",
    ds.classifier_discrepancy: "table",
    **EVERYDAY,
    **LEARNERS,
    **MACHINES,
}
"""The techniques, and the task of each."""
