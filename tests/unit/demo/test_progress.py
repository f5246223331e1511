import io

from kvtiers.demo.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_shows_the_share_and_the_seconds():
    now = [100.0]
    progress = Progress(40, io.StringIO(), lambda: now[0])
    assert progress.bar() == "[" + "." * 30 + "]   0%    0 s"
    progress.advance(20)
    now[0] = 175.0
    assert progress.bar() == "[" + "#" * 15 + "." * 15 + "]  50%   75 s"
    progress.advance(100)
    assert "100%" in progress.bar()
    assert repr(progress) == "<Progress 40 of 40>"


def test_a_line_a_step_without_a_terminal():
    stream = io.StringIO()
    progress = Progress(2, stream, lambda: 0.0)
    progress.show("one")
    progress.show("two")
    progress.close()
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["one", "two"]


def test_one_line_on_a_terminal_that_is_cleared_at_the_end():
    stream = _Terminal()
    progress = Progress(2, stream, lambda: 0.0)
    progress.show("one")
    progress.close()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
