"""What is decided without I/O: options, refusals, bodies, headers, workers, routes."""

import itertools
import json
from contextlib import nullcontext

import pytest

from kvtiers.cli.commands.proxy import add_arguments, options_of
from kvtiers.cli.main import _Parser
from kvtiers.cli.table import COMMANDS
from kvtiers.errors import ConfigError
from kvtiers.proxy.affinity import Affinity
from kvtiers.proxy.asked import CHAT, COMPLETIONS, read
from kvtiers.proxy.bodies import for_prefill
from kvtiers.proxy.gate import Gate
from kvtiers.proxy.headers import to_client, to_worker
from kvtiers.proxy.options import Address, ProxyOptions, parse_address
from kvtiers.proxy.replies import Refusal
from kvtiers.proxy.router import Router
from kvtiers.proxy.workers import Pool
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.roles import Source, read_roles

LONG = "all human beings are born free and equal in dignity and rights " * 20
A, B, C = (Address(f"http://{name}:80", name, 5710) for name in "abc")

# -- options --------------------------------------------------------------------------------------


def parsed(*words):
    parser = _Parser()
    add_arguments(parser)
    return options_of(parser.parse_args(words))


def test_a_worker_has_its_peers_at_the_same_host_unless_it_says_otherwise():
    assert parse_address("http://a:80/") == A
    assert parse_address("https://a:80,p2p=b:7") == Address("https://a:80", "b", 7)
    assert parse_address("http://[::1]:80,p2p=[::2]:7") == Address("http://[::1]:80", "::2", 7)
    assert parse_address("http://[::1]/x").p2p_host == "::1"


def test_the_default_port_is_the_tiers():
    assert P2POptions().placed(0, {}).port == A.p2p_port


NO_WORKERS = [f"http://{rest}" for rest in ("", "a:0", "a:99999", "a:x", "u@a", "a?q", "a#f", "[a")]
NO_WORKERS += [f"http://a,{rest}" for rest in ("", "p2p", "p2p=b", "p2p=:1", "p2p=b:0", "x=b:1")]
NO_WORKERS += ["a:80", "ftp://a", "http://a,p2p=b:99999", "http://a,p2p=b:1,p2p=c:2"]
NO_WORKERS += ["http://a,p2p=b/c:1"]


@pytest.mark.parametrize("text", NO_WORKERS)
def test_what_is_no_worker_is_refused(text):
    with pytest.raises(ConfigError, match="is no worker"):
        parse_address(text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give --prefill and --decode, or --worker"),
        (["--prefill", "http://a"], "--decode is missing"),
        (["--decode", "http://a"], "--prefill is missing"),
        (["--worker", "http://a", "--decode", "http://b"], "of two kinds"),
        (["--worker", "http://a", "--worker", "http://a/"], "named twice"),
        (["--worker", "http://a", "--port", "70000"], "--port is 70000"),
        (["--worker", "http://a", "--max-in-flight", "0"], "--max-in-flight is 0"),
        (["--worker", "http://a", "--max-queued", "-1"], "--max-queued is -1"),
        (["--worker", "http://a", "--idle-timeout-s", "0"], "--idle-timeout-s is 0"),
        (["--worker", "http://a", "--drain-s", "inf"], "--drain-s is inf"),
        (["--worker", "http://a", "--max-body-bytes", "many"], "--max-body-bytes"),
    ],
)
def test_options_that_cannot_be_are_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        parsed(*words)


def test_the_command_line_sets_every_option():
    words = ["--prefill", "http://a:80", "--decode", "http://b:80", "--decode", "http://c:80"]
    words += ["--host", "0.0.0.0", "--port", "0", "--max-body-bytes", "1MiB", "--slack", "0"]
    options = parsed(*words, "--drain-s", "2", "--pass-kv-transfer-params")
    assert (options.prefill, options.decode, options.workers) == ((A,), (B, C), ())
    assert (options.host, options.port, options.max_body_bytes) == ("0.0.0.0", 0, 1 << 20)
    assert (options.drain_s, options.slack, options.pass_kv_transfer_params) == (2.0, 0, True)
    assert parsed("--worker", "http://a:80") == ProxyOptions(workers=(A,))


def test_the_example_of_the_command_is_a_call():
    (example,) = (command.example for command in COMMANDS if command.name == "proxy")
    options = parsed(*example.split()[2:])
    assert len(options.prefill) == len(options.decode) == 1


# -- requests -------------------------------------------------------------------------------------


def asked(body, path=CHAT, pass_params=False):
    return read(path, json.dumps(body).encode(), 1, pass_params=pass_params)


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        (CHAT, b"", None),
        (CHAT, b"{", None),
        (CHAT, b"[]", None),
        (CHAT, b"\xff{}", None),
        (CHAT, b"[" * 100_000, None),
        (CHAT, b'{"n": ' + b"1" * 5000 + b"}", None),
        (CHAT, b"{}", "messages"),
        (CHAT, b'{"messages": "hello"}', "messages"),
        (COMPLETIONS, b'{"messages": []}', "prompt"),
        (COMPLETIONS, b'{"prompt": 1}', "prompt"),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", None),
    ],
)
def test_what_is_no_request_is_refused(path, raw, param):
    refusal = read(path, raw, 1, pass_params=False)
    if isinstance(refusal, Refusal):
        assert (refusal.status, refusal.param) == (400, param)
    else:
        assert raw.startswith(b'{"prompt": [['), "an engine refuses it"


HOSTILE = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "10.0.0.1", "remote_port": 1}}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"kv_transfer_params": HOSTILE}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params": 0}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
    ],
)
def test_a_client_names_no_peers_unless_it_may(extra, field):
    body = {"messages": [], **extra}
    refusal = asked(body)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.param) == (400, field)
    passed = asked(body, pass_params=True)
    assert passed.body == body
    assert not passed.roles


def test_null_names_nobody():
    assert asked({"messages": [], "kv_transfer_params": None}).roles


def test_several_prompts_get_no_roles():
    assert not asked({"prompt": ["a", "b"]}, COMPLETIONS).roles
    assert asked({"prompt": ["a"]}, COMPLETIONS).roles


# -- bodies and headers ---------------------------------------------------------------------------


def test_prefill_computes_the_same_prompt_for_one_token_that_nobody_reads():
    same = {"messages": [{"role": "user", "content": "x"}], "tools": [{}], "temperature": 0.5}
    more = {"n": 4, "stream": True, "stream_options": {}, "min_tokens": 9, "logprobs": True}
    more |= {"top_logprobs": 3, "prompt_logprobs": 2, "echo": True, "max_tokens": 99}
    body = json.loads(for_prefill({**same, **more}, {}))
    assert body == {**same, "max_tokens": 1, "stream": False}
    body = json.loads(for_prefill({**same, "max_completion_tokens": 99}, {}))
    assert body == {**same, "max_tokens": 1, "max_completion_tokens": 1, "stream": False}


def test_headers_of_one_connection_are_not_passed_on():
    hop = [("Connection", "close, X-Mine"), ("x-mine", "1"), ("TE", "trailers"), ("Upgrade", "h2c")]
    hop += [("Keep-Alive", "5"), ("Transfer-Encoding", "chunked"), ("Proxy-Authorization", "p")]
    kept = [("Authorization", "Bearer x"), ("X-Request-Id", "1"), ("Accept", "a"), ("Accept", "b")]
    ours = [("Host", "h"), ("Content-Length", "9"), ("Content-Encoding", "gzip"), ("Expect", "1")]
    assert to_worker([*hop, *kept, *ours, ("Content-Type", "x")]) == kept
    body = [("Content-Length", "9"), ("Content-Encoding", "gzip"), ("Content-Type", "x")]
    assert to_client([*hop, *body]) == body


# -- workers and routes ---------------------------------------------------------------------------


def fail(worker, now=0.0):
    for _ in range(3):
        worker.breaker.failed(now)


def test_the_idlest_is_next_and_equals_take_turns():
    pool = Pool("w", [A, B], slack=1)
    chosen = []
    for _ in range(4):
        worker = pool.choose(())
        worker.begin()
        worker.end()
        chosen.append(worker.name)
    assert chosen == ["w-0", "w-1", "w-0", "w-1"]
    pool.workers[0].begin()
    assert {pool.choose(()).name for _ in range(3)} == {"w-1"}


def test_who_served_a_prefix_gets_it_until_it_is_much_busier():
    pool = Pool("w", [A, B], slack=1)
    a, b = pool.workers
    pool.affinity.note((1, 2), b)
    b.begin()
    assert pool.choose((1, 2, 3)) is b
    b.begin()
    assert pool.choose((1, 2, 3)) is a
    assert pool.source_for((1, 2, 3)) is b


def test_who_failed_or_was_tried_is_left_out():
    pool = Pool("w", [A, B, C], slack=9)
    a, b, c = pool.workers
    pool.affinity.note((1,), a)
    fail(a)
    assert pool.choose((1,), [b]) is c
    assert pool.source_for((1,)) is None
    assert pool.choose((1,), [b, c]) is None
    assert a.breaker.admit(now=100.0)
    assert pool.choose((1,), [b, c]) is None, "only a look at its health tries it"
    a.breaker.succeeded()
    assert pool.choose((1,)) is a
    pool.check()
    assert repr(pool) == "<Pool 3/3 usable, <Affinity 1/65536 prefixes>>"


def router(**pools):
    names = (f"id-{n}" for n in itertools.count())
    return Router(ProxyOptions(**pools), lambda: next(names))


def params(call):
    return json.loads(call.body).get("kv_transfer_params")


PROMPT = {"messages": [{"role": "user", "content": LONG}], "model": "m"}


def test_decode_waits_for_what_prefill_computes():
    route = router(prefill=(A,), decode=(B,))
    request = asked(PROMPT)
    prefill = route.prefill(request)
    serve = route.serve(request, prefill)
    assert (prefill.worker.name, serve.worker.name) == ("prefill-0", "decode-0")
    assert read_roles(params(prefill))[0].produces == "id-0"
    waits, wrong = read_roles(params(serve))
    assert wrong is None
    assert waits.source == Source(Role.PREFILL, "id-0", "a", 5710)
    assert json.loads(serve.body)["messages"] == PROMPT["messages"]


def test_a_prefill_worker_asks_the_one_that_had_the_prefix():
    route = router(prefill=(A, B), decode=(C,), slack=0)
    request = asked(PROMPT)
    first = route.prefill(request)
    route.served(request, first)
    first.worker.begin()
    second = route.prefill(request)
    assert second.asks is first.worker
    roles, wrong = read_roles(params(second))
    assert wrong is None
    assert (roles.produces, roles.source.role, roles.source.host) == ("id-1", Role.SOURCE, "a")
    route.check()


def test_without_prefill_decode_computes_itself():
    route = router(prefill=(A,), decode=(B,))
    fail(route.prefill_pool.workers[0])
    request = asked(PROMPT)
    assert route.prefill(request) is None
    assert json.loads(route.serve(request, None).body) == PROMPT


def test_a_conversation_that_moves_names_where_it_was():
    route = router(workers=(A, B), slack=0)
    request = asked(PROMPT)
    first = route.serve(request, None)
    assert params(first) is None
    route.served(request, first)
    assert route.serve(request, None).worker is first.worker
    first.worker.begin()
    moved = route.serve(request, None)
    assert moved.asks is first.worker
    assert read_roles(params(moved))[0].source == Source(Role.SOURCE, "id-0", "a", 5710)


def test_a_source_that_failed_is_not_named():
    route = router(workers=(A, B), slack=0)
    request = asked(PROMPT)
    first = route.serve(request, None)
    route.served(request, first)
    fail(first.worker)
    assert params(route.serve(request, None)) is None


def test_clients_roles_are_left_as_they_are():
    route = router(workers=(A, B), slack=0)
    body = {**PROMPT, "kv_transfer_params": HOSTILE}
    request = asked(body, pass_params=True)
    route.served(request, route.serve(request, None))
    route.pool.workers[0].begin()
    call = route.serve(request, None)
    assert call.asks is None
    assert json.loads(call.body) == body


# -- each check can fail --------------------------------------------------------------------------


def broken(why):
    return pytest.raises(AssertionError, match=why) if __debug__ else nullcontext()


def test_no_worker_runs_what_it_was_not_given():
    route = router(workers=(A,))
    route.pool.workers[0].in_flight = 1
    with broken("worker-0 runs what it was not given"):
        route.check()


def test_no_more_prefixes_than_may_be():
    affinity = Affinity(max_prefixes=1)
    affinity.note((1,), "a")
    affinity._served[2] = "b"
    with broken("more prefixes than may be"):
        affinity.check()


def test_no_more_requests_than_may_be():
    gate = Gate(1, 1)
    gate.in_flight = gate.inside = 2
    with broken("more in flight than may be"):
        gate.check()
    gate.in_flight, gate.inside = 1, 3
    with broken("more wait than may"):
        gate.check()
    assert repr(gate) == "<Gate 1/1 in flight, 2 wait>"
