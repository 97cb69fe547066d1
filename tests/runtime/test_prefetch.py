"""What is foreseen, and how it is found out whether reading ahead pays."""

import numpy as np
import pytest

from colibri_runtime.prefetch import FrequentExperts, GivenExperts, LastExperts, PrefetchGate


def run(gate, n_tokens, with_ns, without_ns):
    """Tokens that take so long with and without; gives how many of them were read ahead for."""
    n_on = 0
    for _ in range(n_tokens):
        n_on += gate.depth
        gate.tell(with_ns if gate.depth else without_ns)
    return n_on


def trial_tokens(gate):
    return 4 * gate.WINDOW


def test_the_last_experts_of_a_layer_are_foreseen():
    predictor = LastExperts()
    predictor.observe(1, [4, 2])
    predictor.observe(2, [7])
    predictor.observe(1, [5])

    assert list(predictor.predict(1)) == [5]
    assert list(predictor.predict(2)) == [7]
    assert list(predictor.predict(0)) == []


def test_the_most_frequent_are_foreseen_as_many_as_were_asked_for():
    predictor = FrequentExperts(np.array([[0, 9, 1, 5], [0, 0, 0, 0]]))
    predictor.observe(0, [2, 1])

    assert predictor.predict(0) == [1, 3]
    assert predictor.predict(1) == []
    for _ in range(12):
        predictor.observe(0, [0, 2])
    assert set(predictor.predict(0)) == {0, 2}


def test_history_does_not_change_the_counts_it_began_with():
    counts = np.ones((1, 4))
    FrequentExperts(counts).observe(0, [1])

    assert counts.tolist() == [[1, 1, 1, 1]]


def test_given_experts_come_in_their_order():
    predictor = GivenExperts([[[1, 2], [3]], []])

    assert list(predictor.predict(0)) == [1, 2]
    predictor.observe(0, [9])
    assert list(predictor.predict(0)) == [3]
    predictor.observe(0, [3])
    assert list(predictor.predict(0)) == []
    assert list(predictor.predict(1)) == []


def test_prefetch_that_pays_stays_on():
    gate = PrefetchGate()

    run(gate, gate.WARM_UP + trial_tokens(gate), with_ns=80, without_ns=100)

    assert gate.depth
    assert gate.trials[0].gain == pytest.approx(0.2)
    assert run(gate, gate.REST, 80, 100) == gate.REST
    assert gate.verdict().startswith("on: in the last of 1 trials it saved 20.0%")


def test_prefetch_that_does_not_pay_goes_off_at_the_first_trial():
    gate = PrefetchGate()

    run(gate, gate.WARM_UP + trial_tokens(gate), with_ns=99, without_ns=100)

    assert not gate.depth
    assert run(gate, gate.REST, 99, 100) == 0
    assert "off: in the last of 1 trials it saved 1.0%" in gate.verdict()


def test_a_drift_of_speed_is_no_gain():
    """A cache that fills makes each token faster than the one before."""
    gate = PrefetchGate()
    run(gate, gate.WARM_UP, 1000, 1000)
    for i in range(trial_tokens(gate)):
        gate.tell(1000 - 10 * i)

    assert abs(gate.trials[0].gain) < 0.02
    assert not gate.depth


def test_one_slow_token_decides_nothing():
    gate = PrefetchGate()
    run(gate, gate.WARM_UP, 80, 100)
    for i in range(trial_tokens(gate)):
        gate.tell(9000 if i == 2 else 80 if gate.depth else 100)

    assert gate.depth


def test_what_is_set_changes_only_after_two_trials_that_agree():
    gate = PrefetchGate()
    run(gate, gate.WARM_UP + trial_tokens(gate), 80, 100)
    run(gate, gate.REST + trial_tokens(gate), 110, 100)
    assert len(gate.trials) == 2
    assert gate.is_set_on

    run(gate, trial_tokens(gate), 110, 100)

    assert len(gate.trials) == 3
    assert not gate.is_set_on
    run(gate, gate.REST + 2 * trial_tokens(gate), 50, 100)
    assert gate.is_set_on


def test_trials_become_rare_when_nothing_changes():
    gate = PrefetchGate()

    run(gate, 40_000, 120, 100)

    assert not gate.is_set_on
    assert 6 < len(gate.trials) < 18
    assert sum(run(gate, 1000, 120, 100) for _ in range(10)) < 60


def run_depths(gate, n_tokens, times):
    """Tokens that take `times[depth]`; gives the depths that were read ahead."""
    seen = []
    for _ in range(n_tokens):
        seen.append(gate.depth)
        gate.tell(times[gate.depth])
    return seen


def test_a_second_layer_is_tried_at_once_when_the_first_pays():
    gate = PrefetchGate(2)

    run_depths(gate, gate.WARM_UP, (100, 90, 80))
    seen = run_depths(gate, 2 * trial_tokens(gate), (100, 90, 80))

    windows = [set(seen[i : i + gate.WINDOW]) for i in range(0, len(seen), gate.WINDOW)]
    assert windows == [{1}, {0}, {0}, {1}, {2}, {1}, {1}, {2}]
    assert (gate.depth, gate.set_depth) == (2, 2)
    assert [trial.depth for trial in gate.trials] == [1, 2]
    assert gate.verdict().startswith(
        "2 layers ahead: in the last of 2 trials layer 2 saved 11.1% (8e-05 ms a token with it, "
        "9e-05 with 1)"
    )


def test_a_second_layer_that_does_not_pay_is_left_out():
    gate = PrefetchGate(2)

    run_depths(gate, gate.WARM_UP + 2 * trial_tokens(gate), (100, 90, 90))

    assert gate.set_depth == 1
    assert gate.verdict().startswith("1 layer ahead: ")
    # From now on either neighbour is compared in turn.
    run_depths(gate, 3000, (100, 90, 90))
    assert {trial.depth for trial in gate.trials[2:]} == {1, 2}
    assert gate.set_depth == 1


def test_no_second_layer_is_tried_while_the_first_does_not_pay():
    gate = PrefetchGate(2)

    seen = run_depths(gate, 2000, (100, 100, 50))

    assert 2 not in seen
    assert gate.set_depth == 0


def test_depth_follows_a_change_of_what_pays_a_layer_at_a_time():
    gate = PrefetchGate(2)
    run_depths(gate, 200, (100, 90, 80))
    assert gate.set_depth == 2

    run_depths(gate, 4000, (80, 90, 100))

    assert gate.set_depth == 0
