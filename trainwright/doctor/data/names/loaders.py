"""Checks of the data loaders: that they give samples, in a new order, and none of the evaluation's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import SharedSamplesFacts
from trainwright.doctor.finding import Finding, OldCheck, RemedyTrial, finding
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Tried

SHARED = 0.01
"""Share of a validation set: less is a few samples that are in the data twice."""
FEW = 16
"""The order of so many samples repeats by chance once in 16! times."""


def empty_loader(case: Case) -> Iterator[Finding]:
    """Epochs began and no batch came, and the loader's own length is 0.

    A loader that was only made, or left before its first batch, has a length above 0. One without a length (an
    iterable) must be found empty twice.
    """
    for loader in case.facts("loaders").get("empty", ()):
        if loader["length"] not in (0, None) or (loader["length"] is None and loader["epochs"] < 2):
            continue
        why = f"it has {loader['samples']} samples, a batch has {loader['batch_size']}"
        why += ", and drop_last=True drops the incomplete one" if loader["drop_last"] else ""
        yield finding(
            "data.empty_loader",
            "critical" if not case.watched else "warning",
            case.last_step,
            symptom=f"a loader was iterated over {_times(loader['epochs'])} and gave no batch",
            cause=why if loader["samples"] is not None else "its dataset gives nothing",
            remedy="drop_last=False, or a smaller batch size"
            if loader["drop_last"]
            else "look at what the dataset reads",
            sure=1.0,
            stage="input",
            evidence=[
                ("batches in an epoch", 0, "> 0"),
                ("samples", loader["samples"]),
                ("drop_last", loader["drop_last"]),
            ],
            explains=("optim.step_never_called", "loop.*"),
        )
        return


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def same_order(case: Case) -> Iterator[Finding]:
    """Two epochs gave the same samples in the same order, and that order is not the order of the dataset.

    A sampler that draws a new order for each epoch (shuffle=True) and repeats the old one is seeded again. A custom
    sampler or a fixed sequence may be meant that way: that is an info.
    """
    repeats = [r for r in case.facts("loaders").get("repeats", ()) if _is_again(r)]
    if not repeats:
        return
    repeat = repeats[-1]
    meant = not repeat["random"]
    cause = (
        "DistributedSampler.set_epoch is not called"
        if repeat["distributed"]
        else "its generator starts from the same seed in each epoch: the loader is made anew with a seeded generator, "
        "or torch.manual_seed is called at the top of the epoch"
    )
    yield finding(
        "data.same_order_every_epoch",
        "info" if meant else "warning",
        case.last_step,
        symptom=f"an epoch gave the {repeat['equal']} batches of the one before it again, in the same order",
        cause=f"{repeat['sampler']} gives a fixed order; fine if that is intended" if meant else cause,
        remedy="call sampler.set_epoch(epoch) before each epoch"
        if repeat["distributed"]
        else "seed once before the first epoch, and keep one loader, or one generator, for the whole run",
        sure=0.5 if meant else 0.95,
        stage="input",
        evidence=[("equal batches in a row", repeat["equal"], 0), ("sampler", repeat["sampler"])],
        trial=None if meant else RemedyTrial("mixed_samples"),
    )


def _is_again(epoch: Facts) -> bool:
    """Whether the whole epoch, or all of it so far, repeats the one before."""
    samples = epoch["samples"]
    return epoch["equal"] == epoch["batches"] > 0 and samples >= FEW and not epoch["ascending"]


def train_val_overlap(case: Case) -> Iterator[Finding]:
    """Samples that were trained on are also used for evaluation, by their indices in the same dataset.

    To evaluate the training loss on purpose, a loop has another evaluation that shares nothing, or uses the training
    loader itself: that is an info. Of a run of the engine both data sets are known, and compared.
    """
    if (sets := case.newest(SharedSamplesFacts)) is not None:
        yield from _shared_by_sets(case, sets)
        return
    overlaps = [o for o in case.facts("loaders").get("overlaps", ()) if o["samples"]]
    shared = [o for o in overlaps if o["shared"] > SHARED * o["samples"]]
    if not shared:
        return
    worst = max(shared, key=lambda o: o["shared"] / o["samples"])
    share = worst["shared"] / worst["samples"]
    meant = len(shared) < len(overlaps) or worst["same_loader"]
    whole = worst["shared"] >= worst["trained"]
    yield finding(
        "data.train_val_overlap",
        "info" if meant else "warning",
        case.last_step,
        symptom=f"{share:.0%} of the samples of the evaluation ({worst['shared']}) are also trained on",
        cause="the same data is used for training and for evaluation"
        if whole
        else "the training loader takes all of the data, not only the part that was split off for training",
        remedy="give the training loader a Subset without the samples of the evaluation",
        sure=0.4 if meant else 0.95,
        stage="input",
        evidence=[
            ("shared samples", worst["shared"], 0),
            ("evaluated samples", worst["samples"]),
        ],
        trial=None if meant else RemedyTrial("apart_from_evaluation", {"ids": worst["ids"]}),
    )


def _shared_by_sets(case: Case, facts: SharedSamplesFacts) -> Iterator[Finding]:
    if facts.share <= SHARED or facts.shared <= facts.by_chance:
        return
    is_same = facts.shared == facts.compared and facts.samples == facts.trained
    about = "" if facts.trained_compared == facts.trained else "about "
    yield finding(
        "data.train_val_overlap",
        "info" if is_same else "warning",
        max(1, case.last_step),
        symptom=f"{about}{facts.share:.0%} of the validation set is in the training set too, by {facts.by}",
        cause="the training set itself is evaluated"
        if is_same
        else "the data were not split, or samples were copied before the split",
        remedy="split the data once, before anything else, and train on one part only",
        sure=0.95 if facts.by == "position" else 0.9,
        stage="input",
        evidence=[
            ("validation samples that are trained on", facts.shared, 0),
            ("validation samples that were compared", facts.compared, facts.samples),
            ("training samples that were compared", facts.trained_compared, facts.trained),
        ],
    )


def worker_rng_duplicate(case: Case) -> Iterator[Finding]:
    """Two workers read one sample several times: each read differs from the one before, and both workers agree.

    A dataset without randomness reads the same each time. The generators of torch, Python and NumPy are seeded by
    torch differently in each worker. Workers that start each epoch from the same state repeat the draws of the epoch
    before, even a single worker.
    """
    draws = case.facts("loaders").get("draws", {})
    if not draws.get("random"):
        return
    among, again = draws["equal_workers"] and draws["workers"] > 1, draws["equal_epochs"]
    if not among and not again:
        return
    found = finding(
        "data.worker_rng_duplicate",
        "warning",
        case.last_step,
        symptom=f"the {draws['workers']} workers draw the same random numbers"
        if among
        else "the workers draw the same random numbers in every epoch",
        cause="worker_init_fn gives each worker the same seed"
        if draws["init"]
        else "the dataset holds a random generator of its own, and each worker starts with a copy of its state",
        remedy="seed that generator in worker_init_fn from torch.initial_seed(), which differs by worker and epoch",
        sure=0.95,
        stage="input",
        evidence=[
            ("one sample read in two workers", "equal" if among else "different", "different"),
            ("one sample read in two epochs", "equal" if again else "different", "different"),
            ("one sample read twice by one worker", "different", "different"),
        ],
    )
    if "with_seeds" in draws:
        result = "the same draws as before" if draws["with_seeds"] else "the draws differ between workers and epochs"
        tried = Tried(remedy="worker_init_fn that seeds from torch.initial_seed()", result=result)
        found = dataclasses.replace(found, found=dataclasses.replace(found.found, tried=(tried,)))
    yield found


def unshuffled(case: Case) -> Iterator[Finding]:
    """Each batch holds few classes while the data holds many, by the entropy of the labels that the loss gets.

    The reference are batches of the same size drawn at random from all labels so far, or from samples all over the
    dataset: data of mostly one class, and tiny batches, have a low entropy there too.
    """
    facts = case.facts("loaders")
    labels = facts.get("labels") or {}
    entropies, mixed = labels.get("entropies", ())[:16], labels.get("mixed")
    if len(entropies) < 2 or not mixed:
        return
    mean, (lowest, whole) = sum(entropies) / len(entropies), mixed
    if whole < 0.2 or mean > 0.5 * whole or mean >= lowest:
        return
    as_it_lies = facts["ascending"]
    yield finding(
        "data.unshuffled",
        "critical" if as_it_lies else "info",
        case.last_step,
        symptom=f"batches hold hardly more than one class each: label entropy {mean:.2f}, shuffled ones {whole:.2f}",
        cause="the data is sorted by class and read in its order (shuffle=False)"
        if as_it_lies
        else "the sampler puts samples of one class together; fine if classes are learned one after the other",
        remedy="shuffle=True",
        sure=0.9 if as_it_lies else 0.7,
        stage="input",
        evidence=[("label entropy of a batch", round(mean, 3), round(whole, 3)), ("batches looked at", len(entropies))],
        trial=RemedyTrial("mixed_samples"),
        explains=("optim.lr_too_high", "data.label_noise"),
    )


NAMES: tuple[OldCheck, ...] = (
    empty_loader,
    same_order,
    train_val_overlap,
    worker_rng_duplicate,
    unshuffled,
)
