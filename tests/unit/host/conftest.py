import pytest

from kvtiers.host.region import (
    Region,
)
from tests.unit.host.region_kit import RECORD, SLOT, Process


@pytest.fixture
def start(tmp_path):
    processes = []

    def run(script, directory=tmp_path):
        processes.append(Process(script, directory))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()


@pytest.fixture
def attach(tmp_path):
    """Attach in this process; closed at the end."""
    regions = []

    def run(name="a", record=RECORD, num_slots=3, slot_bytes=SLOT, slab_slots=1):
        regions.append(
            Region.attach(name, record, num_slots, slot_bytes, str(tmp_path), slab_slots=slab_slots)
        )
        return regions[-1]

    yield run
    for region in regions:
        region.close()
