from data import CHARACTERS, characters
from model import base


def test_the_model_gives_one_logit_for_each_character() -> None:
    ids, following = characters("val", block_size=16)[:2]
    assert ids[:, 1:].equal(following[:, :-1])
    model = base(vocabulary=len(CHARACTERS), block_size=16)
    assert model(ids).logits.shape == (2, 16, len(CHARACTERS))
