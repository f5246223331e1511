import pytest

from kvtiers.engines.vllm.pace import Pace


def test_a_step_of_prompts_lasts_until_the_next_one() -> None:
    pace = Pace()
    assert pace.step(512, 2, 10.0) is None
    pace.check()
    assert pace.step(300, 1, 10.5) == (512, 0.5)
    assert pace.step(1, 1, 11.5) == (300, 1.0)
    assert pace.step(1, 1, 12.0) is None
    assert "no prompt" in repr(pace)


@pytest.mark.parametrize(("tokens", "requests"), [(64, 1), (256, 200), (0, 0)])
def test_steps_that_mostly_decode_are_not_timed(tokens: int, requests: int) -> None:
    pace = Pace()
    pace.step(tokens, requests, 0.0)
    assert pace.step(512, 1, 1.0) is None
