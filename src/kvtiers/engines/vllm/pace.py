"""How fast the engine computes prompts, from when its steps are scheduled.

A step that mostly computes prompts is taken to last until the next one is scheduled. That is an
upper bound where the engine had nothing to do in between, so whoever reads it takes a median.
"""

_LEAST_TOKENS = 128
_TOKENS_PER_REQUEST = 8
"""A request that decodes has one token in a step, or a few with a draft model."""


class Pace:
    """Watches steps."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        """Tokens of the last step that computed prompts, and when it was scheduled."""

    def step(self, tokens: int, requests: int, now: float) -> tuple[int, float] | None:
        """A step of ``tokens`` for ``requests`` is scheduled; tokens and seconds of the one before,
        if that computed prompts.
        """
        before, self._last = self._last, None
        if tokens >= max(_LEAST_TOKENS, _TOKENS_PER_REQUEST * requests):
            self._last = tokens, now
        return None if before is None else (before[0], now - before[1])

    def check(self) -> None:
        """Raise AssertionError if a step is timed that computed no prompts."""
        assert self._last is None or self._last[0] >= _LEAST_TOKENS, "a small step is timed"

    def __repr__(self) -> str:
        return f"<Pace {'no prompt' if self._last is None else f'{self._last[0]} tokens'} running>"
