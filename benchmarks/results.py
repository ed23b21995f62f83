"""Write RESULTS.md, the plots and the README's results from the JSON files that are kept in `benchmarks/results/`.

    python benchmarks/results.py            write them; needs matplotlib
    python benchmarks/results.py --check    status 1 if a text is not what this would write

Nothing here measures, and no number of the texts is typed. The files are what `compare.py`, `latency.py` and `models.py` write
with `--json`; each may be missing, and then its section is. In the README what stands between the lines
`<!-- results -->` and `<!-- /results -->` is replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tables
from headline import headline
from results_file import conditions, read_results
from tables import Row

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
PLOTS = ROOT / "benchmarks" / "plots"
README = ROOT / "README.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
# Names of the kept files, without .json: the suite; the same without rests; all providers at a few points; M between
# those of the files, with files that were tuned for them; weights that were tuned for the comparison alone; the suite
# in float16; first calls; whole models.
NAMES = ("compare", "sustained", "providers", "between", "unseen", "fp16", "latency", "models")


def read_kept(folder: Path = KEPT) -> dict[str, dict[str, Any]]:
    """The results that are kept, by name."""
    found = {name: read_results(folder / f"{name}.json") for name in NAMES}
    return {name: results for name, results in found.items() if results is not None}


def _head(title: str, environment: Mapping[str, Any]) -> list[str]:
    return [f"## {title}", f"{conditions(environment)}. `{environment['command']}`"]


def results_page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """RESULTS.md: all that is kept, in tables."""
    parts = [
        "# Results",
        "Made by `benchmarks/results.py` from the files in `benchmarks/results/`. A ratio is torch.mm's time over "
        "gemm's, so that above 1 gemm is faster; means are geometric. How times are taken, and what the floor is, "
        "says `benchmarks/compare.py`.",
    ]
    sections = {
        "compare": _suite,
        "sustained": _sustained,
        "unseen": _unseen,
        "models": _models,
        "fp16": _float16,
        "between": _between,
        "providers": _providers,
        "latency": _latency,
    }
    for name, section in sections.items():
        if name in kept:
            parts += section(kept[name])
    return "\n\n".join(filter(None, parts)) + "\n"


def _suite(results: Mapping[str, Any]) -> list[str]:
    environment, rows = results["environment"], tables.has_ratio(results["rows"])
    lost, worst = tables.lost(rows), sorted(rows, key=lambda row: row["ratio"])
    parts = [
        *_head("The suite", environment),
        f"{environment['protocol']}. A copy reaches {environment['copy_tb_s']} TB/s, torch.mm on 8192 x 8192 x 8192 "
        f"{environment['mm_tflop_s']} TFLOP/s: from these the floor.",
        tables.band_table(rows),
        "![torch.mm's time over gemm's, over M](plots/ratio.png)",
        "![TFLOP/s and GB/s over M](plots/throughput.png)",
        f"### The {tables.WORST} slowest points",
        tables.point_table(worst[: tables.WORST]),
        f"### Every point below {tables.LEAST_RATIO}: {len(lost)} of {len(rows)}",
        tables.point_table(lost) if lost else "",
    ]
    decode = tables.bandwidth_table(rows)
    if decode:
        parts += ["### M = 1 on weights of 64 MiB and more, of the bandwidth of a copy", decode]
    if results["cpu"]:
        parts += [
            "### CPU time of an eager call, by what it launches",
            tables.cpu_table(results["cpu"]),
        ]
    parts += _missing(results["rows"])
    parts.append("### All points")
    for layout in tables.layouts_of(rows):
        own = [row for row in rows if row["layout"] == layout]
        parts += [_folded(f"{layout}: {len(own)} points", tables.point_table(own))]
    return parts


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _missing(rows: Sequence[Row]) -> list[str]:
    lines = tables.missing_lines(rows)
    return ["### Left out", "\n".join(lines)] if lines else []


def _sustained(results: Mapping[str, Any]) -> list[str]:
    return _bands(
        "At the limit of the card's power",
        results,
        "The suite again, launched without rests. The card then draws all the power it may, and its clock goes down "
        "with what a kernel costs; times scatter by a few percent, and what counts beside speed is energy.",
    )


def _float16(results: Mapping[str, Any]) -> list[str]:
    return _bands("float16, with the files tuned in bfloat16", results)


def _bands(title: str, results: Mapping[str, Any], text: str = "") -> list[str]:
    rows = tables.has_ratio(results["rows"])
    lost = tables.lost(rows)
    return [
        *_head(title, results["environment"]),
        text,
        tables.band_table(rows),
        f"### Every point below {tables.LEAST_RATIO}: {len(lost)} of {len(rows)}",
        tables.point_table(lost) if lost else "",
        *_missing(results["rows"]),
    ]


def _unseen(results: Mapping[str, Any]) -> list[str]:
    rows = results["rows"]
    return [
        *_head("Without a file: weights that none ships for", results["environment"]),
        "gemm has files here that `python tune.py --shapes FILE --layout nt --save-dir unseen/tuned` made for the "
        "comparison; what others would choose is from `benchmarks/baselines.py`. The default is what a call "
        "gets that has no file.",
        tables.default_bands(rows),
        tables.provider_means(rows),
        f"### The {tables.WORST} points where tuning brings most",
        tables.default_points(rows),
        _folded(f"Microseconds of all {len(rows)} points", tables.provider_points(rows)),
        *_missing(rows),
    ]


def _models(results: Mapping[str, Any]) -> list[str]:
    environment = results["environment"]
    return [
        *_head(f"Models, cut to {environment['layers']} layers", environment),
        f"Every `nn.Linear` replaced through `kernels.kernelize`; {environment['layers']} layers of each model at its "
        f"real width, transformers {environment['transformers']}; {environment['protocol']}. For the weights "
        "that no file ships for, `python tune.py --shapes FILE --layout nt --m 1 8 64 2048 --save-dir models-tuned/configs` "
        "made some before.",
        tables.model_times(results["rows"]),
        tables.model_errors(results["models"]),
        tables.training_line(results["training"], results["training_difference"]),
    ]


def _between(results: Mapping[str, Any]) -> list[str]:
    rows = results["rows"]
    return [
        *_head("Values of M that no file has", results["environment"]),
        "What it costs that an M has no entry: gemm's time over that of a configuration tuned for this very M. At none of "
        "these points the rule was made (`benchmarks/NOTES.md`, section 40).",
        tables.between_bands(rows),
        tables.between_points(rows),
        *_missing(rows),
    ]


def _providers(results: Mapping[str, Any]) -> list[str]:
    rows = results["rows"]
    return [
        *_head("Other ways to multiply", results["environment"]),
        "Each is described in `benchmarks/providers.py`; all are timed in turn, after what they measure or "
        "compile themselves.",
        tables.provider_means(rows),
        "### Microseconds",
        tables.provider_points(rows),
        *_missing(rows),
    ]


def _latency(results: Mapping[str, Any]) -> list[str]:
    environment = results["environment"]
    M, N, K = environment["shape"]
    return [
        *_head("The first result of a new process", environment),
        f"(M={M}, K={K}) @ (K={K}, N={N}), NT: {environment['protocol']} over {environment['rounds']} processes "
        "whose caches are filled. Cold is the one process that filled them.",
        tables.latency_table(results["rows"]),
    ]


def replaced_part(readme: str, part: str) -> str:
    """``readme`` with ``part`` between its markers. Raises: ValueError if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expects the lines {BEGIN} and {END} in the README, in this order")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def texts(kept: Mapping[str, Mapping[str, Any]], readme: str) -> dict[Path, str]:
    """The files that are made of ``kept``, with their texts."""
    made = {PAGE: results_page(kept)} if kept else {}
    if "compare" in kept and BEGIN in readme:
        made[README] = replaced_part(readme, headline(kept))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    kept, readme = read_kept(), README.read_text()
    if not kept:
        parser.error(f"there is none of {', '.join(f'{name}.json' for name in NAMES)} in {KEPT}")
    made = texts(kept, readme)
    if arguments.check:
        stale = [
            path for path, text in made.items() if not path.exists() or path.read_text() != text
        ]
        for path in stale:
            print(f"{path} is not what `python benchmarks/results.py` makes", file=sys.stderr)
        return 1 if stale else 0
    if "compare" in kept:
        # Here, because only drawing needs matplotlib.
        import plots

        PLOTS.mkdir(exist_ok=True)
        plots.plot_ratio(PLOTS / "ratio.png", kept["compare"])
        plots.plot_throughput(PLOTS / "throughput.png", kept["compare"])
    for path, text in made.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    if README not in made:
        print(f"README.md is as it was: it needs {BEGIN} and {END}, and compare.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
