"""Blocks without mlx: what the store sees of one."""

from pathlib import Path

from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import BlockFile, StateFile, TailFile

DOMAIN = "ab" * 32
BLOCK = BlockFile(DOMAIN, "1" * 64)
STATE = StateFile(DOMAIN, "1" * 64)
TAIL = TailFile(DOMAIN, "req_0", 300)


def piece(num_bytes: int = 64, fill: int = 7) -> dict[str, Tensor]:
    """A block of three tensors, one of them empty."""
    num_bytes -= 3
    data = bytes((fill + index) % 256 for index in range(num_bytes))
    return {
        "0.keys": Tensor("U8", (1, 1, num_bytes, 1), memoryview(data)),
        "0.nothing": Tensor("U8", (1, 1, num_bytes, 0), memoryview(b"")),
        "0.values": Tensor("U8", (1, 1, 1, 3), memoryview(b"val")),
    }


def block(number: int) -> BlockFile:
    """A block by its number."""
    return BlockFile(DOMAIN, f"{number:064x}")


def files_below(folder: Path) -> list[str]:
    """All that is below a folder, but for folders."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)
