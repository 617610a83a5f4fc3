"""The contract, optimizer and accumulation checks: each fires on its mechanism and is silent on the look-alike."""

from __future__ import annotations

from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Check, ExperimentRequest, Finding
from trainwright.doctor.gradient.names import accumulation
from trainwright.doctor.program.names import contract
from trainwright.doctor.update.names import rates
from trainwright.runlog.records import Examined, Watched

BACKWARD = ("backward", {"carried": True, "cut": False, "retain": False})
ZERO = ("zero_grad", 0)
STEP = ("step", {"optimizer": 0, "autocast": False})


def clip(at: float = 1.0, norm: float = 5.0, parameters: int = 6) -> tuple[str, dict[str, Any]]:
    return ("clip", {"by": "norm", "at": at, "norm": norm, "parameters": parameters})


def watched(step: int, *events: Any, loss: float = 2.0, **values: Any) -> Watched:
    return Watched(
        time_s=0.0, step=step, loss=loss, grad_norm=values.pop("grad_norm", 5.0), lr=0.1, events=events, values=values
    )


def examined(experiment: str, step: int, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=experiment, values=values)


def seen(step: int, **values: Any) -> Examined:
    """What the probe tells of a loop with nothing wrong, but for ``values``."""
    group = {"lr": 0.1, "parameters": 6, "with_grad": 6}
    plain = {
        "optimizers": [{"kind": "SGD", "parameters": 6, "stale": 0, "groups": [group]}],
        "missing": [], "missing_share": 0.0, "doubles": 0, "again": 0, "clips": 0, "scaled_clips": 0,
        "scaled_clip": None, "split_windows": [], "accumulation": None, "carried": [0.0],
    }  # fmt: skip
    return examined("contract", step, **{**plain, **values})


def updated(step: int, loss: float, after: float, **values: Any) -> Examined:
    plain = {
        "loss": loss, "after": after, "optimizers": 1, "lr": [0.1], "weight_decay": [0.0], "decoupled": False,
        "grad_norm": 1.0, "norm_at_clip": None, "weight_norm": 7.0, "update_norm": 0.1, "ratio": 0.01, "input_rms": 1.0,
    }  # fmt: skip
    return examined("update", step, **{**plain, **values})


def said(check: Check, *records: Any, finished: bool = False) -> list[str]:
    told = check(Case(list(records), finished=finished))
    return [each.found.code if isinstance(each, Finding) else f"wish {each.experiment}" for each in told]


def test_gradients_left_over_are_a_fault_only_while_nobody_drops_them_before_the_step() -> None:
    kept = [r for n in (1, 2, 3) for r in (watched(n, BACKWARD, STEP), seen(n, carried=[4.0 * (n > 1)]))]
    assert said(contract.missing_zero_grad, *kept) == ["opt.missing_zero_grad"]
    dropped = [r for n in (1, 2, 3) for r in (watched(n, BACKWARD, ZERO, BACKWARD, STEP), seen(n, carried=[4.0]))]
    assert said(contract.missing_zero_grad, *dropped) == []
    zeros = [r for n in (1, 2, 3) for r in (watched(n, BACKWARD, STEP), seen(n))]  # filled with 0 by hand
    assert said(contract.missing_zero_grad, *zeros) == []


def test_zero_grad_between_backward_and_step() -> None:
    lost = watched(1, BACKWARD, ZERO, STEP, grads=[0, 6], grad_norm=0.0)
    assert said(contract.zero_grad_before_step, lost) == ["opt.zero_grad_before_step"]
    attack = watched(1, BACKWARD, ZERO, BACKWARD, STEP, grads=[6, 6])
    assert said(contract.zero_grad_before_step, attack) == []


def test_no_step_is_a_fault_only_when_nothing_else_moves_the_weights() -> None:
    idle = seen(0, backwards=40, moved=False, steps_heard=0)
    assert said(contract.step_never_called, idle, finished=True) == ["opt.step_never_called"]
    assert said(contract.step_never_called, idle) == []  # it may still come
    by_hand = seen(0, backwards=40, moved=True, steps_heard=0)
    assert said(contract.step_never_called, by_hand, finished=True) == []


def test_a_clip_behind_the_step_has_no_effect() -> None:
    behind = [watched(1, BACKWARD, STEP), watched(2, clip(), ZERO, BACKWARD, STEP)]
    assert said(contract.clip_no_effect, *behind) == ["grad.clip_no_effect"]
    assert said(contract.clip_no_effect, watched(1, BACKWARD, clip(), STEP, grad_norm=1.0)) == []
    below = [watched(1, BACKWARD, STEP), watched(2, clip(at=9.0), ZERO, BACKWARD, STEP)]
    assert said(contract.clip_no_effect, *below) == []


def test_a_clip_of_nothing() -> None:
    assert said(contract.clip_empty_iterable, watched(1, BACKWARD, clip(norm=0.0, parameters=0), STEP)) == [
        "grad.clip_empty_iterable"
    ]
    assert said(contract.clip_empty_iterable, watched(1, BACKWARD, clip(norm=0.0), STEP)) == []


def test_a_clip_of_scaled_gradients_may_have_a_scaled_threshold() -> None:
    bad = seen(1, scaled_clip=[1.0, 70000.0, 65536.0], scaled_clips=1, clips=1)
    assert said(contract.clip_before_unscale, bad) == ["grad.clip_before_unscale"]
    meant = seen(1, scaled_clip=[65536.0, 70000.0, 65536.0], scaled_clips=1, clips=1)
    assert said(contract.clip_before_unscale, meant) == []


def test_weights_without_an_owner_are_stale_when_the_optimizer_holds_others_instead() -> None:
    step = watched(2, BACKWARD, STEP)
    missing = {"missing": ["0.weight"], "missing_share": 0.9}
    assert said(contract.owners, step, seen(2, **missing)) == ["opt.params_missing"]
    holds = [{"kind": "SGD", "parameters": 6, "stale": 6, "groups": []}]
    assert said(contract.owners, step, seen(2, **missing, optimizers=holds)) == ["opt.stale_params"]


def test_a_group_at_zero_is_a_fault_only_when_no_schedule_can_raise_it() -> None:
    def grouped(**more: float) -> list[dict[str, Any]]:
        groups = [{"lr": 0.1, "parameters": 4, "with_grad": 4}, {"lr": 0.0, "parameters": 2, "with_grad": 2, **more}]
        return [{"kind": "SGD", "parameters": 6, "stale": 0, "groups": groups}]

    steps = [watched(1, BACKWARD, STEP), watched(2, BACKWARD, STEP)]
    stuck = [seen(n, optimizers=grouped()) for n in (1, 2)]
    assert said(contract.zero_lr_group, *steps, *stuck) == ["opt.zero_lr_group"]
    rising = [seen(n, optimizers=grouped(initial_lr=0.1)) for n in (1, 2)]
    assert said(contract.zero_lr_group, *steps, *rising) == []


def test_an_update_that_worsens_its_own_batch_needs_a_smaller_one_that_does_not() -> None:
    run = [watched(1, BACKWARD, STEP), updated(1, 2.3, 9.0)]
    assert said(rates.overshoots, *run) == ["wish smaller_steps"]
    helps = examined("smaller_steps", 1, as_it_was=[2.3, 9.0, 40.0, 90.0], falls=0.1)
    assert "opt.lr_too_high" in said(rates.overshoots, *run, helps)
    not_the_rate = examined("smaller_steps", 1, as_it_was=[2.3, 9.0, 40.0, 90.0], falls=None)
    assert "opt.lr_too_high" not in said(rates.overshoots, *run, not_the_rate)


def test_a_warm_up_is_missing_only_if_the_whole_rate_is_well_after_it() -> None:
    stuck, falling = [3.7] * 16, [3.7 - 0.1 * n for n in range(16)]
    way = {"first": 1, "length": 16, "as_it_was": stuck, "tenth": falling, "warm_steps": 8}
    assert said(rates.no_progress, examined("along_the_way", 16, **way, warm=falling)) == ["sched.no_warmup"]
    lost_again = [*falling[:8], *[9.0] * 8]
    record = watched(16, loss=3.7)
    assert said(rates.no_progress, record, examined("along_the_way", 16, **way, warm=lost_again)) == ["opt.lr_too_high"]
    way |= {"as_it_was": [0.1, *[-0.1, 0.1] * 7, 0.1], "tenth": [-each for each in falling]}  # of both signs
    assert said(rates.no_progress, record, examined("along_the_way", 16, **way, warm=lost_again)) == []
    way |= {"as_it_was": [0.4, *[0.1, 0.6] * 7, 0.6]}
    assert said(rates.no_progress, record, examined("along_the_way", 16, **way, warm=lost_again)) == ["opt.lr_too_high"]
    way |= {"as_it_was": falling, "tenth": falling}  # it learns as it is
    assert said(rates.no_progress, examined("along_the_way", 16, **way, warm=falling)) == []


def test_a_rate_is_too_low_only_if_a_larger_one_helps_and_none_is_to_come() -> None:
    tiny = [updated(n, 2.3, 2.3, ratio=1e-7, lr=[1e-8]) for n in (1, 2)]
    steps = [watched(1, BACKWARD, STEP), watched(2, BACKWARD, STEP)]
    larger = examined("larger_lr", 2, as_it_was=[2.3] * 4, larger=[[1e4, [2.3, 2.2, 2.1, 2.0]]])
    assert said(rates.lr_too_low, *steps, *tiny, larger)[-1] == "opt.lr_too_low"
    flat = examined("larger_lr", 2, as_it_was=[2.3] * 4, larger=[[1e4, [2.3] * 4]])
    assert said(rates.lr_too_low, *steps, *tiny, flat) == ["wish larger_lr"]
    warming = [{"kind": "SGD", "parameters": 6, "stale": 0, "groups": [{"lr": 1e-8, "initial_lr": 0.1}]}]
    assert said(rates.lr_too_low, *steps, *tiny, larger, seen(2, optimizers=warming)) == []


def test_gradients_explode_through_time_only_along_a_chain_that_grows() -> None:
    large = updated(1, 1.0, 1.0, grad_norm=1e4)

    def chain(factor: float) -> Examined:
        told = {"length": 64, "factor": factor, "first": 300.0, "last": 0.01, "fit": -0.99}
        return examined("through_time", 1, chains=[told], grad_norm=1e4, largest="rnn.weight_hh_l0")

    assert said(rates.exploding, large, chain(1.15)) == ["wish through_time", "grad.exploding"]
    assert said(rates.exploding, large, chain(0.9)) == ["wish through_time"]


def window(step: int, **values: Any) -> Examined:
    plain = {"backwards": 4, "distinct": True, "same_functions": True, "weights": [0.25] * 4, "counts": [16.0] * 4}
    more = {"discarded": 0, "norm_then": 1.0, "norm_now": 1.0}
    return examined("accumulation", step, **{**plain, **more, **values})


def test_a_window_is_a_sum_when_every_micro_batch_has_the_weight_of_a_whole_batch() -> None:
    assert said(accumulation.not_normalised, window(1, weights=[1.0] * 4)) == ["accum.not_normalised"]
    assert said(accumulation.not_normalised, window(1)) == []
    assert (
        said(accumulation.not_normalised, window(1, weights=[1.0] * 4, distinct=False)) == []
    )  # two losses, one batch
    by_hand = window(1, weights=[1.0] * 4, norm_then=0.25)  # the loop divides the gradients
    assert said(accumulation.not_normalised, by_hand) == []


def test_uneven_counts_are_asked_about_only_with_even_weights() -> None:
    counts = [17.0, 26.0, 7.0, 29.0]
    assert said(accumulation.token_weighting, window(1, counts=counts)) == ["wish token_weights"]
    assert said(accumulation.token_weighting, window(1, counts=counts, weights=[n / 79 for n in counts])) == []
    assert said(accumulation.token_weighting, window(1, counts=[16.0, 16.0, 16.0, 8.0])) == []  # the last of an epoch
    at_random = [window(n, counts=[3.0, 6.0, 5.0, 8.0]) for n in (1, 2)]  # samples without a label, here and there
    assert said(accumulation.token_weighting, *at_random) == []
    off = examined("token_weights", 1, counts=counts, off=0.4, loss=0.93, loss_by_count=0.92)
    assert "accum.token_weighting" in said(accumulation.token_weighting, window(1, counts=counts), off)


def test_discarded_micro_batches() -> None:
    lost = [window(n, discarded=3) for n in (1, 2)]
    assert said(accumulation.grads_discarded, *lost) == ["accum.grads_discarded"]
    attacks = [window(n, discarded=1, distinct=False) for n in (1, 2)]  # a backward pass for the inputs comes first
    assert said(accumulation.grads_discarded, *attacks) == []


def test_a_leftover_window_is_longer_than_the_others() -> None:
    usual = [watched(n, *[BACKWARD] * 4, STEP) for n in range(1, 5)]
    leaked = [*usual, watched(5, *[BACKWARD] * 6, STEP), seen(5, split_windows=[[5, 2, 6]])]
    assert said(accumulation.leftover_window, *leaked) == ["accum.leftover_window"]
    across = [*usual, watched(5, *[BACKWARD] * 4, STEP), seen(5, split_windows=[[5, 2, 4]])]
    assert said(accumulation.leftover_window, *across) == []
    by_tokens = [watched(n, *[BACKWARD] * (3 + n % 3), STEP) for n in range(1, 10)]
    assert said(accumulation.leftover_window, *by_tokens, seen(8, split_windows=[[8, 1, 5]])) == []


def test_a_wish_is_for_the_step_that_was_seen() -> None:
    told = list(rates.overshoots(Case([watched(3, BACKWARD, STEP), updated(3, 2.0, 8.0)])))
    assert told == [ExperimentRequest("smaller_steps", 3)]
