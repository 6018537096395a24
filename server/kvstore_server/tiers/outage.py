"""Whether a remote place is asked: after a failure not until a pause is over, then once. Time is an argument."""

from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class Outage:
    """Over until something `failed`; then each failure after a pause doubles the next, up to a minute."""

    def __init__(self) -> None:
        self.reason = ""  # of the first failure; "": there is none
        self._pause_s = FIRST_PAUSE_S
        self._began_s = 0.0
        self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<Outage [{f'{self.reason}, pause {self._pause_s:g} s' if self.reason else 'over'}]>"

    def wait_s(self, now_s: float) -> float:
        """How long not to ask; 0: not at all."""
        return max(0.0, self._until_s - now_s) if self.reason else 0.0

    def admit(self, now_s: float) -> bool:
        """Whether to ask now. While it lasts only one may, once in a pause; the end of that must be reported."""
        if not self.reason:
            return True
        if self.wait_s(now_s):
            return False
        self._until_s = now_s + self._pause_s
        return True

    def failed(self, reason: str, now_s: float, *, admitted_s: float) -> bool:
        """What was admitted then has failed; True, if the outage begins with it."""
        if not self.reason:
            self.reason, self._pause_s = reason, FIRST_PAUSE_S
            self._until_s = now_s + self._pause_s
            self._began_s = now_s
            return True
        if admitted_s > self._began_s:  # not one that was under way when it began
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._until_s = now_s + self._pause_s
        return False

    def succeeded(self) -> bool:
        """Something was answered; True, if an outage is over with it."""
        was, self.reason = self.reason, ""
        return bool(was)
