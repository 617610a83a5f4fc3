from data import digits
from model import Net


def test_the_network_gives_one_logit_for_each_class() -> None:
    images, labels = digits("val")[:5]
    assert Net()(images).shape == (5, 10)
    assert labels.min() >= 0 and labels.max() < 10


def test_the_images_are_split_once() -> None:
    assert (len(digits("train")), len(digits("val"))) == (1438, 359)
