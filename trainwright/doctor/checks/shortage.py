"""Memory that ran out: what held it, and what would free most of it."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, Wish, check, finding
from trainwright.runlog.records import OutOfMemory, Where


@check
def ran_out(case: Case) -> Iterator[Finding | Wish]:
    """A try of a step ran out. The run went on with smaller micro-batches, or gave up."""
    tries = [record for record in case.records if isinstance(record, OutOfMemory)]
    if not tries:
        return
    first, last = tries[0], tries[-1]
    given_up = last.next_micro is None
    leaks = _grows(tries)
    then = "and gave up" if given_up else f"and went on with {last.next_micro} at a time"
    where = f" in {last.module}" if last.module else ""
    yield finding(
        "mem.ran_out",
        "critical" if given_up else "warning",
        last.step,
        since_step=first.step,
        symptom=f"step {last.step} ran out of memory ({last.phase}{where}) with {last.micro} samples at a time, {then}",
        cause=(
            "what is held between steps grows, so that ever smaller micro-batches run out: something is not let go of"
            if leaks
            else f"of {_gib(last.in_use_bytes)} in use, {_held(last)}"
        ),
        remedy="; ".join(_remedies(last, leaks)),
        sure=0.95,
        stage="backward" if last.phase == "backward" else "forward",
        where=Where(module=last.module or None),
        evidence=[
            ("bytes in use when it ran out", last.in_use_bytes, f"at most {last.capacity_bytes}"),
            ("bytes that letting go of the try freed: activations, temporaries", last.given_back_bytes),
            *((f"bytes of {kind}", held) for kind, held in last.held.items() if held),
            ("steps that ran out", len({each.step for each in tries}), 0),
        ],
    )


def _grows(tries: list[OutOfMemory]) -> bool:
    """Three steps ran out, each with smaller micro-batches than the one before, and none had less left over."""
    last_of_step = list({each.step: each for each in tries}.values())
    left = [each.in_use_bytes - each.given_back_bytes for each in last_of_step]
    return len(left) >= 3 and left == sorted(left) and left[-1] > 1.1 * left[0]


def _held(seen: OutOfMemory) -> str:
    kinds = {**seen.held, "activations and temporaries": seen.given_back_bytes}
    largest = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
    return ", ".join(f"{kind} take {_gib(kinds[kind])}" for kind in largest if kinds[kind])


def _remedies(seen: OutOfMemory, leaks: bool) -> Iterator[str]:
    """What would free most first; each with the most that it can free."""
    if leaks:
        yield "look for what grows: losses, outputs or batches that are kept without detach()"
    activations, optimizer = seen.given_back_bytes, seen.held.get("optimizer", 0)
    if seen.reserved_bytes and seen.reserved_bytes > 1.2 * seen.in_use_bytes:
        waste = seen.reserved_bytes - seen.in_use_bytes
        yield f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: {_gib(waste)} are reserved in pieces too small to use"
    ways = [
        (activations, f"model.activation_checkpointing: block frees most of {_gib(activations)} of activations"),
        (activations // 2, f"precision: bf16 frees up to half of them, {_gib(activations // 2)}"),
        (optimizer // 2, f"optimizer.use: sgd or adafactor frees {_gib(optimizer // 2)} or more"),
        (seen.held.get("average", 0), f"model.ema: null frees {_gib(seen.held.get('average', 0))}"),
    ]
    if seen.phase == "loss":
        yield "loss.chunked: true, so that the logits never exist as a whole"
    yield from (said for num_bytes, said in sorted(ways, reverse=True) if num_bytes > 0.02 * seen.in_use_bytes)
    if seen.next_micro is not None:
        yield f"batch.micro: {seen.next_micro} from the start, which `trainwright batch-size` finds with a margin"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
