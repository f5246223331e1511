"""What stands between two engines, or in the place of one: loses, forges, keeps silent."""

import secrets
import socket
import threading
from collections.abc import Callable

import zmq

from kvtiers.tiers.p2p import protocol as p
from kvtiers.tiers.p2p.protocol import TOKEN_BYTES


class _Thread:
    """Polls its sockets until it is closed."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.setsockopt(zmq.LINGER, 0)
        self.port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()
        return self

    def __enter__(self):
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)
        self.context.destroy(0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.turn()

    def turn(self) -> None:
        raise NotImplementedError


class Lossy(_Thread):
    """Passes messages on, both ways, but for those that ``lose`` says it loses."""

    def __init__(self, port: int, lose: Callable[[p.Message], bool]) -> None:
        super().__init__()
        self.lost: list[p.Message] = []
        self.seen: list[p.Message] = []
        self._lose = lose
        self._to = port
        self._backs: dict[bytes, zmq.Socket] = {}
        self._poller = zmq.Poller()
        self._poller.register(self.front, zmq.POLLIN)

    def turn(self) -> None:
        for ready, _ in self._poller.poll(20):
            parts = ready.recv_multipart()
            if ready is self.front:
                identity, data = parts
                if identity not in self._backs:
                    back = self.context.socket(zmq.DEALER)
                    back.setsockopt(zmq.LINGER, 0)
                    back.connect(f"tcp://127.0.0.1:{self._to}")
                    self._backs[identity] = back
                    self._poller.register(back, zmq.POLLIN)
                if self._passes(data):
                    self._backs[identity].send(data)
            else:
                identity = next(i for i, back in self._backs.items() if back is ready)
                if self._passes(parts[0]):
                    self.front.send_multipart([identity, parts[0]])

    def _passes(self, data: bytes) -> bool:
        message = p.parse(data).message
        self.seen.append(message)
        if self._lose(message):
            self.lost.append(message)
            return False
        return True


Script = Callable[["Liar", p.Envelope], list[tuple[p.Message | bytes, bytes]]]


class Liar(_Thread):
    """A producer whose every answer a test decides; its data connection is a plain socket."""

    def __init__(self, script: Script, data: Callable[["Liar", socket.socket], None]) -> None:
        super().__init__()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.heard: list[p.Message] = []
        self.fetched = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._script = script
        self._data = data
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def offer(self) -> bytes:
        port = self.listener.getsockname()[1]
        return port.to_bytes(2, "little") + bytes(16)

    def welcome(self, hello: p.Envelope) -> tuple[p.Message, bytes]:
        return p.HelloAck(hello.token, "liar", b"tcp", self.offer), self.token

    def turn(self) -> None:
        if not self.front.poll(20):
            return
        identity, data = self.front.recv_multipart()
        envelope = p.parse(data)
        self.heard.append(envelope.message)
        for message, token in self._script(self, envelope):
            raw = message if isinstance(message, bytes) else p.encode(message, token)
            self.front.send_multipart([identity, raw])
        if isinstance(envelope.message, p.Fetch):
            self.fetched.set()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        with connection:
            self._data(self, connection)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.fetched.set()
        self._accepting.join(10)


def honest(liar: Liar, envelope: p.Envelope) -> list[tuple[p.Message | bytes, bytes]]:
    """What a producer that has everything says."""
    message = envelope.message
    if isinstance(message, p.Hello):
        return [liar.welcome(envelope)]
    if isinstance(message, p.LookUp):
        verdicts = tuple((place, int(p.Verdict.PRESENT)) for place in range(len(message.keys)))
        return [(p.LookUpAnswer(message.question, verdicts), liar.token)]
    if isinstance(message, p.Ping):
        return [(p.Pong(message.number), liar.token)]
    return []
