"""Compile what ships, the defaults and every candidate for every GPU that is compiled for; none is needed.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python tools/compile_matrix.py [--targets sm_80 gfx942]
        [--write benchmarks/MATRIX.md]

`make matrix` does that for all of them. Exit status 1 if anything does not compile, needs more shared memory than
its GPU has, or lacks the instructions that its family stands for. Compiled kernels stay in Triton's cache.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ["TRITON_INTERPRET"] = "0"

import torch  # noqa: E402
import triton  # noqa: E402
from compile_targets import TARGETS, compile_all, gemm_kernel, missing_instructions  # noqa: E402
from tabulate import tabulate  # noqa: E402
from tqdm import tqdm  # noqa: E402

# Requests between two steps of the progress bar
CHUNK = 32


class Row(NamedTuple):
    target: str
    family: str
    reports: list[dict]
    problems: list[str]


def shipped(target: str) -> list[dict]:
    """Each distinct entry of the files for the GPUs of this architecture, with the first M that has it."""
    found: dict[tuple[str, str], int] = {}
    for path in sorted(gemm_kernel.tuning._CONFIGS_DIR.glob("*.json")):
        name = re.search(r"device_name=([^,]+?)(,layout=NT)?\.json", path.name)
        if TARGETS[target].example.replace(" ", "_") == name[1]:
            layout = "NT" if name[2] else "NN"
            for M, config in json.loads(path.read_text()).items():
                # What this Triton lacks a call passes over.
                if gemm_kernel.kernels.config_problem(config, TARGETS[target].properties) is None:
                    found.setdefault((json.dumps(config, sort_keys=True), layout), int(M))
    return [
        {"config": json.loads(config), "layout": layout, "M": M, "from": "file"}
        for (config, layout), M in found.items()
    ]


def defaults(target: str) -> list[dict]:
    """What calls of many sizes get without a file, and what takes its place where that cannot run."""
    distinct: dict[tuple[str, str], int] = {}
    for M in gemm_kernel.tuning.TUNED_MS:
        for N in (1280, 4096, 28672):
            for layout in ("NN", "NT"):
                found = gemm_kernel.defaults.default_configs(
                    M, N, 4096, TARGETS[target].properties, layout
                )
                for config in found:
                    distinct.setdefault((json.dumps(config), layout), M)
    return [
        {"config": json.loads(config), "layout": layout, "M": M, "from": "default"}
        for (config, layout), M in distinct.items()
    ]


def candidates(target: str) -> list[dict]:
    """Every entry of every list for such a device in both layouts, and its refinements in one."""
    properties = TARGETS[target].properties
    requests = []
    for config in gemm_kernel.tuning.candidate_configs(properties=properties):
        requests += [{"config": config, "layout": layout} for layout in ("NN", "NT")]
        requests += [
            {"config": refined, "layout": "NT"}
            for refined in gemm_kernel.candidates.refinements(config, properties)
        ]
    return [{**request, "M": _rows(request["config"]), "from": "candidate"} for request in requests]


def _rows(config: dict) -> int:
    """As many rows as such a configuration is for: one tile for few, else enough for several."""
    return config["BLOCK_SIZE_M"] if config["BLOCK_SIZE_M"] < 64 else 512


def compile_target(target: str, sample: int) -> list[Row]:
    requests = [*shipped(target), *defaults(target), *candidates(target)][::sample]
    chunks = [requests[i : i + CHUNK] for i in range(0, len(requests), CHUNK)]
    reports = []
    for chunk in tqdm(chunks, desc=target, unit=f" x {CHUNK} kernels", mininterval=5):
        reports += compile_all(target, chunk, processes=os.cpu_count() or 1)
    by_family: dict[str, list[dict]] = collections.defaultdict(list)
    for report in reports:
        # A layout that a family does not take is no failure: look-up passes over it.
        if "refused" not in report:
            by_family[report["config"].get("kernel", "tiled")].append(report)
    return [
        Row(target, family, by_family[family], _problems(target, by_family[family]))
        for family in gemm_kernel.kernels.FAMILIES
        if by_family[family]
    ]


def _problems(target: str, reports: list[dict]) -> list[str]:
    limit = TARGETS[target].properties.shared_memory
    problems = []
    for report in reports:
        problem = report.get("error")
        if problem is None and report["shared"] > limit:
            problem = f"needs {report['shared']} bytes of shared memory of {limit}"
        problem = problem or missing_instructions(target, report)
        if problem:
            what = f"{report['from']} {json.dumps(report['config'])}, {report['layout']}"
            problems.append(f"{target}, {what}: {problem}")
    return problems


def table(rows: list[Row]) -> str:
    lines = []
    for target, family, reports, problems in rows:
        compiled = [report for report in reports if "error" not in report]
        counts = collections.Counter(report["from"] for report in reports)
        limit = TARGETS[target].properties.shared_memory
        spilled = [report["spilled"] for report in compiled if report["spilled"]]
        lines.append(
            (
                target,
                family,
                *(counts[source] for source in ("file", "default", "candidate")),
                f"{len(reports) - len(problems)} of {len(reports)}",
                f"{max((r['shared'] for r in compiled), default=0) / 1024:.1f} of {limit >> 10}",
                max((r["registers"] for r in compiled), default=0),
                f"{len(spilled)}, at most {max(spilled)} bytes" if spilled else "none",
            )
        )
    headers = ("target", "family", "shipped", "default", "candidate", "pass")
    headers += ("most shared memory, KiB", "most registers", "spill")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def document(rows: list[Row], problems: list[str], sample: int) -> str:
    targets = list(dict.fromkeys(row.target for row in rows))
    gpus = ", ".join(f"{name} ({TARGETS[name].example})" for name in targets)
    command = "make matrix" if sample == 1 else f"python tools/compile_matrix.py --sample {sample}"
    share = "All configurations" if sample == 1 else f"One of each {sample} configurations"
    listed = "\n".join(f"- {problem}" for problem in problems) or "None."
    return f"""# What compiles for which GPU

Made by `{command}` on {datetime.date.today()}: Triton {triton.__version__}, torch {torch.__version__}, no GPU. Do not edit.

{share} that ship for a GPU of that architecture, that are a default, or that are candidates there, in both layouts
that their family takes, were compiled down to the GPU's machine code for a weight of (4096, 4096), bfloat16 (float16 on sm_75), with the
alignment that a launch sees. A pass compiles, needs no more shared memory than a block may have there, and has the
instructions that its family stands for. Spilled bytes are those of one thread. That something compiles says nothing of its speed or
its results: only an NVIDIA H200 was run.

Targets: {gpus}.

{table(rows)}

## What did not pass

{listed}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--sample", type=int, default=1, help="every so many-th only (odd: both layouts)"
    )
    parser.add_argument("--write", type=Path, help="write the table into this file, too")
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = [row for name in arguments.targets for row in compile_target(name, arguments.sample)]
    problems = [problem for row in rows for problem in row.problems]
    print(table(rows))
    print(*problems, sep="\n")
    print(
        f"{sum(len(row.reports) for row in rows)} kernels, {len(problems)} without a pass, "
        f"{time.monotonic() - started:.0f} s"
    )
    if arguments.write:
        arguments.write.write_text(document(rows, problems, arguments.sample))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
