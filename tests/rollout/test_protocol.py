import numpy as np

from jppo.rollout.protocol import join_experts, sample_seed


def test_a_seed_depends_on_all_three_and_fits_31_bits():
    seeds = {sample_seed(s, i, j) for s in range(4) for i in range(20) for j in range(5)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_is_the_same_in_every_run():
    # A resumed run must draw the same samples, so this number may not change between versions.
    assert sample_seed(7, 1, 2) == 867361342


def test_an_empty_continuation_keeps_the_experts_of_the_first_answer_that_read_a_token():
    first, whole = np.zeros((4, 2, 1), np.int16), np.ones((6, 2, 1), np.int16)
    kept = join_experts(join_experts(join_experts(None, first), None), whole)
    assert kept[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert join_experts(None, None) is None
