"""Which model is served: the demo that ships with the package, a folder, or one from the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import coppice
from coppice.errors import UnavailableError, UsageError

DEMO_MODEL_NAME = "coppice-demo"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a model, and the name that clients call it by."""

    folder: Path
    name: str


def demo_model_folder() -> Path:
    """Where the demo model lies in an installed package."""
    return Path(coppice.__file__).parent / "demo_model"


def find_checkpoint(model: str) -> Checkpoint:
    """The demo for an empty `model`, else a folder or a hub id (downloaded when it is not in the hub's cache).

    Raises UsageError for what is no checkpoint and UnavailableError when the hub cannot be reached. What is inside
    the files is the worker's to judge.
    """
    if not model:
        folder = demo_model_folder()
        if not (folder / "config.json").exists():
            raise UnavailableError("this installation has no demo model", hint="give --model FOLDER_OR_HUB_ID")
        return Checkpoint(folder, DEMO_MODEL_NAME)
    try:
        from coppice_worker.model.config.resolve import resolve_checkpoint
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"the worker is not installed ({error.name} is missing)", hint="pip install 'coppice[up]'"
        ) from error
    is_folder = Path(model).expanduser().is_dir()
    folder = resolve_checkpoint(model).resolve()
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder}: config.json is missing", hint="point --model at a folder with a checkpoint")
    return Checkpoint(folder, folder.name if is_folder else model)
