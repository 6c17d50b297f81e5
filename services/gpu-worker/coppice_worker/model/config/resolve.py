"""From what a user names, a folder or a model on the Hugging Face hub, to a folder with a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from coppice.errors import UnavailableError
from coppice_worker.model.config.errors import CheckpointError

# Everything that serving needs and nothing that could run code when it is opened.
SERVED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_UNWANTED_FILES = ["consolidated*", "original/*"]  # the same weights again, in the form of those who trained them
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


def resolve_checkpoint(source: str | Path, files: Sequence[str] = SERVED_FILES) -> Path:
    """A local folder as it is; `files` of `owner/name` or `owner/name@revision` are downloaded from the hub (or its
    cache).

    Raises CheckpointError if there is neither such a folder nor such a model, UnavailableError if the hub cannot
    be reached or its package is not installed.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(folder, "is a file", "point at the folder that holds config.json and the weights")
    named = _HUB_ID.fullmatch(str(source))
    if named is None:
        raise CheckpointError(folder, "no such folder", "point at a checkpoint folder, or name a model as owner/name")
    return _download(named["repo"], named["revision"], files)


def _download(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as cause:
        raise UnavailableError(
            f"{repo}: no such folder here, and downloading needs the package huggingface_hub",
            hint="install it with pip install 'coppice[up]', or point at a checkpoint folder",
        ) from cause
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(files), ignore_patterns=_UNWANTED_FILES)
        )
    except LocalEntryNotFoundError as cause:
        raise UnavailableError(
            f"{repo}: no such folder here, and the hub cannot be reached",
            hint="check the network, or download the model elsewhere and point at its folder",
        ) from cause
    except HfHubHTTPError as cause:
        raise CheckpointError(
            repo,
            f"no such folder here, and the hub refused ({_first_line(cause)})",
            "check the model's name and revision, and set HF_TOKEN if it is gated",
        ) from cause
    except OSError as cause:
        raise UnavailableError(
            f"{repo}: no such folder here, and the download failed ({_first_line(cause)})",
            hint="check the network and the disk, then try again",
        ) from cause


def _first_line(cause: BaseException) -> str:
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
