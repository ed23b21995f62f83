"""What the README says of the results, made of the kept files; `results.py` puts it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tables
from results_file import conditions
from tables import Row


def headline(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """What the README says of the results: against what, on what, how measured, and where it is slower."""
    results = kept["compare"]
    environment, rows = results["environment"], tables.has_ratio(results["rows"])
    weights = len({(row["N"], row["K"]) for row in rows})
    lost = tables.lost(rows)
    default = [ratio for ratio in map(tables.default_ratio, rows) if ratio is not None]
    ratio = tables.mean(row["ratio"] for row in rows)
    by_layout = ", ".join(
        f"{layout} {tables.mean(row['ratio'] for row in rows if row['layout'] == layout):.3f}"
        for layout in tables.layouts_of(rows)
    )
    lines = [
        f"**{ratio:.3f} times as fast as `torch.mm`** (cuBLAS, default settings) in geometric mean ({by_layout}), "
        f"over {len(rows)} points: {weights} weights that files ship for, at {len({row['M'] for row in rows})} values of M that "
        "these have, with b as the transpose of an (N, K) weight as in `nn.Linear` (NT) and as a row-major matrix (NN). Ratios are "
        f"torch.mm's time over ours: above 1 we are faster. {conditions(environment)}. "
        f"{environment['protocol']}; each result is checked before it is timed.",
    ]
    slower = f"it is slower at all at {sum(row['ratio'] < 1 for row in rows)} of {len(rows)} points"
    if lost:
        points = "; ".join(
            f"{tables.shape(row)} {row['layout']} at {row['ratio']:.3f}" for row in lost[:3]
        )
        lines.append(
            f"**Where it loses:** slower than `torch.mm` by more than 3 % at {len(lost)} points; {slower}. "
            f"The slowest, as M x N x K: {points}."
        )
    else:
        lines.append(
            "**Where it loses:** nowhere is it slower than `torch.mm` by more than 3 % (the slowest point is at "
            f"{min(row['ratio'] for row in rows):.3f}); {slower}."
        )
    if default:
        lines[-1] += (
            f" Without a file, with the default, the mean is {tables.mean(default):.3f}, and "
            f"{sum(ratio < tables.LEAST_RATIO for ratio in default)} points are slower by more than 3 %, the slowest at {min(default):.3f}."
        )
    lines.append(tables.band_table(rows))
    lines.append(
        "The floor is what all bytes take at the speed of a copy, or all multiply-adds at the rate of a large "
        "`torch.mm`, whichever is longer."
    )
    lines.append("![torch.mm's time over gemm's, over M](benchmarks/plots/ratio.png)")
    more = [
        sentence
        for sentence in (
            _sustained_line(kept),
            _unseen_line(kept),
            _models_line(kept),
            _cpu_line(results),
            _between_line(kept),
            _latency_line(kept),
        )
        if sentence
    ]
    if more:
        lines.append("\n".join(f"- {sentence}" for sentence in more))
    lines.append(
        "Every point, what else was compared, and the commands that repeat it: `benchmarks/RESULTS.md`."
    )
    return "\n\n".join(lines)


def _rows(kept: Mapping[str, Mapping[str, Any]], name: str) -> list[Row]:
    return kept[name]["rows"] if name in kept else []


def _sustained_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    rows = tables.has_ratio(_rows(kept, "sustained"))
    if not rows:
        return ""
    return (
        f"Launched without rests, at the limit of the card's power: {tables.mean(row['ratio'] for row in rows):.3f} in "
        f"geometric mean, {len(tables.lost(rows))} of {len(rows)} points slower by more than 3 %."
    )


def _unseen_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _rows(kept, "unseen")
    if not rows:
        return ""
    weights = len({(row["N"], row["K"]) for row in rows})
    reached = tables.default_reached(rows)
    upstream = [1 / row["multiples"]["upstream-default"] for row in rows]
    return (
        f"On {weights} weights that no file ships for, a call without one reaches {tables.mean(reached):.3f} of the "
        f"speed that tuning finds, at worst {min(reached):.3f} ({len(rows)} points); the default of the example that this format "
        f"comes from reaches {tables.mean(upstream):.3f}."
    )


def _models_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _rows(kept, "models")
    if not rows:
        return ""
    ratios = [row["ratio"] for row in rows]
    names = ", ".join(dict.fromkeys(row["model"] for row in rows))
    return (
        f"Models, cut to {kept['models']['environment']['layers']} layers of their real width, every `nn.Linear` replaced, weights "
        f"that no file ships for tuned before ({names}; decode and prefill, eager and CUDA graphs): {min(ratios):.3f} to "
        f"{max(ratios):.3f} times as fast as the original."
    )


def _cpu_line(results: Mapping[str, Any]) -> str:
    if not results["cpu"]:
        return ""
    ours = [f"{row['family']} {row['gemm']:.1f}" for row in results["cpu"]]
    theirs = [row["a @ b"] for row in results["cpu"]]
    return f"CPU time of an eager call, µs, by the kernel it launches: {'; '.join(ours)}; `a @ b` beside them {min(theirs):.1f} to {max(theirs):.1f}."


def _between_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [row for row in _rows(kept, "between") if tables.tuned_here(row)]
    losses, ratios = tables.between_losses(rows), [row["ratio"] for row in tables.has_ratio(rows)]
    if not losses:
        return ""
    return (
        f"At values of M that no file has ({len(losses)} points): {tables.mean(ratios):.3f} times as fast as `torch.mm`, the slowest "
        f"at {min(ratios):.3f}; a call takes {tables.mean(losses):.3f} times as long as with a configuration tuned for that M, at "
        f"worst {max(losses):.3f}."
    )


def _latency_line(kept: Mapping[str, Mapping[str, Any]]) -> str:
    if "latency" not in kept:
        return ""
    timed = [row for row in kept["latency"]["rows"] if "missing" not in row]
    return (
        "First result of a new process, after the imports, with filled caches (and with empty ones, where it compiles and "
        f"measures), ms: {'; '.join(_first_result(row) for row in timed)}."
    )


def _first_result(row: Row) -> str:
    cold = f" ({row['cold_ms']:.0f})" if row["cold_ms"] is not None else ""
    return f"{row['case']} {row['first_ms']:.0f}{cold}"
