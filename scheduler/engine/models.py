"""From a name or a folder to a model: which files, what they say, and the engine that runs them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scheduler.engine import builtin, description, device
from scheduler.engine.blas import choose
from scheduler.engine.fake import FakeSource
from scheduler.engine.model import ModelDescription, ModelError, ModelSource
from scheduler.settings import Settings

if TYPE_CHECKING:
    from scheduler.engine.base import Engine
    from scheduler.engine.blas import Setting
    from scheduler.engine.loading import LoadedModel


def resolve(settings: Settings) -> ModelSource:
    """The source of `settings.model`: a built-in name first, else a folder. Nothing is read yet but
    whether it is there. Raises ModelError for what is neither.
    """
    name = settings.model
    if name == "fake":
        return FakeSource(settings.fake)
    if name not in builtin.NAMES and not Path(name).is_dir():
        raise ModelError(
            f"model {name!r} is neither a folder nor one of {', '.join((*builtin.NAMES, 'fake'))}"
        )
    return MlxSource(name, settings.engine.blas)


@dataclass(frozen=True)
class MlxSource:
    """A model that mlx-lm runs."""

    name: str
    blas: "Setting"
    caches: Literal["mlx", "fake"] = "mlx"

    @property
    def folder(self) -> Path:
        """The model's files; those of a built-in model are made if need be."""
        return builtin.ensure(self.name) if self.name in builtin.NAMES else Path(self.name)

    def describe(self) -> ModelDescription:
        """See `ModelSource`. Chooses the BLAS before the tokenizer's import brings mlx in."""
        folder = self.folder
        files = description.open_folder(folder)
        digests = builtin.cache_folder() / "digests.json"
        facts = description.estimate(
            self.name if self.name in builtin.NAMES else folder.resolve().name,
            files,
            description.fingerprint(files, digests),
        )
        blas = choose(self.blas, files.num_parameters)

        from scheduler.engine import tokenizer

        tokenizer.check_kind(files.config)
        return ModelDescription(
            name=facts.name,
            tokenizer=tokenizer.load(folder, _end_of_turn_ids(files)),
            facts=facts,
            blas=blas,
            device_bytes=device.memory_bytes(),
        )

    def load(self, description: ModelDescription) -> "LoadedModel":
        """Loads the weights; called in the engine's thread. Raises ModelError."""
        from scheduler.engine import loading

        bitwise = description.blas == "stock"
        return loading.load(self.folder, description.facts, bitwise=bitwise)

    def make_engine(self, description: ModelDescription, nonce: int) -> "Engine":  # noqa: ARG002
        """See `ModelSource`. The nonce is nothing to this engine: its tokens are the model's."""
        from scheduler.engine.mlx_engine import MlxEngine

        return MlxEngine(partial(self.load, description), description.tokenizer)


def _end_of_turn_ids(files: description.ModelFiles) -> list[int] | None:
    """The tokens that end a turn by the first configuration that names any; without, the
    tokenizer's own.
    """
    for config in (files.generation_config, files.config, files.text_config):
        found = config.token_ids("eos_token_id")
        if found is not None:
            return found
    return None
