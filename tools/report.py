"""What `tune.py` shows: tables, a file for other programs, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

_PLOT_COLUMNS = 4
_SERIES = (
    ("torch.mm", "torch_us", "tab:gray", "s"),
    ("default", "default_us", "tab:orange", "^"),
    ("tuned", "tuned_us", "tab:blue", "o"),
)


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


def first_line(error: BaseException) -> str:
    """What ``error`` says, in one line; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def check_plot(path: Path) -> None:
    """Raises: ValueError where matplotlib is not installed, or writes no such file."""
    import_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot expects a file of type {', '.join(sorted(known))}, got {path}")


def plot(path: Path, device: str, rows: Sequence[Row]) -> None:
    """For each weight times over M, and below them how many times as fast as torch.mm that is."""
    pyplot = import_pyplot()
    weights = list(dict.fromkeys(row[:3] for row in rows))
    columns = min(len(weights), _PLOT_COLUMNS)
    lines = -(-len(weights) // columns)
    figure, axes = pyplot.subplots(
        2 * lines, columns, figsize=(1 + 4.5 * columns, 7 * lines), sharex="all", squeeze=False
    )
    pairs = [
        (axes[2 * line][i], axes[2 * line + 1][i]) for line in range(lines) for i in range(columns)
    ]
    for (above, below), weight in zip(pairs, weights):
        own = [row for row in rows if row[:3] == weight]
        for name, key, colour, marker in _SERIES:
            style = {"color": colour, "marker": marker, "markersize": 4, "label": name}
            timed = [row for row in own if getattr(row, key)]
            above.plot([row.M for row in timed], [getattr(row, key) for row in timed], **style)
            if key != "torch_us":
                timed = [row for row in timed if row.torch_us]
                ratios = [row.torch_us / getattr(row, key) for row in timed]
                below.plot([row.M for row in timed], ratios, **style)
        below.axhline(1, color="tab:gray", linewidth=1)
        N, K, layout = weight
        above.set_title(f"(M, {K}) @ ({K}, {N}), {layout}", fontsize=10)
        above.set_xscale("log", base=2)
        above.set_yscale("log")
        above.set_ylabel("time, µs")
        below.set_ylabel("times as fast as torch.mm")
        below.set_xlabel("M")
        for axis in (above, below):
            axis.tick_params(labelbottom=True)
            axis.grid(True, which="major", alpha=0.3)
    for unused in pairs[len(weights) :]:
        for axis in unused:
            axis.remove()
    pairs[0][0].legend()
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def coverage_table(rows: Sequence[tuple]) -> str:
    """(layer, how many there are, N, K, layout, what is tuned) for each weight."""
    headers = ("layer", "times", "N", "K", "layout", "tuned on this device")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
