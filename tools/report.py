"""What `tune.py` shows: tables, a file for other programs, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate


class Row(NamedTuple):
    """One M of one weight, as measured; times in microseconds, None where there is none."""

    N: int
    K: int
    layout: str
    M: int
    default_us: float | None
    tuned_us: float
    torch_us: float | None
    config: dict

    @property
    def gain(self) -> float | None:
        """How many times as fast as the default."""
        return None if self.default_us is None else self.default_us / self.tuned_us


def rows_of(problem: Any, measured: dict[int, Any], Ms: Sequence[int]) -> list[Row]:
    """Rows for those of ``Ms`` that were measured."""
    return [
        Row(
            problem.N, problem.K, problem.layout, M,
            measured[M].default_us, measured[M].tuned_us, measured[M].torch_us, measured[M].top[0][1],
        )
        for M in sorted(Ms)
        if M in measured
    ]  # fmt: skip


def results_table(rows: Sequence[Row]) -> str:
    """One line for each M of each weight."""
    headers = ("M", "default µs", "tuned µs", "torch µs", "gain", "family", "configuration")
    table = [
        (
            row.M,
            *(_number(us, ".1f") for us in (row.default_us, row.tuned_us, row.torch_us)),
            _number(row.gain, ".2f"),
            row.config.get("kernel", "tiled"),
            describe(row.config),
        )
        for row in rows
    ]
    if len({row[:3] for row in rows}) > 1:
        headers = ("N", "K", "layout", *headers)
        table = [(*row[:3], *cells) for row, cells in zip(rows, table)]
    return tabulate(table, headers, tablefmt="github", disable_numparse=True)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def describe(config: dict) -> str:
    """A configuration in a few words, without its family."""
    tile = "x".join(str(config[f"BLOCK_SIZE_{side}"]) for side in "MNK")
    extra = "".join(
        f", {key} {value}"
        for key, value in config.items()
        if key not in ("num_warps", "num_stages", "kernel") and not key.startswith("BLOCK_SIZE_")
    )
    return f"{tile}, {config['num_warps']} warps, {config['num_stages']} stages{extra}"


def write_json(path: Path, device: str, rows: Sequence[Row]) -> None:
    content = {
        "device": device,
        "results": [{**row._asdict(), "gain": row.gain and round(row.gain, 4)} for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def import_pyplot() -> Any:
    """matplotlib's pyplot, which draws into files. Raises: ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib; run `pip install matplotlib`") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot(path: Path, device: str, rows: Sequence[Row]) -> None:
    """Times over M above, and below how many times as fast as torch.mm; a column for each weight."""
    pyplot = import_pyplot()
    weights = list(dict.fromkeys(row[:3] for row in rows))
    figure, axes = pyplot.subplots(
        2,
        len(weights),
        figsize=(1 + 4.5 * len(weights), 7),
        sharex="col",
        sharey="row",
        squeeze=False,
    )
    for (above, below), weight in zip(axes.T, weights):
        N, K, layout = weight
        own = [row for row in rows if row[:3] == weight]
        Ms = [row.M for row in own]
        series = {
            "torch.mm": ([row.torch_us for row in own], "tab:gray", "s"),
            "default": ([row.default_us for row in own], "tab:orange", "^"),
            "tuned": ([row.tuned_us for row in own], "tab:blue", "o"),
        }
        for name, (times, colour, marker) in series.items():
            known = [(M, us) for M, us in zip(Ms, times) if us]
            above.plot(*zip(*known), color=colour, marker=marker, markersize=4, label=name)
            if name != "torch.mm":
                ratios = [
                    (M, row.torch_us / us)
                    for (M, us), row in zip(zip(Ms, times), own)
                    if us and row.torch_us
                ]
                if ratios:
                    below.plot(*zip(*ratios), color=colour, marker=marker, markersize=4, label=name)
        below.axhline(1, color="tab:gray", linewidth=1)
        above.set_title(f"(M, {K}) @ ({K}, {N}), {layout}", fontsize=10)
        above.set_xscale("log", base=2)
        above.set_yscale("log")
        below.set_xlabel("M")
        for axis in (above, below):
            axis.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("time, µs")
    axes[1][0].set_ylabel("times as fast as torch.mm")
    axes[0][0].legend()
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def coverage_table(rows: Sequence[tuple]) -> str:
    """(layer, N, K, layout, what there is) for each weight."""
    headers = ("layer", "N", "K", "layout", "tuned on this device")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
