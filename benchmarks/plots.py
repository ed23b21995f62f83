"""The pictures of the suite: ratios to torch.mm, and how near to the hardware's floor. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

import tables
from results_file import conditions
from tables import Row

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402

_SERIES = (
    ("torch.mm", "torch", "tab:gray", "s"),
    ("default", "default", "tab:orange", "^"),
    ("gemm", "gemm", "tab:blue", "o"),
)
_DPI = 80


def plot_ratio(path: Path, results: Mapping[str, Any]) -> None:
    """torch.mm's time over gemm's: a thin line for each weight, and the geometric mean, by layout."""
    rows = tables.has_ratio(results["rows"])
    layouts = tables.layouts_of(rows)
    figure, axes = pyplot.subplots(
        1, len(layouts), figsize=(5.5 * len(layouts), 4), sharey=True, squeeze=False
    )
    for axis, layout in zip(axes[0], layouts):
        of_layout = [row for row in rows if row["layout"] == layout]
        for own in _by_weight(of_layout):
            axis.plot(_Ms(own), [row["ratio"] for row in own], color="#a8c8e8", lw=0.8)
        Ms = sorted({row["M"] for row in of_layout})
        means = [tables.mean(row["ratio"] for row in of_layout if row["M"] == M) for M in Ms]
        axis.plot(Ms, means, color="tab:blue", lw=2.5, label="geometric mean")
        axis.axhline(1, color="black", lw=1)
        axis.axhline(
            tables.LEAST_RATIO, color="tab:red", lw=1, ls=":", label=f"{tables.LEAST_RATIO}"
        )
        _finish(axis, f"{layout}, {len(of_layout)} points")
    axes[0][0].set_ylabel("torch.mm's time / gemm's (above 1: faster)")
    axes[0][0].legend()
    _save(figure, path, results)


def plot_throughput(path: Path, results: Mapping[str, Any]) -> None:
    """TFLOP/s and GB/s of the smallest, the middle and the largest weight, with the floor drawn in."""
    rows = tables.has_ratio(results["rows"])
    layout = tables.layouts_of(rows)[0]
    weights = _by_weight([row for row in rows if row["layout"] == layout])
    weights.sort(key=lambda own: own[0]["N"] * own[0]["K"])
    chosen = [weights[index] for index in sorted({0, len(weights) // 2, len(weights) - 1})]
    figure, axes = pyplot.subplots(
        2, len(chosen), figsize=(4.2 * len(chosen), 7), sharex=True, squeeze=False
    )
    for column, own in enumerate(chosen):
        for axis, amount, unit in zip(
            axes[:, column], (_teraflops, _gigabytes), ("TFLOP/s", "GB/s")
        ):
            floor = [amount(row) / (row["floor_us"] * 1e-6) for row in own]
            axis.plot(_Ms(own), floor, color="black", lw=1, ls="--", label="hardware floor")
            for label, provider, colour, marker in _SERIES:
                timed = [row for row in own if row["us"].get(provider)]
                values = [amount(row) / (row["us"][provider] * 1e-6) for row in timed]
                axis.plot(
                    _Ms(timed), values, color=colour, marker=marker, ms=3.5, lw=1.2, label=label
                )
            _finish(axis, f"{layout}, N={own[0]['N']}, K={own[0]['K']}")
            axis.set_ylabel(unit)
        axes[0][column].set_yscale("log")
    axes[0][0].legend()
    _save(figure, path, results)


def _teraflops(row: Row) -> float:
    return 2 * row["M"] * row["N"] * row["K"] / 1e12


def _gigabytes(row: Row) -> float:
    """All three matrices, in two bytes an element, each one once."""
    M, N, K = row["M"], row["N"], row["K"]
    return 2 * (M * K + N * K + M * N) / 1e9


def _by_weight(rows: Sequence[Row]) -> list[list[Row]]:
    weights = dict.fromkeys((row["N"], row["K"]) for row in rows)
    return [
        sorted((row for row in rows if (row["N"], row["K"]) == weight), key=lambda row: row["M"])
        for weight in weights
    ]


def _Ms(rows: Sequence[Row]) -> list[int]:
    return [row["M"] for row in rows]


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("M")
    axis.grid(True, alpha=0.3)


def _save(figure: Any, path: Path, results: Mapping[str, Any]) -> None:
    figure.suptitle(conditions(results["environment"]), fontsize=9)
    figure.tight_layout()
    # Without the date and version of matplotlib, which would change the file for nothing.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)
