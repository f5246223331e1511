"""The one place where the parts of an observer meet: what an engine calls, and nothing else."""

import logging
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from kvtiers.chunks import ChunkLayout, Key, Namespace
from kvtiers.config import ObserveConfig
from kvtiers.core.manager import TieringManager
from kvtiers.metrics import Metrics
from kvtiers.observe.gauges import Gauges
from kvtiers.observe.pages import read_pages
from kvtiers.observe.prompts import Prompts
from kvtiers.observe.requests import Recorder
from kvtiers.observe.residency import Residency
from kvtiers.observe.routes import Routes, Sources
from kvtiers.observe.server import Observer
from kvtiers.observe.state import Engine, State

_log = logging.getLogger("kvtiers")


@dataclass(frozen=True, slots=True)
class Observed:
    """An engine to be looked at."""

    model: str
    namespace: Namespace
    layout: ChunkLayout
    replica: int
    manager: TieringManager
    metrics: Metrics
    gauges: Gauges
    inert: Callable[[], bool]


def recorder_of(config: ObserveConfig | None) -> Recorder | None:
    """A sink for the manager's events; None if nobody will look."""
    return None if config is None else Recorder(time.time, config.max_requests)


def start_observer(
    config: ObserveConfig, observed: Observed, recorder: Recorder
) -> Observer | None:
    """One that listens at the configured port plus the index of the replica; None if it cannot.

    It raises nothing: an engine that is not seen is better than none.
    """
    try:
        observer = _observer_of(config, observed, recorder)
        return observer if observer.start() else None
    except Exception:
        _log.exception("observe: the observer did not start; the engine goes on without it")
        return None


def _observer_of(config: ObserveConfig, observed: Observed, recorder: Recorder) -> Observer:
    resident: Container[Key] = observed.manager.ready
    sources = Sources(
        namespace=observed.namespace,
        recorder=recorder,
        prompts=Prompts(observed.layout),
        state=State(
            Engine(observed.model, observed.namespace.id, observed.replica, time.time()),
            observed.manager.tiers,
            observed.metrics,
            observed.gauges,
            time.time,
            observed.inert,
        ),
        explain=Residency(resident, observed.manager.tiers).explain,
        exposition=_exposition(observed),
    )
    port = config.port and config.port + observed.replica
    return Observer(Routes(sources, read_pages()), config.host, port, config.names)


def _exposition(observed: Observed) -> Callable[[], tuple[bytes, str]] | None:
    try:
        from kvtiers.observe.prometheus import CONTENT_TYPE, exposition
    except ImportError:
        return None
    labels = {"model_name": observed.model, "engine": str(observed.replica)}

    def scraped() -> tuple[bytes, str]:
        return exposition(observed.metrics, observed.gauges, labels), CONTENT_TYPE

    return scraped
