from kvtiers.tiers.breaker import Breaker, State


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, cooldown_s=5, max_cooldown_s=12)
    assert [breaker.failed(at) for _ in range(3)] == [False, False, True]
    return breaker


def test_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(failures=2, cooldown_s=5, max_cooldown_s=60)
    for _ in range(5):
        assert not breaker.failed(0)
        assert not breaker.succeeded()
    assert breaker.admit(0)
    breaker.check()


def test_open_until_the_cooldown_then_one_trial() -> None:
    breaker = opened()
    assert breaker.is_out(4.9)
    assert not breaker.admit(4.9)
    assert not breaker.is_out(5)
    assert breaker.admit(5)
    assert breaker.is_out(5)
    assert not breaker.admit(5)


def test_trial_decides() -> None:
    breaker = opened()
    assert breaker.admit(5)
    assert breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert breaker.admit(5)


def test_cooldown_doubles_up_to_its_maximum_and_starts_over() -> None:
    breaker, now = opened(), 0.0
    for cooldown in (5, 10, 12, 12):
        assert not breaker.admit(now + cooldown - 0.1)
        now += cooldown
        assert breaker.admit(now)
        assert not breaker.failed(now)
    assert breaker.admit(now + 12)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(100)
    assert breaker.admit(105)


def test_results_from_before_it_opened_change_nothing() -> None:
    breaker = opened()
    assert not breaker.succeeded()
    assert not breaker.failed(4)
    assert breaker.state is State.OPEN
    assert breaker.admit(5)
    assert "trial" in repr(breaker)
