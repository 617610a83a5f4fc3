import torch

from data import CHARACTERS, characters
from model import GPT


def test_no_position_sees_what_comes_after_it() -> None:
    ids, following = characters("val", block_size=16)[:2]
    assert torch.equal(ids[:, 1:], following[:, :-1])
    model = GPT(len(CHARACTERS), block_size=16, layers=1, heads=2, width=8)
    other = ids.clone()
    other[:, 8:] = 0
    torch.testing.assert_close(model(ids)[:, :8], model(other)[:, :8])
