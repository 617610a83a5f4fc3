"""The checks of data and loaders fire on their mechanism and stay silent on its look-alikes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.data.names import inputs, loaders
from trainwright.doctor.finding import Check, ExperimentRequest, Finding
from trainwright.runlog.records import Examined, Watched


def exam(step: int, experiment: str, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=experiment, values=values)


def said(check: Check, *records: Any) -> list[Finding]:
    return [each for each in check(Case(records)) if isinstance(each, Finding)]


def wished(check: Check, *records: Any) -> list[str]:
    return [each.experiment for each in check(Case(records)) if isinstance(each, ExperimentRequest)]


def severities(found: Sequence[Finding]) -> list[str]:
    return [each.found.severity for each in found]


def numbers(mean: float, std: float, **more: Any) -> dict[str, Any]:
    told = {"shape": [64, 20], "float": True, "constant": False, "whole": False, "absmax": abs(mean) + 3 * std}
    return told | {"mean": mean, "std": std} | more


def batch(step: int, *inputs: dict[str, Any], **more: Any) -> Examined:
    return exam(step, "batch", inputs=list(inputs), classes=10, targets_vary=True, pad=None, leaks=[], **more)


def test_large_inputs_are_to_blame_only_if_standardised_ones_are_not() -> None:
    large = batch(1, numbers(110.0, 40.0))
    assert wished(inputs.badly_scaled, large) == ["standardised"]
    helps = exam(1, "standardised", as_it_was=[24.0, 20.0], standardised=[2.4, 2.0])
    too_large_weights = exam(1, "standardised", as_it_was=[24.0, 20.0], standardised=[19.0, 15.0])
    assert [f.found.code for f in said(inputs.badly_scaled, large, helps)] == ["data.unnormalised_input"]
    assert not said(inputs.badly_scaled, large, too_large_weights)
    assert not list(inputs.badly_scaled(Case([batch(1, numbers(0.5, 0.3))])))


def test_inputs_that_hardly_vary() -> None:
    small = batch(1, numbers(-1.0, 0.004))
    helps = exam(1, "standardised", as_it_was=[2.31, 2.30], standardised=[2.33, 1.90])
    normalised_inside = exam(1, "standardised", as_it_was=[2.33, 1.90], standardised=[2.33, 1.90])
    assert [f.found.code for f in said(inputs.badly_scaled, small, helps)] == ["data.double_normalised"]
    assert not said(inputs.badly_scaled, small, normalised_inside)


def test_a_constant_input_beside_one_that_varies_is_fine() -> None:
    same = numbers(0.0, 0.0, constant=True)
    assert severities(said(inputs.constant_input, batch(1, same))) == ["critical"]
    assert not said(inputs.constant_input, batch(1, same, numbers(0.0, 1.0)))
    dummy = same | {"shape": [64, 1]}
    assert severities(said(inputs.constant_input, batch(1, dummy))) == ["info"]


def test_a_leak_is_believed_when_seen_twice() -> None:
    leak = {"column": 3, "within": 0.0, "samples": 60}
    one, two = (exam(step, "batch", inputs=[], leaks=[leak]) for step in (1, 2))
    other = exam(2, "batch", inputs=[], leaks=[leak | {"column": 7}])
    assert not said(inputs.target_leak, one)
    assert severities(said(inputs.target_leak, one, two)) == ["warning"]
    assert not said(inputs.target_leak, one, other)


@each_row(("gradient", "findings"), [(0.002, 1), (0.0, 0)])
def test_padding_counts_if_the_loss_has_a_gradient_there(gradient: float, findings: int) -> None:
    padded = exam(1, "batch", inputs=[], pad={"id": 0, "side": "end", "rows": 0.9, "share": 0.4})
    assert wished(inputs.pad_in_loss, padded) == ["padding_in_loss"]
    known = {"id": 0, "side": "end", "rows": 0.9, "share": 0.4, "elsewhere": 0.002}
    asked = exam(1, "padding_in_loss", at_padding=gradient, **known)
    assert len(said(inputs.pad_in_loss, padded, asked)) == findings


@each_row(("deviations", "memorised", "findings"), [(0.3, 0.5, 1), (9.0, 0.5, 0), (0.3, 2.29, 0)])
def test_labels_of_other_samples(deviations: float, memorised: float, findings: int) -> None:
    steps = [Watched(time_s=0.0, step=step, loss=2.3, grad_norm=1.0, lr=1e-3) for step in range(1, 33)]
    seen = exam(32, "batch", inputs=[], classes=10, entropy=2.29, samples=1024)
    signal = exam(
        32, "label_signal", samples=1024, classes=10, entropy=2.29, deviations=deviations, memorised=[2.3, memorised]
    )
    assert wished(inputs.label_feature_misaligned, *steps, seen) == ["label_signal"]
    assert len(said(inputs.label_feature_misaligned, *steps, seen, signal)) == findings


def test_an_empty_loader_has_no_length() -> None:
    facts = {"epochs": 1, "samples": 20, "batch_size": 32, "drop_last": True}
    assert severities(said(loaders.empty_loader, exam(0, "loaders", empty=[facts | {"length": 0}]))) == ["critical"]
    assert not said(loaders.empty_loader, exam(0, "loaders", empty=[facts | {"length": 3}]))


def repeat(**more: Any) -> Examined:
    told = {"equal": 8, "batches": 8, "samples": 512, "ascending": False, "random": True, "distributed": False}
    return exam(16, "loaders", repeats=[told | {"sampler": "RandomSampler", "whole": True} | more])


def test_the_same_order_is_a_fault_of_a_sampler_that_should_draw_another() -> None:
    assert severities(said(loaders.same_order, repeat())) == ["warning"]
    assert severities(said(loaders.same_order, repeat(random=False, sampler="list"))) == ["info"]
    assert not said(loaders.same_order, repeat(ascending=True))
    assert not said(loaders.same_order, repeat(equal=3))


def test_shared_samples_are_meant_where_another_evaluation_has_none() -> None:
    shared = {"samples": 128, "shared": 128, "trained": 512, "same_loader": False, "ids": [1, 2]}
    apart = shared | {"shared": 0}
    assert severities(said(loaders.train_val_overlap, exam(9, "loaders", overlaps=[shared]))) == ["warning"]
    assert severities(said(loaders.train_val_overlap, exam(9, "loaders", overlaps=[shared, apart]))) == ["info"]
    assert not said(loaders.train_val_overlap, exam(9, "loaders", overlaps=[apart]))


def test_workers_that_draw_alike() -> None:
    seen = {"random": True, "equal_workers": True, "equal_epochs": False, "workers": 2, "init": False}
    found = said(loaders.worker_rng_duplicate, exam(1, "loaders", draws=seen | {"with_seeds": False}))
    assert severities(found) == ["warning"] and found[0].found.tried
    assert not said(loaders.worker_rng_duplicate, exam(1, "loaders", draws=seen | {"random": False}))
    assert not said(loaders.worker_rng_duplicate, exam(1, "loaders", draws=seen | {"equal_workers": False}))


def test_pure_batches_are_held_against_mixed_ones() -> None:
    def seen(entropy: float, mixed: list[float]) -> Examined:
        return exam(2, "loaders", labels={"entropies": [entropy] * 4, "mixed": mixed}, ascending=True)

    assert severities(said(loaders.unshuffled, seen(0.2, [2.0, 2.1]))) == ["critical"]
    assert not said(loaders.unshuffled, seen(2.05, [2.0, 2.1]))
    assert not said(loaders.unshuffled, seen(0.02, [0.0, 0.05]))  # nearly all of one class
    assert not said(loaders.unshuffled, seen(0.2, [0.1, 0.45]))  # batches of two
    sampled = exam(2, "loaders", labels={"entropies": [0.2] * 4, "mixed": [2.0, 2.1]}, ascending=False)
    assert severities(said(loaders.unshuffled, sampled)) == ["info"]
