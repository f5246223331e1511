"""Engines that publish as told, and what follows them, on one loop."""

import asyncio
import functools
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from kvtiers.index.follower import Follower
from kvtiers.index.options import Engine, IndexOptions
from kvtiers.index.presence import Presence
from kvtiers.index.reach import reach
from kvtiers.kvevents.messages import END_OF_REPLAY, Batch, BlockRemoved, BlockStored, encode

LIMIT_S = 60
SIZE = 16


def on_a_loop(test):
    """An async test, which has to end within LIMIT_S."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run


async def until(condition):
    """Wait for what other tasks do; LIMIT_S bounds it."""
    while not condition():
        await asyncio.sleep(0.005)


def stored(*blocks, medium="GPU"):
    return BlockStored(blocks, None, [], SIZE, medium=medium)


def removed(*blocks, medium="GPU"):
    return BlockRemoved(blocks, medium)


class Publisher:
    """An engine's publisher, as vLLM's: PUB, and a ROUTER that replays what is kept."""

    def __init__(self, folder, name="e", *, keeps=1000, replays=True):
        self.endpoint = f"ipc://{folder}/{name}.pub"
        self.replay_endpoint = f"ipc://{folder}/{name}.replay" if replays else None
        self.keeps = keeps
        self.asked = []
        """Where replays were to begin."""
        self.silent = False
        """Whether replays stay unanswered."""
        self.drops = set()
        """Numbers that the next replay leaves out."""

    @property
    def engine(self):
        return Engine(self.endpoint[-5:-4], self.endpoint, self.replay_endpoint)

    async def __aenter__(self):
        """It can be left and entered again: a restart."""
        self.seq = 0
        self.ring = []
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._serving = None
        if self.replay_endpoint:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(self.replay_endpoint)
            self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *error):
        if self._serving is not None:
            self._serving.cancel()
        self._context.destroy(linger=0)

    async def say(self, *events, lost=False, payload=None):
        """Publish a batch; ``lost`` on its way."""
        payload = encode(Batch(1.0, list(events), 0)) if payload is None else payload
        number = self.seq.to_bytes(8, "big")
        self.ring = [*self.ring, (number, payload)][-self.keeps :]
        self.seq += 1
        if not lost:
            await self._pub.send_multipart([b"kv@e@m", number, payload])

    async def _serve(self):
        while True:
            who, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.silent:
                continue
            for number, payload in self.ring:
                if number >= start and int.from_bytes(number, "big") not in self.drops:
                    await self._router.send_multipart([who, b"", b"kv@e@m", number, payload])
            self.drops = set()
            await self._router.send_multipart([who, b"", b"", END_OF_REPLAY, b""])


class Now:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def following(publisher, clock=None, shared=None, **options):
    """A follower of this publisher that runs."""
    options = IndexOptions((publisher.engine,), **options)
    context = zmq.asyncio.Context()
    presence = Presence(1000)
    follower = Follower(publisher.engine, presence, options, context, clock or Now(), shared)
    follower.presence = presence
    running = [asyncio.create_task(follower.run())]
    if shared is not None:
        running.append(asyncio.create_task(shared.run()))
    try:
        yield follower
        assert not any(task.done() for task in running)
        follower.check()
        presence.check()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        context.destroy(linger=0)


def held(follower, *chain):
    """How many blocks of this chain the index knows of, and whether that is all."""
    found = reach(follower.presence, chain, SIZE, [follower.pod])
    return found[0].tokens // SIZE if found else 0, follower.pod.complete
