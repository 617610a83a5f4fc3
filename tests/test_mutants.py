"""The bed of mutants and the healthy programs: what they are made of. What the doctor says of them is measured."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks import laws
from trainwright.doctor.diagnose import LAWS
from zoo import mutant_bed, programs
from zoo.mutant_runs import Outcome, harm, host_outcomes, run_plainly, silent_watch, verdict
from zoo.mutate import FURTHER, HOSTS, by_name, drawn, is_kept_out, program, sites
from zoo.mutation_operators import OPERATORS

BEST = {"lora": 0.9, "contrast": 0.9, "policy": -0.8, "diffusion": 0.55, "gan": 0.06, "multitask": 1.1}
"""The loss that a host stays below; at chance it is 1.39, 4.16, -0.2, 1, 0.4 and 3."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("host", BEST)
def test_a_host_learns(host: str) -> None:
    """Those that take less than half a second; the others have their verdicts."""
    outcome = run_plainly(host, program(host).source, 0)
    assert outcome.error is None and outcome.steps >= 60
    assert next(iter(outcome.quality.values())) < BEST[host]
    assert set(outcome.gaps) == set(outcome.shown), "what a host shows can be compared with what is true"


def test_sites_are_the_same_each_time() -> None:
    for name in ("drop", "wrong_object", "stale"):
        assert sites.__wrapped__("lora", name) == sites("lora", name)


def test_every_operator_changes_some_host() -> None:
    for name in OPERATORS:
        mutants = sites("multitask", name) or sites("pictures", name)
        assert mutants, name
        assert all(each.source != program(each.host).source for each in mutants)
        assert len({each.source for each in mutants}) == len(mutants)


def test_a_mutant_keeps_its_name_and_says_what_it_changed() -> None:
    mutant = drawn("gan", "drop")[0]
    assert by_name(mutant.name).source == mutant.source
    assert mutant.diff.startswith(f"gan.py:{mutant.line}: ") and "->" in mutant.diff


def test_neither_the_watch_nor_the_report_is_changed() -> None:
    for mutant in (each for name in OPERATORS for each in sites("lora", name)):
        kept = [line for line in mutant.source.splitlines() if "with watch(" in line or "return Report(" in line]
        assert [line.strip() for line in kept] == [
            "with watch(model, optimizer, loader=train_batches, scheduler=scheduler):",
            'return Report(model, {"loss": val_loss, "accuracy": accuracy}, losses)',
        ], mutant.diff


def test_a_third_of_the_pairs_is_kept_out() -> None:
    pairs = [is_kept_out(operator, host) for operator in OPERATORS for host in HOSTS]
    assert 0.25 < sum(pairs) / len(pairs) < 0.42  # two standard deviations of a third of 310


def test_the_verdicts_are_fresh() -> None:
    stale = [host for host in HOSTS if mutant_bed.is_stale(host)]
    assert stale == [], "run python -m benchmarks.mutants --judge"


def test_each_part_of_the_bed_has_every_host() -> None:
    for kept_out in (False, True):
        hosts = Counter(name.split(":")[0] for name in mutant_bed.bed(kept_out=kept_out))
        assert set(hosts) == set(HOSTS)
    assert not set(mutant_bed.bed(kept_out=False)) & set(mutant_bed.bed(kept_out=True))


@pytest.mark.slow
def test_the_wide_bed_has_further_sites_of_open_pairs_alone() -> None:
    wide = mutant_bed.judged(wide=True)
    assert wide and not set(wide) & set(mutant_bed.judged())
    assert not any(by_name(name).kept_out for name in wide)
    assert not any(mutant_bed.is_stale(host, wide=True) for host in HOSTS)


@pytest.mark.slow
def test_the_further_verdicts_are_on_mutants_of_the_further_hosts() -> None:
    further = [by_name(name) for name in mutant_bed.judged(further=True)]
    assert {each.host for each in further} == set(FURTHER)
    for mutant in further:
        compile(mutant.source, mutant.name, "exec")
        assert mutant.source != program(mutant.host).source and not mutant.kept_out
    assert not any(mutant_bed.is_stale(host) for host in FURTHER)
    assert {name.split(":")[0] for name in mutant_bed.bed(further=True)} == set(FURTHER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("optimizer.zero_grad()", "optimizer.zero_grad(); optimizer.zero_grad()", "equivalent"),
        ("loss.backward()", "loss.backwards()", "raises"),
        ("if val_loss < best:", "if val_loss < best and best / 0 > 1:", "raises late"),
        ("optimizer.step()", "pass", "harmful"),
        ("dropout=0.05", "dropout=0.06", "harmless"),
    ],
)
def test_a_planted_change_is_judged(before: str, after: str, kind: str) -> None:
    source = program("lora").source
    assert before in source
    assert verdict("lora", source.replace(before, after, 1)).kind == kind


@pytest.mark.slow
def test_what_is_shown_wrongly_is_harm() -> None:
    healthy = host_outcomes("lora")[0]
    assert harm("lora", healthy) == ""
    shown = {**healthy.shown, "accuracy": 1.0}
    assert harm("lora", Outcome(healthy.steps, None, "", healthy.quality, shown)).startswith("shows accuracy")


def test_the_place_of_a_finding_is_compared_with_the_change() -> None:
    mutant = next(each for each in sites("gan", "drop") if "optimizer_g.step()" in each.diff)
    assert mutant_bed.touched(mutant) == {"optimizer"}
    assert mutant_bed.fits_family("optim.step_never_called", mutant)
    assert not mutant_bed.fits_family("data.label_noise", mutant)


def test_the_programs_are_in_number_and_those_kept_out_are_others() -> None:
    names, unseen = programs.programs(kept_out=False), programs.programs(kept_out=True)
    assert len(set(names)) == len(names) >= 200
    assert not set(unseen) & set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["table:sign_through", "rebuild:spectral", "regress:sharpness_aware", "rebuild:moved_codes", "table:private"]
    + ["table:forward_forward", "table:merged_adapters", "rebuild:several_samples", "image:pseudo_labels"]
    + ["image:blackbox_ranks", "table:dual_ascent"]
    + programs.programs(kept_out=True),
)
def test_a_program_learns(name: str) -> None:
    training = programs.program(name, 0)
    training.epochs = 3
    training.run(silent_watch)
    assert sum(training.losses[-8:]) < 0.97 * sum(training.losses[:8])


@pytest.mark.slow
def test_what_became_of_each_law_is_known() -> None:
    """Under bf16: of fp32 are the healthy rows of the zoo."""
    seen = laws.watch("tables", "bf16", 0)
    assert seen.alarms == [] and set(seen.laws) == {law.name for law in LAWS}
    assert {"held", "not applicable"} <= set(seen.laws.values()) and "broken" not in seen.laws.values()
