"""Readers of the event stream as llm-d and Dynamo are, but strict: what they skip, fails here."""

from collections import Counter

import msgspec

_LLMD_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
_DYNAMO_MEDIA = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}


def raw_events(payload):
    """The events of a payload as maps, as both read them."""
    time, events, _rank = msgspec.msgpack.decode(payload)
    assert isinstance(time, float)
    assert all(e["type"] in ("BlockStored", "BlockRemoved", "AllBlocksCleared") for e in events)
    return events


class Llmd:
    """Counts (tier, group, hash); knows a block's tokens by the chain of its parents."""

    def __init__(self, *, orphans=False):
        """``orphans``: blocks may come whose parent is nowhere; they are skipped."""
        self.orphans = orphans
        self.counts = Counter()
        self.kinds = {}
        self.prefixes = {0: ()}
        """Engine hash -> all tokens and extra keys up to the end of the block."""
        self.skipped = Counter()
        self.cleared = False

    def read(self, payload):
        for event in raw_events(payload):
            if event["type"] == "AllBlocksCleared":
                self.counts.clear()
                self.cleared = True
            elif event["type"] == "BlockStored":
                self.stored(event)
            else:
                self.removed(event)

    def stored(self, e):
        group, tier = e["group_idx"], (e["medium"] or "gpu").lower()
        kind = e.get("kv_cache_spec_kind")
        if not e["token_ids"]:
            assert e["block_size"] == 0
            assert all(h in self.prefixes for h in e["block_hashes"]), "a tier update of nothing"
        else:
            assert kind is not None, "a described block has no kind"
            self.kinds[group] = kind
            if kind not in _LLMD_KINDS:
                self.skipped["unsupported_cache_kind"] += 1
                return
            if self.orphans and (e["parent_block_hash"] or 0) not in self.prefixes:
                self.skipped["unknown_parent"] += 1
                return
            self.learn(e)
        for h in e["block_hashes"]:
            self.counts[tier, group, h] += 1

    def learn(self, e):
        size, hashes = e["block_size"], e["block_hashes"]
        assert size > 0, "invalid_block_size"
        assert len(e["token_ids"]) == size * len(hashes), "non_dense_block_span"
        parent = e["parent_block_hash"] or 0
        assert parent in self.prefixes, f"unknown parent {parent}"
        extra = e.get("extra_keys") or [None] * len(hashes)
        assert len(extra) == len(hashes)
        prefix = self.prefixes[parent]
        for i, h in enumerate(hashes):
            block = (tuple(e["token_ids"][i * size : (i + 1) * size]), repr(extra[i]))
            prefix = (*prefix, block)
            assert self.prefixes.get(h, prefix) == prefix, "one hash for two prefixes"
            self.prefixes[h] = prefix

    def removed(self, e):
        group, tier = e["group_idx"], (e["medium"] or "gpu").lower()
        if self.kinds.get(group, "full_attention") not in _LLMD_KINDS:
            return
        for h in e["block_hashes"]:
            if self.cleared and not self.counts[tier, group, h]:
                continue  # the publisher cannot know what was forgotten
            self.counts[tier, group, h] -= 1
            assert self.counts[tier, group, h] >= 0, "removed more often than stored"

    def held(self, tier):
        """Hashes by how often they are counted in a tier."""
        return {h: n for (t, _, h), n in self.counts.items() if t == tier and n}

    def longest(self, tokens, size, tier):
        """Tokens at the beginning that the tier holds, as a scheduler would score it."""
        known = {self.prefixes[h] for h in self.held(tier)}
        prefix = ()
        for at in range(0, len(tokens) - size + 1, size):
            prefix = (*prefix, (tuple(tokens[at : at + size]), "None"))
            if prefix not in known:
                return at
        return len(tokens) // size * size


class Dynamo:
    """Takes whole blocks of one size, of this node, with integer hashes."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.cleared = False
        self.held = {medium: Counter() for medium in _DYNAMO_MEDIA.values()}

    def read(self, payload):
        for e in raw_events(payload):
            if e["type"] == "AllBlocksCleared":
                self.cleared = True
                for held in self.held.values():
                    held.clear()
                continue
            hashes = e["block_hashes"]
            assert all(type(h) is int for h in hashes), "a hash that is no integer"
            held = self.held[_DYNAMO_MEDIA[e["medium"]]]
            assert e.get("locality", "LOCAL") == "LOCAL"
            if e["type"] == "BlockRemoved":
                held.subtract(h for h in hashes if held[h] or not self.cleared)
                assert min(held.values(), default=0) >= 0
                continue
            assert e["block_size"] == self.block_size, "blocks of another size"
            assert len(e["token_ids"]) == self.block_size * len(hashes)
            chain = [e["parent_block_hash"], *hashes]
            assert len({*chain}) == len(chain), "a hash twice in one event"
            if e["kv_cache_spec_kind"] in _LLMD_KINDS:
                held.update(hashes)


class Router:
    """Follows one engine over its lives: sees gaps, asks for replays, knows tiers by their owner.

    ``ask(start)`` is the engine's replay, a list of numbers and payloads.
    """

    def __init__(self):
        self.forget()
        self.replays = 0

    def forget(self):
        self.counts = Counter()
        self.next = 0

    def hear(self, seq, payload, ask):
        """A live batch."""
        if seq < self.next:  # the engine was restarted
            self.forget()
        if seq > self.next:
            self.catch_up(ask)
        if seq == self.next:
            self.read(payload)

    def catch_up(self, ask):
        """Ask for what is missing, else for everything."""
        self.replays += 1
        got = ask(self.next)
        if got and got[0][0] != self.next:
            self.forget()
            got = ask(0)
        assert [seq for seq, _ in got] == [*range(self.next, self.next + len(got))]
        for _, payload in got:
            self.read(payload)

    def read(self, payload):
        self.next += 1
        for e in raw_events(payload):
            place = (e["ownership"], e["medium"], e["locality"])
            change = 1 if e["type"] == "BlockStored" else -1
            for h in e["block_hashes"]:
                self.counts[place, h] += change
                assert self.counts[place, h] in (0, 1), "once per residency"

    def held(self, owner):
        return {h for ((o, _, _), h), n in self.counts.items() if o == owner and n}
