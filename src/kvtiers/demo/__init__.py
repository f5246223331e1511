"""The demonstration: a real model behind a real server, with and without tiers.

``history`` (what is asked) and ``plan`` (how each server is configured) are values; ``server``,
``client`` and ``metrics`` touch the outside; ``passes`` replays the history; ``verdict`` judges
the records; ``report`` and ``plot`` show them.
"""
