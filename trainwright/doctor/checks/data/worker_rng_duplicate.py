import dataclasses

from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts
from trainwright.runs.records import Tried


@check(points_at="loader", stage="input", confidence=0.95)
def worker_rng_duplicate(run: RunContext, facts: LoadersFacts) -> Results:
    """The workers of a loader draw the same random numbers.

    Why it matters: augmentation is repeated by each worker or in each epoch. There is no error, but the score is worse.

    How it is detected: two workers each read the same sample twice, in each of two epochs. The two reads by one worker
    differ, so they are random, but the values are equal in both workers or in both epochs.

    Exceptions: the global generators of torch, Python and NumPy, which PyTorch seeds for each worker.

    Usual cause: the data set holds a random generator of its own, and each worker starts with a copy of its state; or
    `worker_init_fn` gives each worker the same seed.

    Fix: seed that generator in `worker_init_fn` from `torch.initial_seed()`, which differs by worker and epoch.

        def worker_init_fn(worker_id):
            seed = torch.initial_seed() % 2**32
            torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(seed)

    Sources: pytorch/pytorch#5059, CenterNet#233, fairseq#1383.
    """
    drawn = facts.workers
    if drawn is None or not drawn.random:
        return
    among = drawn.equal_workers and drawn.workers > 1
    if not among and not drawn.equal_epochs:
        return
    found = run.finding(
        symptom=f"the {drawn.workers} workers draw the same random numbers"
        if among
        else "the workers draw the same random numbers in every epoch",
        cause="worker_init_fn gives each worker the same seed" if drawn.init else "",
        where=Where(source=facts.source),
        evidence=[
            ("one sample read in two workers", "equal" if among else "different", "different"),
            ("one sample read in two epochs", "equal" if drawn.equal_epochs else "different", "different"),
        ],
    )
    if drawn.with_seeds is not None:
        result = "the same draws as before" if drawn.with_seeds else "the draws differ between workers and epochs"
        tried = Tried(remedy="worker_init_fn that seeds from torch.initial_seed()", result=result)
        found = dataclasses.replace(found, found=dataclasses.replace(found.found, tried=(tried,)))
    yield found
