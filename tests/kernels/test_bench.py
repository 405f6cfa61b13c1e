"""The benchmarks that a GPU is to run do run: in small, on the emulator. What they measure here means nothing."""

from __future__ import annotations

from octavo.executors.cuda.emulated import again
from tests.bench.cuda_kernels import TINY, Bench, table
from tests.kernels.conftest import Maker


def test_every_figure_is_measured(resident_kernels: Maker) -> None:
    bench = Bench(resident_kernels(1), TINY, again)
    bench.run()
    assert len(bench.figures) == len({figure.name for figure in bench.figures}) == 16
    assert all(figure.value > 0 for figure in bench.figures)
    assert table(bench.figures).count("\n") == 17
