"""Where a process is to be killed: at named points (see journal/crashpoints.py)."""

from journal import crashpoints


class Killed(Exception):
    """The process ends here, hard. `power`: the machine does."""

    def __init__(self, *, power: bool = False) -> None:
        super().__init__("the process is killed")
        self.power = power


class Marks:
    """Points that kill, each at its n-th pass from when it was armed. While any is armed the hook
    for points is ours.
    """

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.installed = False

    def arm(self, point: str, passes: int) -> None:
        """Kills the process that comes to this point for the n-th time from now on."""
        assert point in crashpoints.POINTS, f"there is no point {point}"
        self.left[point] = max(1, passes)
        if not self.installed:
            crashpoints.install(self.reach)
            self.installed = True

    def reach(self, point: str) -> None:
        """The process has come to a point."""
        left = self.left.get(point)
        if left is None:
            return
        self.left[point] = left - 1
        if left == 1:
            del self.left[point]
            raise Killed

    def disarm(self) -> None:
        """Nothing kills any more."""
        self.left.clear()
        if self.installed:
            crashpoints.remove()
            self.installed = False
