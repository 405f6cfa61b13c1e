"""`octavo models`: what a file or folder is, which executors run it, and why others do not.

Reads headers and shapes only: no weight is touched and nothing is started.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import absolute, locate
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.loading.peft import CONFIG as ADAPTER
from octavo.executors.loading.peft import is_adapter, summary
from octavo.executors.loading.rope import Rope
from octavo.executors.loading.rows import Rows
from octavo.executors.loading.spec import Spec
from octavo.executors.native import level
from octavo.executors.native.matrix import GROUP, movable, native_kind, packed_alike

FAILED = 1
PERHAPS = "perhaps: it is tried at start"
"""Said of the executor `transformers`, which knows only when it has loaded a folder whether it can run it."""


class Described(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`runs` and `refused` are by executor: how, or why not."""

    model: str
    what: str = ""
    context: int = 0
    rotation: str = ""
    weights: dict[str, int] = {}
    """Matrices by the format they are stored in."""
    level: str = ""
    """Instructions and threads of this machine, as `native` would compute."""
    runs: dict[str, str] = {}
    refused: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def command(path: str = "default", /, *, json_: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """List what a model file or folder (or a LoRA adapter's) is, or each of those in a folder, and who runs it.

    Parameters
    ----------
    path
        a folder, a GGUF file, a hub id, `default`, or a folder of such files and folders
    json_
        print JSON
    """
    found = [describe(each) for each in _inside(path)]
    if json_:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n\n".join(_text(each) for each in found))
    if any(each.runs for each in found):
        return 0
    print(f"octavo: nothing that can be run in {path}", file=sys.stderr)
    return FAILED


def describe(path: str) -> Described:
    files = None
    try:
        if is_adapter(folder := absolute(path)):
            return _adapter(path, folder)
        files = locate(path)
        checkpoint = open_checkpoint(files)
    except (ModelError, OSError) as error:
        perhaps = {"transformers": PERHAPS} if files is not None and files.kind == "folder" else {}
        return Described(model=path, runs=perhaps, refused=dict.fromkeys(("native", "cpu", "cuda"), str(error)))
    spec = checkpoint.spec
    runs = {"native": _natively(checkpoint)}
    refused: dict[str, str] = {}
    for other, beyond, how in (
        ("cpu", spec.beyond_cpu(), "yes, with weights as fp32"),
        ("cuda", spec.beyond_cuda(), "yes, with a GPU"),
    ):
        if beyond:
            refused[other] = f"it does not have {beyond}"
        else:
            runs[other] = how
    return Described(
        model=path,
        what=_what(spec),
        context=spec.context,
        rotation="; ".join(map(_rotation, spec.ropes)) if _rotates(spec) else f"none: {_instead(spec)}",
        weights=dict(Counter(_stored(part) for parts in checkpoint.matrices.values() for part in parts).most_common()),
        level=level.level(),
        runs=runs,
        refused=refused,
        notes=checkpoint.notes,
    )


def _adapter(path: str, folder: Path) -> Described:
    try:
        about, base = summary(folder)
    except (ModelError, OSError) as error:
        return Described(model=path, refused=dict.fromkeys(("native", "cpu", "cuda"), str(error)))
    how = f"beside the model that it was made for: --set lora.NAME={path}"
    runs = {"native": how, "cpu": how, "cuda": f"{how}, with a GPU"}
    return Described(model=path, what=about, runs=runs, notes=(f"it was made for {base}",))


def _inside(path: str) -> list[str]:
    """The path itself, or the models of a folder that is none."""
    try:
        folder = absolute(path)
        whole = not folder.is_dir()
    except (ModelError, OSError):  # it is said of the one
        return [path]
    if whole or (folder / "config.json").is_file() or is_adapter(folder):
        return [path]
    folders = {config.parent for name in ("config.json", ADAPTER) for config in folder.glob(f"*/{name}")}
    found = sorted([*folder.glob("*.gguf"), *folders])
    return [str(each) for each in found] or [path]


def _natively(checkpoint: Checkpoint) -> str:
    lost: set[str] = set()
    exact: set[str] = set()
    for name, parts in checkpoint.matrices.items():
        moved = any(part.columns is not None for part in parts)
        together = not moved or (movable(name) and (packed_alike(parts) or not name.endswith("gate_up")))
        for part in parts:
            if (kind := native_kind(part.kind)) is None or part.foreign or not together:
                lost.add(_stored(part))
            elif part.origin:
                exact.add(f"{part.origin} as {kind.name}")
    how = "yes, each weight as it is stored"
    if lost:
        how = f"yes; {', '.join(sorted(lost))} becomes 8-bit groups of {GROUP} in fast mode, fp32 in exact mode"
    if exact:
        how += f" ({', '.join(sorted(exact))}, number by number)"
    return f"{how}; an answer does not depend on its company, in both modes"


def _stored(part: Rows) -> str:
    """The format of the file."""
    return part.origin or part.kind.name


def _what(spec: Spec) -> str:
    shared = f", {spec.kv_heads} for keys" if spec.kv_heads != spec.heads else ""
    said = f"{spec.architecture}: {spec.layers} layers of {spec.hidden}, "
    if (latent := spec.latent) is None:
        said += f"{spec.heads} heads of {spec.head_dim}{shared}"
    else:
        said += f"{spec.heads} heads over latents of {latent.rank} + {latent.rotated} numbers a token"
    if spec.experts:
        said += f", {spec.experts.used} of {spec.experts.count} experts"
        said += " beside a shared one" if spec.experts.shared else ""
        said += f" after {spec.experts.dense} dense layers" if spec.experts.dense else ""
    if windows := sorted({window for window in spec.windows if window}):
        sliding = sum(window > 0 for window in spec.windows)
        said += f", a window of {windows[0]} in {sliding} of {spec.layers} layers"
    return f"{said}, {spec.vocab_size} tokens"


def _rotates(spec: Spec) -> bool:
    return any(spec.rotation(i) >= 0 for i in range(spec.layers))


def _instead(spec: Spec) -> str:
    return "learned positions" if spec.learned_positions else "slopes (ALiBi)" if spec.slopes else "no positions"


def _rotation(rope: Rope) -> str:
    factor = f" by {rope.factor:g}" if rope.factor != 1 else ""
    part = f" of {rope.dims} dimensions" if rope.dims else ""
    return f"{rope.kind}{factor}{part}, base {rope.theta:g}"


def _text(found: Described) -> str:
    rows = [("is", found.what or "nothing that is known")]
    if found.context:
        stored = ", ".join(f"{count} {kind}" for kind, count in found.weights.items())
        rows += [("context", f"{found.context} tokens (rotation: {found.rotation})"), ("weights", stored)]
    rows += [(name, how) for name, how in found.runs.items()]
    rows += [("level", f"{found.level} (native, on this machine)")] if found.level else []
    reasons: dict[str, list[str]] = {}
    for name, why in found.refused.items():
        reasons.setdefault(why, []).append(name)
    rows += [(", ".join(names), f"no: {why}") for why, names in reasons.items()]
    rows += [("note", note) for note in found.notes]
    width = max(len(name) for name, _ in rows)
    return "\n".join([found.model, *(f"  {name:{width}}  {said}" for name, said in rows)])
