from data import spirals
from model import make_model


def test_the_network_gives_one_logit_for_each_class() -> None:
    points, labels = spirals("val")[:5]
    assert make_model()(points).shape == (5, 3)
    assert labels.max() < 3


def test_the_sets_differ() -> None:
    assert not spirals("train")[:][0].equal(spirals("val")[:][0])
