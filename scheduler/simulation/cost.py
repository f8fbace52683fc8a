"""What the work of an engine and a disk costs in virtual time and bytes. Whole numbers only."""

from dataclasses import dataclass

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineCost:
    """How long a model takes.

    Prefill: `token_ns` for each token and `attend_ps` (picoseconds) for each earlier position that
    it attends to, so that its rate falls with the context; a chunk takes at least `weights_ns`, in
    which the weights are read once. A decode step reads the weights and each row's keys and values,
    `read_ps` for a position, with `row_ns` of other work for each row. Filling a row from a saved
    block takes `copy_ns`. Each chunk costs `launch_ns` beside its tokens.
    """

    token_ns: int
    attend_ps: int
    weights_ns: int
    read_ps: int
    row_ns: int
    copy_ns: int
    launch_ns: int = 0

    def chunk_ns(self, start: int, length: int) -> int:
        """A chunk of `length` tokens behind `start` others."""
        attended = length * start + length * (length - 1) // 2
        computed_ns = length * self.token_ns + attended * self.attend_ps // 1000
        return self.launch_ns + max(self.weights_ns, computed_ns)

    def step_ns(self, contexts: list[int]) -> int:
        """A decode step of rows that hold so many positions; no row, no step."""
        if not contexts:
            return 0
        rows_ns = len(contexts) * self.row_ns + sum(contexts) * self.read_ps // 1000
        return self.weights_ns + rows_ns


@dataclass(frozen=True, slots=True)
class DiskCost:
    """Bytes a second to and from a disk, and how long a file's flush takes. Files are written one
    behind the other; their flushes overlap. Reading does not disturb writing.
    """

    write_bytes_per_s: int
    read_bytes_per_s: int
    flush_ns: int

    def write_ns(self, num_bytes: int) -> int:
        return num_bytes * NS_PER_S // self.write_bytes_per_s

    def read_ns(self, num_bytes: int) -> int:
        return num_bytes * NS_PER_S // self.read_bytes_per_s
