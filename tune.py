"""Tune the GEMM for one weight shape on this machine's GPU and write its files into the source tree.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=build python tune.py --n 4096 --k 4096

`LOCAL_KERNELS` decides which copy of the kernel is tuned. Each M is saved as soon as it is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import kernels
import torch
from tabulate import tabulate
from tqdm import tqdm

REPO_ID = "kernels-test/gemm-triton-autotune"
VERSION = 1
CONFIGS_DIR = Path(__file__).resolve().parent / "torch-ext" / "gemm_triton_autotune" / "configs"
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
    parser.add_argument("--n", type=_positive, required=True, help="output features of the weight")
    parser.add_argument("--k", type=_positive, required=True, help="input features of the weight")
    parser.add_argument(
        "--m",
        type=_positive,
        nargs="+",
        action="extend",
        help="values of M to tune, beside those that the file has (default: 20 from 1 to 8192)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 where the GPU has it")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="both",
        help="nn: b is (K, N) row-major; nt: the transpose of an (N, K) weight, as in nn.Linear",
    )
    parser.add_argument("--save-dir", type=Path, default=CONFIGS_DIR, help="default: %(default)s")
    return parser


def _load_kernel(parser: _Parser):
    try:
        return kernels.get_kernel(REPO_ID, version=VERSION)
    # Offline, untrusted, no variant for this machine, a broken build: each has its own exception.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        parser.error(
            f"cannot load {REPO_ID} ({reason}); run `make build` and set LOCAL_KERNELS={REPO_ID}=build"
        )


def _tune(kernel, arguments: argparse.Namespace, layout: str, results: list) -> Path:
    with tqdm(unit="candidate", delay=0.2) as bar:

        def on_progress(M: int, done: int, total: int, best_ms: float) -> None:
            bar.total, bar.n = total, done
            bar.set_description(f"{layout} M={M}", refresh=False)
            bar.set_postfix_str(f"best {best_ms * 1e3:.1f} µs")

        return kernel.tune_gemm(
            N=arguments.n,
            K=arguments.k,
            Ms=arguments.m or kernel.tuning.TUNED_MS,
            dtype=DTYPES.get(arguments.dtype),
            save_dir=arguments.save_dir,
            layout=layout,
            on_progress=on_progress,
            on_result=results.append,
        )


def _print_results(results: list) -> None:
    rows = [
        (
            result.M,
            *(f"{ms * 1e3:.1f}" for ms in (result.default_ms, result.tuned_ms, result.torch_ms)),
            _describe(result.config),
        )
        for result in results
    ]
    headers = ("M", "default µs", "tuned µs", "torch µs", "configuration")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    skipped: dict[str, int] = {}
    for result in results:
        for reason, count in result.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    counts = "".join(f", {count} skipped: {reason}" for reason, count in skipped.items())
    print(f"\n{sum(result.measured for result in results)} candidates measured{counts}")


def _describe(config: dict) -> str:
    tile = "x".join(str(config[f"BLOCK_SIZE_{side}"]) for side in "MNK")
    extra = "".join(
        f", {key} {value}"
        for key, value in config.items()
        if key not in ("num_warps", "num_stages") and not key.startswith("BLOCK_SIZE_")
    )
    return f"{tile}, {config['num_warps']} warps, {config['num_stages']} stages{extra}"


def main(argv: list[str] | None = None) -> int:
    # A console of another encoding, or a file in another locale, has no µ.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    arguments = parser.parse_args(argv)
    kernel = _load_kernel(parser)
    device = kernel.tuning.device_name()
    print(f"kernel {Path(kernel.__file__).parent}, device {device}, torch {torch.__version__}")
    if device == "CPU":
        print("Triton's interpreter on the CPU: these times say nothing about a GPU.")
    for layout in LAYOUTS[arguments.layout]:
        results: list = []
        try:
            path = _tune(kernel, arguments, layout, results)
        except KeyboardInterrupt:
            print(
                f"\nstopped; the {len(results)} finished M of {layout} are saved", file=sys.stderr
            )
            return 130
        except (ValueError, OSError, RuntimeError) as error:
            parser.error(str(error).splitlines()[0])
        print(f"\n(M, {arguments.k}) @ ({arguments.k}, {arguments.n}), {layout}, {device}\n")
        _print_results(results)
        print(f"wrote {path}")
    if arguments.save_dir == CONFIGS_DIR:
        print("`make build` puts what was written into the package.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
