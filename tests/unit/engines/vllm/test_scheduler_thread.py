"""The scheduler's thread asks the system for nothing in a step, and waits for nobody."""

import sys

import pytest

from tests.unit.engines.vllm.syscalls import MEMORY, count


@pytest.fixture(params=["files", "log"])
def layout(request):
    return request.param


def calls_of_a_step(scenario, layout, folder):
    module = "tests.unit.engines.vllm.step_under_trace"
    counted = count([sys.executable, "-m", module, scenario, layout, str(folder)])
    return {name: n for name, n in counted.items() if name not in MEMORY}


@pytest.mark.timeout(120)
def test_a_step_makes_no_system_call_while_the_lanes_work(layout, tmp_path):
    assert calls_of_a_step("busy", layout, tmp_path) == {}


@pytest.mark.timeout(120)
def test_a_step_does_no_more_than_wake_lanes_that_sleep(layout, tmp_path):
    counted = calls_of_a_step("asleep", layout, tmp_path)
    assert set(counted) == {"wake"}


@pytest.mark.timeout(120)
def test_waiting_and_system_calls_are_seen(layout, tmp_path):
    counted = calls_of_a_step("waiting", layout, tmp_path)
    assert counted.pop("wait") >= 1
    assert counted, "the call of stat"
