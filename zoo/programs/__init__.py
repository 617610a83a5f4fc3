"""Healthy programs in number: tasks times legal techniques. No alarm may come of them.

A program is named ``task:technique``; those of ``KEPT_OUT`` are for the end of a piece of work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zoo.mutant_runs import Watched, run_watched
from zoo.programs import agents as b
from zoo.programs import around_backpropagation as a
from zoo.programs import corrected_gradients as c
from zoo.programs import densities as d
from zoo.programs import embeddings as f
from zoo.programs import episodes as q
from zoo.programs import estimators as e
from zoo.programs import everyday as y
from zoo.programs import generators as x
from zoo.programs import gradients_by_hand as h
from zoo.programs import language, likeness, mechanisms, objectives, rankings, subsets, transfer, update_rules
from zoo.programs import latents as v
from zoo.programs import limits as i
from zoo.programs import loops as p
from zoo.programs import losses as l
from zoo.programs import memories as t
from zoo.programs import models as m
from zoo.programs import nested as n
from zoo.programs import renewal as z
from zoo.programs import rounds as o
from zoo.programs import stages as g
from zoo.programs import supervision as u
from zoo.programs import surrogates as s
from zoo.programs import unlabelled as j
from zoo.programs import without_backward as w
from zoo.programs.kept_out import KEPT_OUT as FIRST
from zoo.programs.kept_out_second import SECOND
from zoo.programs.practice import PRACTICE
from zoo.programs.training import Training, training

Technique = Callable[[Training], None]
ALL = "table regress image text series rebuild"
NUMBERS = "table regress image series rebuild"
CLASSES = "table image series"
TABLE: dict[Technique, str] = {
    m.sign_through: "table regress image rebuild",
    m.round_through: "table regress image rebuild",
    m.fake_quantised: "table regress image rebuild text",
    m.gradient_reversal: "table regress image rebuild",
    m.spectral: "table regress image rebuild",
    m.weight_normed: "table regress image rebuild text",
    m.orthogonal_weights: "table regress text",
    m.experts: "table regress text",
    m.tied: "table regress text",
    m.frozen_first: "table regress image rebuild text",
    m.unfrozen_later: "table regress image rebuild",
    m.frozen_statistics: "image",
    m.dropout_half: "table image",
    m.stochastic_depth: "table regress text",
    m.checkpointed: "table regress text",
    m.zero_residual: "table regress text",
    m.scaled_gradient: "table regress image",
    m.hidden_noise: "table regress image",
    m.layer_normed: "table regress",
    m.double_precision: "table regress image text series",
    l.label_smoothing: CLASSES,
    l.mixup: CLASSES,
    l.cutmix: "image",
    l.rare_class: CLASSES,
    l.balanced_sampler: CLASSES,
    l.focal: CLASSES,
    l.hinge: "table series",
    l.summed: "table regress",
    l.huber: "regress rebuild",
    l.negative_likelihood: "regress rebuild",
    l.sparsity: "table regress rebuild text",
    l.auxiliary: "table regress series",
    l.distilled: "table regress image",
    l.mean_teacher: "table regress image text",
    l.stopped_targets: "table regress image series",
    l.entropy_bonus: CLASSES,
    l.masked_input: "table image",
    l.noisy_input: NUMBERS,
    l.flat_columns: "table regress",
    l.one_batch: "table regress image text",
    l.curriculum: "image series",
    l.other_domain: "table regress image",
    l.tiny_batches: "table regress text",
    l.large_batches: "table regress rebuild",
    l.endless_stream: "table regress image series",
    l.varied_batches: "table regress image",
    p.accumulated: "table regress rebuild text",
    p.several_groups: ALL,
    p.warm_restarts: "table regress image",
    p.warmed_up: "table regress text",
    p.one_cycle: "table image text series",
    p.cosine: "table regress series",
    p.decayed: "image rebuild",
    p.momentum: "table image regress rebuild",
    p.root_mean_square: "table regress text",
    p.adagrad: "table image",
    p.amsgrad: "table text",
    p.two_optimizers: "table regress image text",
    p.clipped: ALL,
    p.clipped_by_value: "table regress",
    p.gradient_noise: "table regress image text",
    p.centred_gradients: "table image",
    p.averaged_weights: "table regress image text",
    p.moving_average: "table regress image",
    p.lookahead: "table regress image text",
    p.lbfgs: "table regress",
    p.closure: "table regress image",
    p.sharpness_aware: "table regress image",
    p.by_hand: "table regress image",
    p.stepped_without_grad: ALL,
    p.functional_gradient: "table regress image",
    p.bfloat16: "table regress image text",
    p.float16_scaled: "table regress text",
    p.gradient_penalty: "table regress",
    p.adversarial: "table regress image",
    p.evaluated: ALL,
    p.truncated: "series",
    e.averaged_codes: "rebuild regress",
    e.moved_codes: "rebuild",
    e.drawn_branch: "table regress",
    e.best_branch: "table regress",
    e.best_branch_without_grad: "table",
    e.clipped_signs: "table",
    e.learned_step: "regress",
    e.top_two_experts: "table",
    e.gates: "table",
    e.settled: "table",
    h.signs_of_gradients: "table",
    h.binary_while_computing: "table regress",
    h.bootstrapped: "table",
    h.rescaled_outputs: "regress",
    h.learned_to_learn: "regress",
    h.flat_minimum: "regress",
    h.private: "table",
    h.surgery: "regress",
    h.layer_by_layer: "table",
    s.binary_weights: "table image",
    s.ternary_weights: "regress",
    s.spiking: "table",
    s.clamped_gradient: "regress image",
    s.codebook: "rebuild",
    s.hard_choice: "table",
    s.unit_gates: "table",
    s.adversarial_domain: "table",
    s.stopped_branch: "table",
    s.rounded_activations: "image",
    d.coupling_flow: "rebuild",
    d.persistent_chain: "image",
    d.langevin: "rebuild",
    d.sliced_scores: "rebuild",
    v.several_samples: "rebuild",
    v.doubly_reparametrised: "rebuild",
    v.second_order_choice: "rebuild",
    v.shaken: "table",
    n.reweighted_examples: "table",
    n.learned_rate: "table",
    n.implicit_hypergradient: "regress",
    w.two_point: "table",
    w.difference_target: "table",
    w.forward_forward: "table",
    g.merged_adapters: "table",
    g.lottery_ticket: "table",
    g.widened: "table",
    g.federated: "table",
    g.master_weights: "table",
    g.schedule_free: "table",
    u.pseudo_labels: "image",
    u.virtual_adversarial: "table",
    u.cached_contrast: "image",
    u.group_robust: "table",
    c.leave_one_out: "rebuild",
    c.perturbed_patches: "image",
    c.sampled_softmax: "text",
    c.evolution: "table",
    c.variance_reduced: "regress",
    c.largest_with_memory: "image",
    c.kronecker: "regress",
    c.regrown: "table",
    a.implicit: "regress",
    a.feedback_alignment: "table",
    a.equilibrium: "table",
    a.synthetic_gradients: "image",
    a.adjoint: "table",
    a.reversible: "table",
    u.co_teaching: "table",
    u.momentum_contrast: "image",
    s.stochastic_rounding: "regress",
    s.found_subnetwork: "table",
    h.gradient_normalised: "regress",
    w.forward_gradient: "table",
    g.soup: "table",
    n.reptile: "regress",
    b.deep_q: "table",
    b.clipped_policy: "table",
    d.mutual_information: "rebuild",
    l.drawn_quantiles: "regress",
    c.relaxed_permutations: "rebuild",
    d.relativistic: "rebuild",
    l.evidential: "regress",
    m.pondering: "table",
    w.predictive_coding: "table",
    g.sign_momentum: "image",
    s.learned_clipping: "image",
    m.generated_weights: "image",
    b.eligibility_traces: "regress",
    b.expert_iteration: "table",
    o.cross_validated: "table",
    o.snapshots: "table",
    o.born_again: "image",
    o.boosted: "regress",
    o.plateaus: "regress",
    o.growing_batch: "table",
    f.angular_margin: "image",
    f.prototypes: "image",
    f.skip_grams: "text",
    y.counted_tokens: "text",
    y.episodic_memory: "table",
    y.recomputed_dropout: "text",
    y.progressive_resizing: "image",
    y.temporal_ensemble: "image",
    q.recurrent_actor_critic: "table",
    q.hindsight: "table",
    z.recycled_units: "table",
    z.replaced_units: "table",
    z.population: "table",
    j.hebbian: "rebuild",
    j.decorrelated: "image",
    j.embedded_clusters: "image",
    j.propagated_labels: "image",
    x.moment_matching: "rebuild",
    x.clipped_critic: "rebuild",
    x.self_conditioned: "rebuild",
    t.pointer: "series",
    t.turing_machine: "series",
    t.slots: "table",
    i.proximal: "table regress",
    i.linearised: "table regress",
    i.smoothed_adversary: "image",
    subsets.overlap: "image",
    subsets.neural_process: "regress",
    subsets.hard_examples: "table",
    subsets.batch_ensemble: "table",
    subsets.movement_pruning: "table",
    subsets.clustered: "image",
    update_rules.eligible_spikes: "series",
    update_rules.damped_gauss_newton: "regress",
    update_rules.quadratic_program: "regress",
    update_rules.entropy_regularised_agent: "table",
    update_rules.polyak_step: "image",
    update_rules.mirrored_bits: "image",
    language.packed_documents: "text",
    language.prompt_tuned: "text",
    language.mixed_softmaxes: "text",
    likeness.two_dropouts: "series",
    likeness.proxies: "image",
    likeness.sparse_rows: "regress",
    y.finite_steps: "regress",
    transfer.layer_after_layer: "image",
    rankings.ranked: "regress",
    rankings.ranked_lists: "regress",
    likeness.labelled_contrast: "image",
    transfer.not_forgotten: "table",
    t.sparse_shares: "series",
    l.uncertain_tasks: "regress",
    i.balanced_robustness: "image",
    b.returns_in_quantiles: "table",
    n.condensed: "image",
    x.distilled_scores: "rebuild",
    a.direct_feedback: "table",
    i.bounded_rows: "table",
    h.shortest_mixture: "table",
    update_rules.resilient: "regress",
    i.clipped_by_unit: "image",
    h.stein_particles: "regress",
    objectives.translated: "table",
    objectives.never_below_zero: "table",
    objectives.environments: "table",
    objectives.blackbox_ranks: "image",
    objectives.replaced_tokens: "text",
    objectives.proportional_hazards: "regress",
    objectives.preferred: "text",
    mechanisms.steps_within_backward: "image",
    mechanisms.balanced_without_loss: "table",
    mechanisms.carried_state: "text",
    mechanisms.dual_ascent: "table",
    mechanisms.swapped_codes: "image",
    **PRACTICE,
}
"""The techniques, and the tasks that each fits."""


KEPT_OUT: dict[Callable[[Training], None], str] = {**FIRST, **SECOND}
"""Two dozens by authors who do not know the laws; nobody who writes laws reads them."""


def programs(*, kept_out: bool) -> list[str]:
    """Names of the programs of one part."""
    table = KEPT_OUT if kept_out else TABLE
    return [f"{task}:{technique.__name__}" for technique, tasks in table.items() for task in tasks.split()]


def program(name: str, seed: int) -> Training:
    """The training of a program, ready to run."""
    task, _, technique = name.partition(":")
    made = training(task, seed)
    next(each for each in (*TABLE, *KEPT_OUT) if each.__name__ == technique)(made)
    return made


def watched(name: str, seed: int) -> Watched:
    """A program under the watch; for a process of a pool."""
    torch.set_num_threads(1)
    return run_watched(lambda watch, number: program(name, number).run(watch), seed)
