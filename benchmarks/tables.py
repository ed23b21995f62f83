"""Results as Markdown tables; nothing here measures. The rows are those of `compare.py` and `latency.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

BANDS = {"M <= 16": (1, 16), "M 17 to 1023": (17, 1023), "M >= 1024": (1024, 1 << 40)}
# A point is lost where torch.mm takes less than this of our time.
LEAST_RATIO = 0.97
WORST = 10
# Elements of a weight of 64 MiB in two bytes each: one that no L2 cache holds.
_LARGE_WEIGHT = 32 << 20

Row = Mapping[str, Any]


def markdown(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    return tabulate(list(rows), headers, tablefmt="github", disable_numparse=True)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def mean(values: Iterable[float]) -> float:
    """The geometric mean, which is what ratios have."""
    return statistics.geometric_mean(values)


def in_band(rows: Iterable[Row], low: int, high: int) -> list[Row]:
    return [row for row in rows if low <= row["M"] <= high]


def has_ratio(rows: Iterable[Row]) -> list[Row]:
    """The points at which both gemm and torch.mm have a time."""
    return [row for row in rows if row["ratio"] is not None]


def banded(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Layout, name of the band of M and rows of each band that has some, and of each layout's whole."""
    for layout in layouts_of(rows):
        of_layout = [row for row in rows if row["layout"] == layout]
        for name, (low, high) in {**BANDS, "all": (1, 1 << 40)}.items():
            band = in_band(of_layout, low, high)
            if band:
                yield layout, name, band


def layouts_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["layout"] for row in rows))


def lost(rows: Iterable[Row]) -> list[Row]:
    """The points where torch.mm is clearly faster, the worst first."""
    return sorted((row for row in rows if row["ratio"] < LEAST_RATIO), key=lambda row: row["ratio"])


def shape(row: Row) -> str:
    return f"{row['M']} x {row['N']} x {row['K']}"


def family(row: Row) -> str:
    return row["configs"]["gemm"].get("kernel", "tiled") if "gemm" in row["configs"] else ""


def of_floor(row: Row, provider: str) -> float | None:
    """Which part of the hardware's floor a provider reaches: 1 is all that the card can do."""
    us = row["us"].get(provider)
    return None if us is None else row["floor_us"] / us


def default_ratio(row: Row) -> float | None:
    """torch.mm's time over that of the configuration for a call without a file."""
    us = row["us"].get("default")
    return None if us is None else row["us"]["torch"] / us


def band_table(rows: Sequence[Row]) -> str:
    """Geometric means by layout and band of M."""
    table = [(layout, name, *_band_cells(band)) for layout, name, band in banded(rows)]
    headers = (
        "layout", "M", "points", "torch / gemm", "worst", f"below {LEAST_RATIO}",
        "torch / default", "of the floor",
    )  # fmt: skip
    return markdown(table, headers)


def _band_cells(band: Sequence[Row]) -> tuple:
    default = [ratio for ratio in map(default_ratio, band) if ratio is not None]
    return (
        len(band),
        *_ratio_cells(band),
        len(lost(band)),
        f"{mean(default):.3f}" if default else "",
        f"{mean(of_floor(row, 'gemm') for row in band):.3f}",
    )


def point_table(rows: Iterable[Row]) -> str:
    """One line for each point, with all that is compared by default."""
    table = [
        (
            row["layout"],
            shape(row),
            *(number(row["us"].get(name), ".1f") for name in ("torch", "gemm", "default")),
            number(row["ratio"], ".3f"),
            family(row),
            number(of_floor(row, "gemm"), ".2f"),
        )
        for row in rows
    ]
    headers = (
        "layout", "M x N x K", "torch µs", "gemm µs", "default µs", "torch / gemm", "family",
        "of the floor",
    )  # fmt: skip
    return markdown(table, headers)


def bandwidth_table(rows: Iterable[Row]) -> str:
    """M = 1 on weights that no cache holds: what of a copy's bandwidth is reached; empty without such rows."""
    table = [
        (row["layout"], f"{row['N']} x {row['K']}", number(row["us"].get("gemm"), ".1f"))
        + tuple(number(of_floor(row, name), ".3f") for name in ("gemm", "torch"))
        for row in rows
        if row["M"] == 1 and row["N"] * row["K"] >= _LARGE_WEIGHT
    ]
    return markdown(table, ("layout", "N x K", "gemm µs", "gemm", "torch.mm")) if table else ""


def cpu_table(rows: Sequence[Row]) -> str:
    cells = [[f"{v:.1f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    return markdown(cells, ["CPU µs", *list(rows[0])[1:]])


def provider_names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["us"]))


def provider_points(rows: Sequence[Row]) -> str:
    """Microseconds of each provider at each point."""
    names = provider_names(rows)
    table = [
        (row["layout"], shape(row), *(number(row["us"].get(name), ".1f") for name in names))
        for row in rows
    ]
    return markdown(table, ("layout", "M x N x K", *names))


def provider_means(rows: Sequence[Row]) -> str:
    """Each provider's time as a multiple of gemm's, over the points where it has one."""
    table = []
    for name in provider_names(rows):
        own = [row["multiples"][name] for row in rows if name in row["multiples"]]
        if own:
            table.append((name, len(own), f"{mean(own):.3f}", f"{min(own):.3f}", f"{max(own):.3f}"))
    return markdown(table, ("", "points", "its time / gemm's", "least", "most"))


def missing_lines(rows: Iterable[Row]) -> list[str]:
    """A line for each provider and reason, with the points that have no time for it."""
    points: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.get("missing", {}).items():
            points.setdefault((name, reason), []).append(f"{row['layout']} {shape(row)}")
    return [
        f"- {name}: {reason} ({', '.join(at[:3])}{f' and {len(at) - 3} more' if len(at) > 3 else ''})"
        for (name, reason), at in points.items()
    ]


def comparison_summary(results: Mapping[str, Any]) -> str:
    """What `compare.py` prints: means, the slowest points, and what is missing."""
    environment, rows = results["environment"], results["rows"]
    compared = has_ratio(rows)
    parts = [
        f"copy {environment['copy_tb_s']} TB/s, torch.mm {environment['mm_tflop_s']} TFLOP/s",
        cpu_table(results["cpu"]) if results["cpu"] else "",
        band_table(compared) if compared else "",
        bandwidth_table(compared),
        point_table(sorted(compared, key=lambda row: row["ratio"])[:WORST]) if compared else "",
        provider_points(rows) if set(provider_names(rows)) - {"gemm", "default", "torch"} else "",
        provider_means(rows),
        "\n".join(missing_lines(rows)),
    ]
    return "\n\n".join(filter(None, parts))


def latency_table(rows: Iterable[Row]) -> str:
    """Milliseconds until a new process has its first result, one line for each way to compute it."""
    table = [
        (row["case"], "", row["missing"], "", "", "", "", "")
        if "missing" in row
        else (
            row["case"],
            number(row["cold_ms"], ".0f"),
            f"{row['first_ms']:.1f}",
            f"{row['least_ms']:.1f} to {row['most_ms']:.1f}",
            f"{row['second_ms']:.2f}",
            number(row["configs_measured"], "d"),
            f"{row['import_ms']:.0f}",
            f"{row['device_ms']:.0f}",
        )
        for row in rows
    ]
    headers = (
        "first call", "cold ms", "warm ms", "from, to", "second ms", "configurations measured",
        "imports ms", "device ms",
    )  # fmt: skip
    return markdown(table, headers)


def default_reached(rows: Iterable[Row]) -> list[float]:
    """gemm's time over the default's, at each point: what the default reaches of the tuned speed."""
    return [1 / row["multiples"]["default"] for row in rows]


def default_bands(rows: Sequence[Row]) -> str:
    """What the default reaches of the tuned speed, by layout and band of M."""
    table = []
    for layout, name, band in banded(rows):
        reached = default_reached(band)
        ratios = [row["multiples"]["torch"] / row["multiples"]["default"] for row in band]
        table.append(
            (layout, name, len(band), f"{mean(reached):.3f}", f"{min(reached):.3f}")
            + (f"{mean(ratios):.3f}",)
        )
    headers = ("layout", "M", "points", "tuned / default", "worst", "torch / default")
    return markdown(table, headers)


def default_points(rows: Iterable[Row]) -> str:
    """The points where the default takes longest beside tuned."""
    worst = sorted(rows, key=lambda row: -row["multiples"]["default"])[:WORST]
    table = [
        (
            row["layout"],
            shape(row),
            *(number(row["us"][name], ".1f") for name in ("gemm", "default", "torch")),
            f"{1 / row['multiples']['default']:.3f}",
            family(row),
        )
        for row in worst
    ]
    headers = ("layout", "M x N x K", "tuned µs", "default µs", "torch µs", "tuned / default")
    return markdown(table, (*headers, "tuned family"))


def model_times(rows: Iterable[Row]) -> str:
    """A line for each regime of each model; a ratio above 1 is faster than the original."""
    table = [
        (row["model"], row["regime"], row["how"], f"{row['original_ms']:.3f}")
        + (f"{row['our_ms']:.3f}", f"{row['ratio']:.3f}")
        for row in rows
    ]
    return markdown(table, ("model", "regime", "", "original ms", "ours ms", "ratio"))


def model_errors(models: Mapping[str, Mapping[str, Any]]) -> str:
    """How far both forms of each model are from the same model in float32."""
    table = [
        (name, f"{one['original_error']:.2e}", f"{one['our_error']:.2e}")
        + (", ".join(one["untuned"]) or "none",)
        for name, one in models.items()
    ]
    headers = ("model", "logits: error of the original", "of ours", "weights still without a file")
    return markdown(table, headers)


def training_line(curves: Mapping[str, Sequence[float]], difference: float) -> str:
    original, ours = curves["original"], curves["ours"]
    return (
        f"Training, {len(original)} steps: loss {original[0]:.4f} to {original[-1]:.4f} (original), "
        f"{ours[-1]:.4f} (ours); largest difference {difference:.2e} of the loss."
    )


def tuned_here(row: Row) -> str | None:
    """The provider whose file was tuned for this very M, if it has a time."""
    return next((name for name in row["multiples"] if name.startswith("configs:")), None)


def between_losses(rows: Iterable[Row]) -> list[float]:
    """gemm's time over that of what was tuned for the very M, at each point that has both."""
    return [1 / row["multiples"][name] for row in rows if (name := tuned_here(row)) is not None]


def between_bands(rows: Sequence[Row]) -> str:
    """What it costs that an M has no entry, by layout and band of M, and what a call without a file would."""
    table = []
    for layout, name, band in banded([row for row in rows if tuned_here(row)]):
        losses = between_losses(band)
        default = [
            row["multiples"]["default"] / row["multiples"][tuned_here(row)]
            for row in band
            if "default" in row["multiples"]
        ]
        table.append(
            (layout, name, len(losses), f"{mean(losses):.3f}", f"{max(losses):.3f}")
            + (f"{mean(default):.3f}" if default else "",)
            + _ratio_cells(has_ratio(band))
        )
    return markdown(
        table,
        ("layout", "M", "points", "gemm / tuned here", "worst", "default / tuned here")
        + ("torch / gemm", "worst"),
    )


def _ratio_cells(rows: Sequence[Row]) -> tuple[str, str]:
    ratios = [row["ratio"] for row in rows]
    return (f"{mean(ratios):.3f}", f"{min(ratios):.3f}") if ratios else ("", "")


def between_points(rows: Iterable[Row]) -> str:
    table = [
        (
            row["layout"],
            shape(row),
            *(
                number(row["us"].get(provider), ".1f")
                for provider in ("torch", "gemm", "default", name)
            ),
            f"{1 / row['multiples'][name]:.3f}",
        )
        for row in rows
        if (name := tuned_here(row)) is not None
    ]
    headers = (
        "layout", "M x N x K", "torch µs", "gemm µs", "default µs", "tuned here µs",
        "gemm / tuned here",
    )  # fmt: skip
    return markdown(table, headers)
