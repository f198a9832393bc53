"""How key/value heads are cut over devices: which heads a device's queries use, and how many of them run a branch."""

from typing import Any, NamedTuple


class HeadParts(NamedTuple):
    """The key/value heads of a call, cut into `parts` parts; if heads are fewer, several parts use the same head."""

    num_kv_heads: int
    parts: int

    @property
    def size(self) -> int:
        """The number of heads that a part uses."""
        return max(1, self.num_kv_heads // self.parts)

    def first(self, part: Any) -> Any:
        """Returns the global number of a part's first head."""
        return part * self.num_kv_heads // self.parts

    def members(self, numbers: range) -> list[int]:
        """Returns how many of the heads with these numbers each part uses; zero or less where it uses none."""
        firsts = map(self.first, range(self.parts))
        return [min(first + self.size, numbers.stop) - max(first, numbers.start) for first in firsts]
