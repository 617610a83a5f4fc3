from collections.abc import Iterator

from trainwright.doctor import Results, RunContext, Where, check
from trainwright.runs.records import OutOfMemory


def _remedies(seen: OutOfMemory, leaks: bool) -> Iterator[str]:
    """Yields measures that free memory, each with an upper bound of the freed memory, largest first."""
    if leaks:
        yield "look for what grows: losses, outputs or batches that are kept without detach()"
    activations, optimizer, average = seen.given_back_bytes, seen.held.get("optimizer", 0), seen.held.get("average", 0)
    if seen.reserved_bytes and seen.reserved_bytes > 1.2 * seen.in_use_bytes:
        waste = seen.reserved_bytes - seen.in_use_bytes
        yield f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: {_gib(waste)} are reserved in pieces too small to use"
    remedies = [
        (activations, f"model.activation_checkpointing: block frees most of {_gib(activations)} of activations"),
        (activations // 2, f"precision: bf16 frees up to half of them, {_gib(activations // 2)}"),
        (optimizer // 2, f"optimizer.use: sgd or adafactor frees {_gib(optimizer // 2)} or more"),
        (average, f"model.ema: null or model.swa: null frees {_gib(average)}"),
    ]
    if seen.phase == "loss":
        yield "loss.chunked: true, so that the logits never exist as a whole"
    yield from (remedy for num_bytes, remedy in sorted(remedies, reverse=True) if num_bytes > 0.02 * seen.in_use_bytes)
    if seen.next_micro is not None:
        yield f"batch.micro: {seen.next_micro} from the start"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


@check(stage="forward", confidence=0.95)
def out_of_memory(run: RunContext) -> Results:
    """A step ran out of memory.

    How it is detected: the engine of `tw.fit` and recipes records each attempt that ran out of memory, with the memory
    in use at that time.

    Usual cause: the micro-batch is too large for the device. Or memory is not released between steps: then the memory
    in use after each attempt grows.

    Fix: activation checkpointing, bfloat16, or a smaller micro-batch (`batch.micro: auto` chooses it).
    """
    tries = [record for record in run.records if isinstance(record, OutOfMemory)]
    if not tries:
        return
    last, given_up = tries[-1], tries[-1].next_micro is None
    left = [each.in_use_bytes - each.given_back_bytes for each in {each.step: each for each in tries}.values()]
    leaks = len(left) >= 3 and left == sorted(left) and left[-1] > 1.1 * left[0]
    kinds = {**last.held, "activations and temporaries": last.given_back_bytes}
    largest = [kind for kind in sorted(kinds, key=lambda kind: -kinds[kind])[:3] if kinds[kind]]
    held = ", ".join(f"{kind} {_gib(kinds[kind])}" for kind in largest)
    then = "and gave up" if given_up else f"and went on with {last.next_micro} at a time"
    where = f" in {last.module}" if last.module else ""
    yield run.finding(
        last.step,
        since_step=tries[0].step,
        symptom=f"step {last.step} ran out of memory ({last.phase}{where}) with {last.micro} samples at a time, {then}",
        cause="the memory held between steps grows: something is not released, so smaller micro-batches run out, too"
        if leaks
        else f"{_gib(last.in_use_bytes)} in use: {held}",
        remedy="; ".join(_remedies(last, leaks)),
        severity="critical" if given_up else None,
        stage="backward" if last.phase == "backward" else "forward",
        where=Where(module=last.module or None),
        evidence=[
            ("bytes in use when it ran out", last.in_use_bytes, f"at most {last.capacity_bytes}"),
            ("bytes that were freed when the attempt was given up: activations, temporaries", last.given_back_bytes),
            *((f"bytes of {kind}", held) for kind, held in last.held.items() if held),
            ("steps that ran out", len(left), 0),
        ],
    )
