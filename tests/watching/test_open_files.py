"""Each tensor of a DataLoader worker is an open file of this process: the flight recorder must not hold them open."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests import forked
from trainwright.recorder.program import Call, Operation, constants_of
from trainwright.replay.session import ReplaySession

LOOP = """
import os, resource
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import trainwright as tw

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
if __name__ == "__main__":
    model = nn.Linear(16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(320, 16), torch.randint(3, (320,))), batch_size=2, num_workers=2)
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True, accumulation=4) as watch:
        for number, (x, y) in enumerate(loader, 1):
            (nn.functional.cross_entropy(model(x), y) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    print(watch.step, len(os.listdir("/proc/self/fd")) < 64)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the files in /proc")
def test_a_watch_of_160_batches_of_workers_keeps_few_files_open() -> None:
    """The inputs of 32 steps of 4 batches would be 128; labels are so small that they are copied in any case."""
    done = forked.run(LOOP)
    assert done.stdout.split() == ["40", "True"], done.stderr


def test_a_step_on_shared_memory_is_the_same_bits_from_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wide = torch.randn(16, 12).share_memory_()
    labels = torch.randint(3, (16,)).share_memory_()
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        session = watch.session
        for _ in range(5):
            optimizer.zero_grad()
            for half in (slice(0, 8), slice(8, 16)):  # views, with a stride that is not their width
                nn.functional.cross_entropy(model(wide[half, 1:9]), labels[half]).backward()
            optimizer.step()
            wide.mul_(0.9)  # a worker's memory is used again
        recorded = session.ring.steps[-1]
        inputs = [c.tensor for each in recorded.calls for c in constants_of(each.args)]
        replayed = ReplaySession(session.runner.replayer, session.ring, recorded.step).run(upto="step")
    parts = [each for each in recorded.program if isinstance(each, Call | Operation)]
    held: list[Tensor] = [c.tensor for each in parts for c in constants_of((each.args, each.kwargs))]
    assert held and not any(tensor.is_shared() for tensor in held if not tensor.requires_grad)
    assert [(x.stride(), x.storage_offset()) for x in inputs] == [((12, 1), 1), ((12, 1), 8 * 12 + 1)]
    assert inputs[0].untyped_storage().data_ptr() == inputs[1].untyped_storage().data_ptr()
    assert all(torch.equal(replayed.after[name], value) for name, value in model.named_parameters())
