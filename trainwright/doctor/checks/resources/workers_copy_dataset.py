from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.resources import MemoryFacts

MIN_OBJECTS = 100_000  # Minimum number of Python objects in the dataset
MIN_BYTES_PER_OBJECT = 6  # A tenth of the bytes of an object. Reading one copies the page with its reference count.


@check(stage="input")
def workers_copy_dataset(run: RunContext, facts: MemoryFacts) -> Results:
    """Each worker of the loader makes a copy of the dataset in its own memory.

    How it is detected: the memory that a worker shares with no other process is read from time to time. It grows by at
    least 1 MiB, and by at least 6 bytes for each Python object in the lists and dicts of the dataset. The dataset has
    at least 100,000 of these objects.

    Usual cause: a dataset holds lists or dicts of Python objects. Reading one in a forked worker writes its reference
    count, which copies its memory page.

    Fix: store the data in NumPy arrays, tensors or Arrow tables instead of lists and dicts.

    Sources: pytorch/pytorch #13246, #20433.
    """
    if facts.objects < MIN_OBJECTS or len(facts.private_bytes) < 2:
        return
    grown = facts.private_bytes[-1] - facts.private_bytes[0]
    if grown >= max(MIN_BYTES_PER_OBJECT * facts.objects, 2**20):
        yield run.finding(
            symptom=f"each worker has {grown / 2**20:.0f} MiB more private memory than at first",
            evidence=[
                ("growth of a worker's private memory, bytes", grown, 0),
                ("Python objects in the dataset", facts.objects, 0),
            ],
        )
