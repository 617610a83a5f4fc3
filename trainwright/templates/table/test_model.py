from data import tumours
from model import Net


def test_the_network_gives_one_logit_for_each_class() -> None:
    rows, _ = tumours("val")[:5]
    assert Net(columns=30, classes=2, width=8, dropout=0.1)(rows).shape == (5, 2)


def test_the_training_columns_are_standardized() -> None:
    rows, _ = tumours("train")[:]
    assert rows.mean(0).abs().max() < 1e-4 and (rows.std(0) - 1).abs().max() < 1e-4
