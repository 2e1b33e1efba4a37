"""Rate limits of clients."""

import pytest

from eagle3_jax.serve.limits import Rate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_minute_s_requests_at_once_and_then_one_by_one():
    clock = Clock()
    rate = Rate(3, clock)
    assert [rate.take("a") for _ in range(3)] == [0, 0, 0]
    assert rate.take("a") == pytest.approx(20)
    assert rate.take("b") == 0
    clock.now += 19
    assert rate.take("a") == pytest.approx(1)
    clock.now += 1
    assert rate.take("a") == 0
    assert rate.take("a") == pytest.approx(20)
    clock.now += 1000  # no more than a minute's are saved
    assert [rate.take("a") for _ in range(4)] == [0, 0, 0, pytest.approx(20)]


def test_clients_that_ask_no_more_are_forgotten_and_without_a_limit_none_waits():
    clock = Clock()
    rate = Rate(60, clock)
    for number in range(20_000):
        rate.take(str(number))
        clock.now += 0.001
    assert len(rate._full_at) <= 4097
    assert [Rate(None).take("a") for _ in range(1000)] == [0] * 1000
