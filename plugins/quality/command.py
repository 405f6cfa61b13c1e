"""`octavo verify quality`: what an executor's fast mode loses, on texts that are shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from cyclopts import App

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.core.plugins import resolve
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.plugins.quality.measure import Floats, Quality, compare
from octavo.plugins.quality.texts import TEXTS
from octavo.plugins.speculation.command import speculation

GROUP = "octavo.teacher"
REFERENCE = ("file", "fp32")
"""Weights as the file has them, all else in fp32: what exact mode computes."""


class Teacher(Protocol):
    """Entry-point group `octavo.teacher`: of the model at `path`, with `weights` stored and `kv` kept like this, a
    function from ids to logits. `exact` keeps activations in fp32; with `prompt` tokens are computed as a prompt's are,
    otherwise as generated ones. Raises `ModelError` for what it does not have."""

    def __call__(
        self, path: str, weights: str, kv: str, *, exact: bool, prompt: bool = False
    ) -> Callable[[list[int]], Floats]: ...


command = App(name="verify", help="Check what a machine computes.")
command.command(speculation)


@command.command
def quality(
    model: str = "default",
    /,
    *,
    weights: str = "file",
    kv: str = "bf16",
    executor: str = "native",
    exact: bool = False,
    prompt: bool = False,
) -> int:
    """Compare an executor's arithmetic with fp32: KL divergence, agreement of the likeliest token, perplexities.

    Parameters
    ----------
    model
        a GGUF file, a model folder, a hub id or `default`
    weights
        `file` as they are stored, `bf16` rounded to that, `w8` or `w4` quantised to 8 or 4 bits
    kv
        `bf16`, `int8` or `fp32`
    executor
        whose arithmetic it is
    exact
        with activations in fp32, as `executor.mode = exact` has them
    prompt
        as a request's prompt is computed, which may be another way than that of the tokens it is answered with
    """
    activations = "in fp32" if exact else "as fast mode has a prompt's" if prompt else "as in fast mode"
    print(f"{model}, weights {weights}, KV {kv}, activations {activations}, against fp32:\n")
    print(f"{'text':8}{'positions':>10}{'KL':>10}{'top-1':>8}{'perplexity':>12}{'of fp32':>10}")
    for name, found in measured(model, weights, kv, executor=executor, exact=exact, prompt=prompt):
        print(
            f"{name:8}{found.positions:10}{found.kl:10.5f}{found.top1:8.3f}"
            f"{found.perplexity:12.3f}{found.reference:10.3f}"
        )
    return 0


def measured(
    model: str, weights: str, kv: str, *, executor: str = "native", exact: bool = False, prompt: bool = False
) -> Iterator[tuple[str, Quality]]:
    """For each text, by name. Raises `ModelError`."""
    files = locate(model)
    if files.path is None:
        raise ModelError(f"{model!r} has no weights whose quality could be verified")
    teacher: Teacher = resolve(GROUP, executor)
    vocabulary = load_vocabulary(files)
    ours, reference = teacher(model, weights, kv, exact=exact, prompt=prompt), teacher(model, *REFERENCE, exact=True)
    for name, text in TEXTS.items():
        ids = vocabulary.encode(text)
        yield name, compare(ours(ids), reference(ids), ids)
