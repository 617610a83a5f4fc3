import torch

from data import shapes
from model import UNet, mean_iou


def test_the_network_gives_one_logit_for_each_class_and_pixel() -> None:
    images, masks = shapes("val", count=2)[:]
    assert UNet(width=4)(images).shape == (2, 3, *masks.shape[1:])


def test_the_iou_of_a_perfect_prediction_is_one() -> None:
    masks = shapes("val", count=8)[:][1]
    logits = torch.nn.functional.one_hot(masks, 3).movedim(-1, 1)
    assert mean_iou(logits, masks) == 1.0
