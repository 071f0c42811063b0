"""Random numbers that follow from a seed and a place."""

import collections

from runtime import seeding


def test_permutations_are_as_random_as_they_should_be_and_stay_what_they_are():
    seen = collections.Counter(tuple(seeding.permutation(4, seed, epoch)) for seed in range(60) for epoch in range(40))
    assert len(seen) == 24
    assert max(abs(count - 100) for count in seen.values()) < 45  # 4.5 deviations of a count of 100
    assert seeding.permutation(6, 1, 2).tolist() == [5, 3, 2, 1, 4, 0]  # runs resume under another NumPy too
