"""Tune the GEMM for weight shapes on this machine's GPU and write their files into the source tree.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python tune.py --n 4096 --k 4096
    LOCAL_KERNELS=... python -m torch.distributed.run --nproc-per-node 8 -- tune.py --model meta-llama/Llama-3.1-8B --tp 1 8

`LOCAL_KERNELS` decides which copy of the kernel is tuned. Each M is saved as soon as it is measured, and
a second run leaves out what was measured alike before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import kernels
import torch

from tools import jobs, lint, report, shapes
from tools.ranks import Ranks, is_distributed

REPO_ID = "kernels-test/gemm-triton-autotune"
VERSION = 1
ROOT = Path(__file__).resolve().parent
CONFIGS_DIR = ROOT / "torch-ext" / "gemm_triton_autotune" / "configs"
MEASUREMENTS_DIR = ROOT / "measurements"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = {"nn": ("NN",), "nt": ("NT",), "both": ("NN", "NT")}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def _parser() -> _Parser:
    parser = _Parser(prog="tune.py", description=__doc__.splitlines()[0])
    what = parser.add_argument_group("what to tune")
    what.add_argument("--n", type=_positive, help="output features of the weight")
    what.add_argument("--k", type=_positive, help="input features of the weight")
    what.add_argument("--shapes", type=Path, metavar="FILE", help="weights, N and K in each line")
    what.add_argument(
        "--model", metavar="PATH_OR_ID", help="the linear layers of a transformers model"
    )
    what.add_argument(
        "--tp",
        type=_positive,
        nargs="+",
        metavar="GPUS",
        help="with --model: as it is split over so many GPUs (default: 1)",
    )
    what.add_argument(
        "--m",
        type=_positive,
        nargs="+",
        action="extend",
        help="values of M to tune; what the file has of others stays (default: 26 from 1 to 8192)",
    )
    what.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="nn: b is (K, N) row-major; nt: the transpose of an (N, K) weight, as in nn.Linear "
        "(default: both; with --model as the model has it)",
    )
    what.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 where the GPU has it")
    how = parser.add_argument_group("how")
    how.add_argument("--force", action="store_true", help="measure again what was measured before")
    mode = how.add_mutually_exclusive_group()
    mode.add_argument(
        "--exhaustive",
        action="store_true",
        help="measure candidates that are not expected to win, too",
    )
    mode.add_argument(
        "--recheck",
        action="store_true",
        help="rank the best five of the last run again, as after an upgrade; without shapes, of all files",
    )
    how.add_argument("--save-dir", type=Path, default=CONFIGS_DIR, help="default: %(default)s")
    out = parser.add_argument_group("instead of tuning, and what to show")
    out.add_argument("--list", action="store_true", help="show what is tuned, and measure nothing")
    out.add_argument(
        "--check",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="look for mistakes in tuned files, by default all; status 1 if there are any. Needs no GPU",
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results here")
    return parser


def _load_kernel(parser: _Parser):
    try:
        return kernels.get_kernel(REPO_ID, version=VERSION)
    # Offline, untrusted, no variant for this machine, a broken build: each has its own exception.
    except Exception as error:
        parser.error(
            f"cannot load {REPO_ID} ({report.first_line(error)}); run `make build` and set LOCAL_KERNELS={REPO_ID}=$PWD"
        )


def _is_source_tree(save_dir: Path) -> bool:
    return save_dir.resolve() == CONFIGS_DIR


def _measurements_dir(kernel: Any, save_dir: Path) -> Path:
    # The package would ship what stands beside its `configs`.
    if _is_source_tree(save_dir):
        return MEASUREMENTS_DIR
    return kernel.measurements.measurements_dir(save_dir) or save_dir / "measurements"


def _weights(kernel: Any, arguments: argparse.Namespace) -> list[shapes.Layer]:
    """The weights asked for, each with its layout."""
    if (arguments.n is None) != (arguments.k is None):
        missing = "--k" if arguments.k is None else "--n"
        raise ValueError(f"--n and --k are given together; {missing} is missing")
    layers = [] if arguments.n is None else [shapes.Layer("", arguments.n, arguments.k)]
    if arguments.shapes is not None:
        layers += shapes.read_shapes(arguments.shapes)
    if arguments.model is not None:
        layers += shapes.model_layers(arguments.model, arguments.tp or (1,))
    if not layers and arguments.recheck:
        layers = _measured_weights(kernel, arguments.save_dir)
    if not layers:
        raise ValueError("expects a weight: --n and --k, --shapes or --model")
    found = []
    for layer in layers:
        own = (layer.layout,) if layer.layout else LAYOUTS["both"]
        asked = LAYOUTS[arguments.layout] if arguments.layout else own
        found += [layer._replace(layout=layout) for layout in asked]
    return found


def _measured_weights(kernel: Any, save_dir: Path) -> list[shapes.Layer]:
    folder = _measurements_dir(kernel, save_dir)
    layers = []
    for path in sorted(folder.glob("N=*.json")):
        name = lint.NAME.fullmatch(path.name)
        for layout in kernel.arguments.LAYOUTS if name else ():
            N, K = int(name["N"]), int(name["K"])
            if path.name == kernel.tuning.config_file_name(N, K, None, layout):
                layers.append(shapes.Layer("", N, K, layout))
    if not layers:
        raise ValueError(f"--recheck finds no measurements of this device in {folder}; tune first")
    return layers


def _show(
    kernel: Any,
    device: str,
    targets: Sequence[Any],
    todo: Sequence[jobs.Job],
    recorder: jobs.Recorder,
    arguments: argparse.Namespace,
) -> None:
    rows = []
    for target, job, measured in zip(targets, todo, recorder.measured):
        rows += report.rows_of(
            target.problem, measured, arguments.m or sorted({*measured, *job.Ms})
        )
    print(f"\n{report.results_table(rows)}")
    counts = "".join(f", {n} skipped: {reason}" for reason, n in recorder.skipped.items())
    print(f"\n{recorder.candidates} candidates measured{counts}")
    in_source_tree = _is_source_tree(arguments.save_dir)
    for target, job, finished in zip(targets, todo, recorder.finished):
        if not job.Ms and arguments.recheck:
            print(f"{target.path} has no measurements of these M that could be ranked again")
        elif not job.Ms:
            print(f"{target.path} was measured before; --force measures again")
        elif finished:
            print(f"wrote {target.path}")
            hiding = kernel.tuning.outranked_by(target.path)
            if hiding is not None:
                print(f"{hiding} is searched before it and hides it")
            elif not (in_source_tree or kernel.tuning.is_searched(target.path)):
                print(f"no call searches {target.path.parent}; add it to GEMM_TUNED_CONFIG_DIR")
    if arguments.json is not None:
        report.write_json(arguments.json, device, rows)
    if arguments.plot is not None and rows:
        report.plot(arguments.plot, device, rows)


def _coverage(kernel: Any, layers: Sequence[shapes.Layer], save_dir: Path) -> list[tuple]:
    rows = []
    for layer in layers:
        name = kernel.tuning.config_file_name(layer.N, layer.K, None, layer.layout)
        paths = [folder / name for folder in (save_dir, *kernel.tuning.search_path())]
        path = next((path for path in paths if path.is_file()), None)
        properties = kernel.device.device_properties(kernel.tuning.resolve_device(None))
        state = "no"
        if path is not None:
            tuned, _ = kernel.tuned_file.read_tuned_file(path, properties)
            state = f"{len(tuned)} M from {min(tuned)} to {max(tuned)}" if tuned else "damaged file"
        rows.append((layer.name or "", layer.count, layer.N, layer.K, layer.layout, state))
    return rows


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what would be left out without a word, or could not be written in the end."""
    if arguments.tp and arguments.model is None:
        raise ValueError("--tp is for --model")
    if arguments.recheck and arguments.force:
        raise ValueError("--recheck measures again in any case; drop --force")
    for option in ("json", "plot"):
        path = getattr(arguments, option)
        if path is None:
            continue
        if arguments.list or arguments.check is not None:
            raise ValueError(f"--{option} is for what is measured; drop it or --list and --check")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--{option} expects a file in a folder that exists, got {path}")
        if path.is_dir():
            raise ValueError(f"--{option} expects a file, got the folder {path}")
    if arguments.plot is not None:
        report.check_plot(arguments.plot)


def _check(kernel: Any, files: Sequence[Path]) -> int:
    files = [
        path
        for file in files or [CONFIGS_DIR]
        for path in (sorted(file.glob("*.json")) if file.is_dir() else [file])
    ]
    findings = lint.check_files(kernel, files)
    print(lint.summary(findings, len(files)))
    return 1 if findings else 0


def main(argv: list[str] | None = None) -> int:
    # A console of another encoding, or a file in another locale, has no µ.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    parser = _parser()
    arguments = parser.parse_args(argv)
    kernel = _load_kernel(parser)
    try:
        if arguments.check is not None:
            _check_options(arguments)
            return _check(kernel, arguments.check)
        ranks = Ranks() if is_distributed() and not arguments.list else None
        if ranks is not None and torch.cuda.is_available():
            torch.cuda.set_device(ranks.local_rank)
        if ranks is not None and ranks.rank != 0:
            jobs.work_as_rank(kernel, ranks, None, None, _mode(arguments))
            return 0
        return _tune(kernel, ranks, arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(report.first_line(error))


def _mode(arguments: argparse.Namespace) -> str:
    return "recheck" if arguments.recheck else "exhaustive" if arguments.exhaustive else "pruned"


def _tune(kernel: Any, ranks: Ranks | None, arguments: argparse.Namespace) -> int:
    # Here, so that of several ranks the one that writes looks for folders and for matplotlib.
    _check_options(arguments)
    layers = _weights(kernel, arguments)
    device = kernel.tuning.device_name()
    if arguments.list:
        print(report.coverage_table(_coverage(kernel, layers, arguments.save_dir)))
        return 0
    Ms = arguments.m or kernel.tuning.TUNED_MS
    targets = [
        kernel.tuning.tuning_target(
            N, K, Ms, DTYPES.get(arguments.dtype), arguments.save_dir, layout,
            measurements=_measurements_dir(kernel, arguments.save_dir),
        )
        for N, K, layout in dict.fromkeys((layer.N, layer.K, layer.layout) for layer in layers)
    ]  # fmt: skip
    print(f"kernel {Path(kernel.__file__).parent}, device {device}, torch {torch.__version__}")
    if device == "CPU":
        print("Triton's interpreter on the CPU: these times say nothing about a GPU.")
    started = time.monotonic()
    mode = _mode(arguments)
    todo = jobs.make_jobs(kernel, targets, arguments.m, mode, arguments.force)
    recorder = jobs.Recorder(kernel, targets, todo)
    dead: list[int] = []
    try:
        if ranks is not None:
            dead = jobs.work_as_rank(kernel, ranks, todo, recorder, mode)
        else:
            indices = [index for index, job in enumerate(todo) if job.Ms]
            jobs.work(kernel, todo, indices, mode, recorder.take, recorder.progress)
    except KeyboardInterrupt:
        if ranks is not None:
            time.sleep(1)  # for the results that are on their way
        recorder.progress.close()
        print(
            f"\nstopped; the {sum(recorder.finished)} finished M are saved, and the same command goes on "
            "with the others",
            file=sys.stderr,
        )
        return 130
    recorder.progress.close()
    _show(kernel, device, targets, todo, recorder, arguments)
    print(f"took {time.monotonic() - started:.1f} s")
    # What is from the interpreter is never put there.
    if any(recorder.finished) and _is_source_tree(arguments.save_dir) and device != "CPU":
        print("`make build` puts what was written into the package.")
    missing = sum(len(job.Ms) - done for job, done in zip(todo, recorder.finished))
    for rank in dead:
        print(f"rank {rank} died; what it was measuring is not complete", file=sys.stderr)
    for index, failures in recorder.failures.items():
        for M, reason in failures.items():
            print(f"{targets[index].path.name}: M={M} was not tuned: {reason}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
