"""Near duplicates by MinHash."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trainwright.finetune.similarity import content_hash, groups, is_held_out, near_pairs, signature


def words(seed: int, count: int = 120) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(2000)}" for _ in range(count)]


def signed(text: list[str]) -> np.ndarray:
    return signature([("user", " ".join(text))])


def test_the_fraction_of_equal_values_estimates_the_similarity() -> None:
    for changed in (3, 12, 40):
        errors = []
        for seed in range(40):
            one = words(seed)
            other = [*one[:-changed], *words(seed + 1000, changed)]
            runs = [{tuple(text[at : at + 3]) for at in range(len(text) - 2)} for text in (one, other)]
            truth = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
            errors.append(float((signed(one) == signed(other)).mean()) - truth)
        assert abs(np.mean(errors)) < 0.05 and np.std(errors) < 0.12


def test_near_copies_are_found_and_other_texts_are_not() -> None:
    texts = [words(seed) for seed in range(200)]
    copies = [[*text[:-2], "changed", "end"] for text in texts[:50]]
    found = dict(near_pairs(np.stack([signed(text) for text in [*texts, *copies]])))
    assert all(row >= 200 and other == row - 200 for row, other in found.items())
    assert len(found) >= 45


def test_case_and_white_space_make_no_difference() -> None:
    assert content_hash([("user", "Hello  there\n")]) == content_hash([("user", "hello there")])
    assert content_hash([("user", "a b")]) != content_hash([("assistant", "a b")])
    assert content_hash([("user", "a"), ("user", "b")]) != content_hash([("user", "a b")])


def test_a_system_message_makes_no_near_duplicates() -> None:
    long = " ".join(words(0, 400))
    one, other = (signature([("system", long), ("user", " ".join(words(seed, 10)))]) for seed in (1, 2))
    assert (one == other).mean() < 0.3


def test_groups_keep_copies_together_and_split_a_shared_template() -> None:
    copies = [words(1), words(2), [*words(1)[:-1], "x"]]
    others = [words(seed) for seed in range(10, 30)]
    shared = words(99)
    texts = [*copies, *others, *([*shared[:-1], f"n{at}"] for at in range(30))]
    hashes = np.array([content_hash([("user", " ".join(text))]) for text in texts], dtype=np.uint64)
    group = groups(hashes, np.stack([signed(text) for text in texts]))
    assert group[2] == group[0] != group[1]
    assert len(set(group[-30:])) == 30  # a template of more than a tenth of all samples


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_the_held_out_fraction(fraction: float) -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    held = is_held_out(hashes, np.arange(20_000), fraction)
    assert abs(held.mean() - fraction) < 0.01
    grown = is_held_out(np.concatenate([hashes[1:], hashes[:1]]), np.arange(20_000), fraction)
    assert (grown[:-1] == held[1:]).all()
