"""The policies again, as slow and literal as possible: plain lists, one key at a time."""


def take(part, count, pinned):
    """The first ``count`` keys not pinned; the pinned ones passed on the way go to the end."""
    taken = [k for k in part if k not in pinned][:count]
    passed = len(part)
    if len(taken) == count:
        passed = part.index(taken[-1]) + 1 if taken else 0
    kept = [k for k in part[:passed] if k in pinned]
    return taken, part[passed:] + kept


class NaiveLRU:
    def __init__(self, capacity):
        self.keys = []

    def insert(self, key):
        self.keys.append(key)

    def touch(self, key):
        if key in self.keys:
            self.keys = [k for k in self.keys if k != key] + [key]

    def evict(self, count, pinned):
        taken, self.keys = take(self.keys, count, pinned)
        return taken

    def remove(self, key):
        self.keys = [k for k in self.keys if k != key]

    def clear(self):
        self.keys = []

    def resident(self):
        return list(self.keys)


class NaiveARC:
    """Figure 4 of the paper, with its subroutine REPLACE asked for separately."""

    def __init__(self, capacity):
        self.c = capacity
        self.clear()

    def clear(self):
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def insert(self, key):
        if key in self.b1:  # case II
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:  # case III
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.b2.remove(key)
            self.t2.append(key)
        else:  # case IV
            if len(self.t1) + len(self.b1) == self.c:
                del self.b1[0]
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                del self.b2[0]
            self.t1.append(key)

    def touch(self, key):  # case I
        for part in (self.t1, self.t2):
            if key in part:
                part.remove(key)
                self.t2.append(key)
                return

    def replace(self):
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]

    def evict(self, count, pinned):
        if not pinned:
            return [self.replace() for _ in range(count)]
        wanted = sum(1 for i in range(count) if len(self.t1) - i > self.p)
        taken, self.t1 = take(self.t1, wanted, pinned)
        self.b1 += taken
        more, self.t2 = take(self.t2, count - len(taken), pinned)
        self.b2 += more
        short = count - len(taken) - len(more)
        if short:
            rest, self.t1 = take(self.t1, short, pinned)
            self.b1 += rest
            return taken + more + rest
        return taken + more

    def remove(self, key):
        for part in (self.t1, self.t2):
            if key in part:
                part.remove(key)

    def resident(self):
        return self.t1 + self.t2
