"""Write what other ways to choose a configuration would choose, as tuned files for `compare.py --providers configs:DIR`.

    python benchmarks/baselines.py --shapes 2560x2560 9728x2560 --device-name NVIDIA_H200 --out baselines
    python benchmarks/compare.py ... --providers gemm default torch configs:baselines/fixed configs:baselines/nvmmh

fixed   one configuration for each band of M: for few and for many rows the best of what was measured at (nearly)
        all points of nine weights; between them no tile was, and this one was near the best at half of the points
nvmmh   what NVIDIA's nvidia-matmul-heuristics 0.1.0.27 proposes for Triton on an H200, run by the `tiled` kernel,
        which has its tile, stages and warps; a product that it would split along K is not split. Needs that package

Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import kernels

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
make_config = gemm_kernel.config.make_config
H200 = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448, warp_size=32)

# (up to so many rows, configuration)
FIXED = (
    (16, make_config("swap", 16, 64, 128, 4, 6)),
    (1023, make_config("gluon", 64, 128, 64, 4, 8)),
    (1 << 62, make_config("gluon", 128, 128, 64, 4, 6)),
)


def fixed(M: int, N: int, K: int) -> dict:
    return next(config for rows, config in FIXED if rows >= M)


class Heuristics:
    """NVIDIA's library, asked for bfloat16 with float32 sums, a row-major and b the transpose of a weight."""

    def __init__(self) -> None:
        import nvMatmulHeuristics as library

        self._layout = library.NvMatmulHeuristicsMatmulLayout.TN_ROW_MAJOR
        self._library = library.NvMatmulHeuristicsInterface(
            library.NvMatmulHeuristicsTarget.TRITON,
            precision="TST",
            flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        )
        self._gpu = self._library.createHardwareDescriptor()
        self._library.setHardwarePredefinedGpu(
            self._gpu, library.NvMatmulHeuristicsNvidiaGpu.H200_SXM
        )
        self._library.loadInternalDiscoverySet(self._layout, self._gpu)

    def __call__(self, M: int, N: int, K: int) -> dict:
        (found,) = self._library.get_with_mnk(M, N, K, self._layout, 1, self._gpu)
        kernel = found["kernel"]
        warps = (
            kernel.cta_tile_m // kernel.warp_tile_m
            * (kernel.cta_tile_n // kernel.warp_tile_n)
            * (kernel.cta_tile_k // kernel.warp_tile_k)
        )  # fmt: skip
        tile = kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k
        for num_stages in range(kernel.stages, 1, -1):
            config = make_config("tiled", *tile, warps, num_stages)
            if gemm_kernel.kernels.config_problem(config, H200) is None:
                return config
        raise ValueError(f"{kernel} does not fit an H200")


def _weights(shapes: list[str]) -> Iterator[tuple[int, int]]:
    for shape in shapes:
        N, K = map(int, shape.split("x"))
        yield N, K


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", required=True, metavar="NxK")
    parser.add_argument("--m", type=int, nargs="+", default=list(gemm_kernel.tuning.TUNED_MS))
    parser.add_argument("--device-name", required=True, help="as in the name of a tuned file")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for name, choose in (("fixed", fixed), ("nvmmh", Heuristics())):
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for N, K in _weights(arguments.shapes):
            entries = {str(M): choose(M, N, K) for M in arguments.m}
            file = f"N={N},K={K},device_name={arguments.device_name},layout=NT.json"
            (folder / file).write_text(json.dumps(entries, indent=1) + "\n")
            print(folder / file)
    sys.stdout.flush()
    # The library ends in a crash when Python ends.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
