"""Files in whose order something is wrong: a check that does not notice checks nothing."""

from pathlib import Path

from tests.power.server import SteadyFiles


class NeverFlushed(SteadyFiles):
    """A file gets its name before its bytes are durable."""

    def flush(self, descriptor: int) -> None:
        del descriptor


class NamesNeverFlushed(SteadyFiles):
    """A file is called saved before its name is durable."""

    def flush_folder(self, folder: Path) -> None:
        del folder


class FoldersNeverFlushed(SteadyFiles):
    """The names of files are durable, those of their folders are not."""

    def flush_folder(self, folder: Path) -> None:
        if any(path.is_file() for path in folder.iterdir()):
            super().flush_folder(folder)


class FlushedTooLate(SteadyFiles):
    """Whoever flushes hears at once that it is done, and it is done before the next file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.late: list[Path | int] = []

    def create(self, path: Path) -> int:
        late, self.late = self.late, []
        for each in late:
            if isinstance(each, Path):
                super().flush_folder(each)
            else:
                super().flush(each)
        return super().create(path)

    def flush(self, descriptor: int) -> None:
        self.late.append(descriptor)

    def flush_folder(self, folder: Path) -> None:
        self.late.append(folder)
