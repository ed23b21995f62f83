"""One small call of each kernel family, at sizes that no tile divides, for NVIDIA's compute-sanitizer.

    export LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD PYTORCH_NO_CUDA_MEMORY_CACHING=1
    python tests/sanitize.py    # first, so that nothing is left to be compiled
    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

Without torch's cache each tensor is an allocation of its own, so that an access behind its end is seen.
"""

import sys
from pathlib import Path

import kernels
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from exact import assert_product  # noqa: E402

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
refinements = gemm_kernel.candidates.refinements

# N and K are multiples of 8, as descriptors want them, and of no tile.
SIZES = [(1, 328, 424), (37, 328, 424), (203, 328, 424), (37, 331, 423), (1, 331, 423)]


def calls(device):
    """A configuration, a and b for the first size and layout that each variant of each family takes."""
    properties = gemm_kernel.device.device_properties(device)
    variants = {}
    candidates = gemm_kernel.tuning.candidate_configs()
    for config in candidates + [other for each in candidates for other in refinements(each)]:
        # What is no size of a tile is another path through the kernel.
        options = [key for key in config.items() if not key[0].startswith(("BLOCK_SIZE_", "num_"))]
        if gemm_kernel.kernels.config_problem(config, properties) is None:
            variants.setdefault(str(sorted(options)), config)
    for config in variants.values():
        for M, N, K in SIZES:
            for layout in ("NN", "NT"):
                a = torch.randn(M, K, dtype=torch.float16, device=device)
                b = torch.randn(K, N, dtype=torch.float16, device=device)
                b = b.t().contiguous().t() if layout == "NT" else b
                out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
                if gemm_kernel.kernels.operand_problem(config, a, b, out) is None:
                    yield config, layout, a, b, out


def main():
    device = gemm_kernel.tuning.resolve_device(None)
    seen = set()
    count = 0
    for config, layout, a, b, out in calls(device):
        # Of its own size, so that a load behind its end is one outside of all memory that is in use.
        bias = torch.randn(b.shape[1], dtype=torch.float16, device=device)
        for one in (None, bias):
            gemm_kernel.kernels.launch_gemm_kernel(a, b, out.fill_(torch.nan), config, one)
            assert_product(out, a, b, (config, layout), one)
        seen.add(config.get("kernel", "tiled"))
        count += 2
    print(f"{count} calls on {device}, families {sorted(seen)}")
    unseen = set(gemm_kernel.kernels.FAMILIES) - seen
    if unseen:
        raise SystemExit(f"no call of {sorted(unseen)}: no candidate runs here")


if __name__ == "__main__":
    main()
