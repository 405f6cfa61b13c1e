"""From what the user calls a model to the files that it is: a path, a hub id, or one of two names of ours.

Looks only at which files are there; what is in them is for those who read them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from msgspec import Struct

from octavo.core.models import default
from octavo.core.models.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class ModelFiles(Struct, frozen=True):
    """Where a model is. `gguf` is one file, `folder` has config.json, safetensors and tokenizer.json as on
    the Hugging Face hub, `ghost` has no files. `model_id` is the name it is served under by default."""

    kind: Literal["gguf", "folder", "ghost"]
    model_id: str
    path: Path | None = None

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where tokenizer.json is; None for GGUF (it is inside the file) and ghost (it is code)."""
        return self.path if self.kind == "folder" else None


def locate(spec: str) -> ModelFiles:
    """Find `spec`: `default`, `ghost`, a GGUF file, a model folder, or a hub id `org/name`.

    Fetches the default model and hub models that are not on this machine yet. Raises `ModelError`, whose text says
    what was looked for.
    """
    if spec == "ghost":
        return ModelFiles("ghost", "ghost")
    if spec == "default":
        return ModelFiles("gguf", default.MODEL_ID, default.default_model())
    path = absolute(spec)
    if path.is_dir():
        return ModelFiles("folder", path.resolve().name, _checked_folder(path.resolve()))
    if path.is_file():
        return _from_file(path.resolve())
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return ModelFiles("folder", spec, _checked_folder(_from_hub(spec)))
    raise ModelError(
        f"there is no model {spec!r}: no file or folder {path}; "
        "a model is a GGUF file, a folder with config.json, a hub id like org/name, `default` or `ghost`"
    )


def absolute(path: str) -> Path:
    """Raises `ModelError` for what can be none."""
    if "\0" in path:
        raise ModelError(f"{path!r} is no path: it has a zero byte")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # ~NAME, and there is no such user
        raise ModelError(f"{path} begins with the home folder of a user that this machine does not have") from None


def _from_file(path: Path) -> ModelFiles:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is a file but no GGUF file; for a model of several files name its folder ({path.parent})"
        )
    return ModelFiles("gguf", path.stem, path)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; it has GGUF files, name one of them, for example {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{folder} is no model folder: it has no config.json{hint}")
    return folder


def _from_hub(repo_id: str) -> Path:
    """Download what is missing of a hub model; an interrupted download goes on where it stopped."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # its HTTP library's

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} needs its owner's permission: ask for it on huggingface.co, then set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"there is no model {repo_id!r}: no such file or folder here ({Path(repo_id).absolute()}), "
            "and none of that name on the hub that this HF_TOKEN (or no token) can see"
        ) from error
    except (NetworkError, OSError) as error:
        raise ModelError(
            f"{repo_id} is not (wholly) on this machine and could not be fetched from the hub: "
            f"{(str(error) or type(error).__name__).splitlines()[0].rstrip('.')}. "
            "Connect to the network (and unset HF_HUB_OFFLINE), or name a folder or GGUF file that is here."
        ) from error
