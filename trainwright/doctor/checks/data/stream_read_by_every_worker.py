from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import RowsFacts

MIN_EQUAL_GROUPS = 4  # Groups of equal batches with different rows. Fewer may be chance.


@check(points_at="dataset", stage="input", confidence=0.95)
def stream_read_by_every_worker(run: RunContext, facts: RowsFacts) -> Results:
    """Every worker yields the full stream, so each sample comes once per worker in an epoch.

    How it is detected: with n workers reading an IterableDataset, n consecutive batches are equal. This happens at
    least 4 times, each time with other rows.

    Usual cause: `__iter__` of the IterableDataset does not split the stream between the workers. Each worker has a copy
    of the data set.

    Fix: let each worker yield its own part of the stream, by `torch.utils.data.get_worker_info()`.

        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from itertools.islice(stream, start, None, step)

    Sources: huggingface/datasets#3423, pytorch/pytorch#30599, NTMC-Community/MatchZoo-py PR 169.
    """
    if facts.workers < 2:
        yield NotApplicable("no loader has several workers that read a stream")
    elif facts.groups >= MIN_EQUAL_GROUPS and facts.equal_groups == facts.groups:
        yield run.finding(
            symptom=f"{facts.workers} batches in a row are equal, {facts.groups} times: each worker yields all samples",
            where=Where(source=facts.source),
            evidence=[("groups of equal batches", facts.equal_groups, 0), ("workers", facts.workers)],
        )
