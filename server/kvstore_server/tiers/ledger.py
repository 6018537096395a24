"""Which objects are in a remote place and how much they take, the one written or used longest ago in front."""

from collections.abc import Container, Iterable


class Ledger:
    """Names and sizes within a limit. What is under way counts, and so does what may have failed: it may be there."""

    def __init__(self, capacity_bytes: int, objects: Iterable[tuple[bytes, int]] = ()) -> None:
        """`objects`, name and size of each, the oldest first; they may exceed the limit until `excess` is deleted."""
        self.capacity_bytes = capacity_bytes
        self._sizes = dict(objects)
        self.used_bytes = sum(self._sizes.values())

    def __repr__(self) -> str:
        return f"<Ledger [{len(self._sizes)} objects, {self.used_bytes} of {self.capacity_bytes} bytes]>"

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def add(self, name: bytes, size_bytes: int) -> bool:
        """The object counts, as the newest; False, and nothing changed, if it would exceed the limit."""
        more = size_bytes - self._sizes.get(name, 0)
        if self.used_bytes + more > self.capacity_bytes:
            return False
        self._sizes.pop(name, None)
        self._sizes[name] = size_bytes
        self.used_bytes += more
        return True

    def use(self, name: bytes) -> None:
        """The object, if it is known, is the newest."""
        if name in self._sizes:
            self._sizes[name] = self._sizes.pop(name)

    def remove(self, name: bytes) -> None:
        """The object is not there; unknown ones are ignored."""
        self.used_bytes -= self._sizes.pop(name, 0)

    def excess(self, room_bytes: int, *, most: int, keep: Container[bytes] = ()) -> list[bytes]:
        """The oldest objects, at most so many, without which there is this much room; none, if there is already."""
        found: list[bytes] = []
        left_bytes = self.used_bytes
        for name, size_bytes in self._sizes.items():
            if left_bytes + room_bytes <= self.capacity_bytes or len(found) == most:
                break
            if name not in keep:
                found.append(name)
                left_bytes -= size_bytes
        return found
