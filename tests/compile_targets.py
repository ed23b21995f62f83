"""Compile configurations for GPUs that are not here, as a launch would, and report what came out.

    python tests/compile_targets.py < requests.json

A target and a configuration a line in, with `dtype` and those of `OPTIONS` where they are not the usual
ones, a JSON object a line out: what the compiler made of it for a weight of (N, K) = (4096, 4096), or its
error. Without TRITON_INTERPRET: interpreted functions do not compile.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import kernels
import torch
import triton
from triton.backends.compiler import GPUTarget

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
DeviceProperties = gemm_kernel.device.DeviceProperties

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Target(NamedTuple):
    """A GPU that is compiled for: one that has this architecture, and what torch would say of it."""

    example: str
    properties: Any


def _nvidia(example: str, major: int, minor: int, multiprocessors: int, shared_kib: int) -> Target:
    shared = shared_kib << 10
    return Target(
        example, DeviceProperties("cuda", (major, minor), multiprocessors, shared, warp_size=32)
    )


def _amd(example: str, gfx: str, units: int, shared_kib: int, warp_size: int) -> Target:
    shared = shared_kib << 10
    return Target(
        example,
        DeviceProperties("rocm", None, units, shared, architecture=gfx, warp_size=warp_size),
    )


# Shared memory that a block may use: CUDA C programming guide, table of technical specifications by
# compute capability; LDS of a workgroup: AMD's instruction set references (CDNA 2 to 4, RDNA 3 and 4).
TARGETS = {
    "sm_75": _nvidia("NVIDIA T4", 7, 5, 40, 64),
    "sm_80": _nvidia("NVIDIA A100", 8, 0, 108, 163),
    "sm_86": _nvidia("NVIDIA A10", 8, 6, 72, 99),
    "sm_89": _nvidia("NVIDIA L4", 8, 9, 58, 99),
    "sm_90": _nvidia("NVIDIA H200", 9, 0, 132, 227),
    "sm_100": _nvidia("NVIDIA B200", 10, 0, 148, 227),
    "sm_120": _nvidia("NVIDIA GeForce RTX 5090", 12, 0, 170, 99),
    "gfx90a": _amd("AMD Instinct MI250X", "gfx90a", 110, 64, 64),
    "gfx942": _amd("AMD Instinct MI300X", "gfx942", 304, 64, 64),
    "gfx950": _amd("AMD Instinct MI355X", "gfx950", 256, 160, 64),
    "gfx1100": _amd("AMD Radeon RX 7900 XTX", "gfx1100", 96, 64, 32),
    "gfx1201": _amd("AMD Radeon RX 9070 XT", "gfx1201", 64, 64, 32),
}


class TargetDriver:
    """What the JIT asks of a driver before it launches, answered for a device that is not here."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target = target
        self.device = device  # the JIT keeps what it compiled, and for what, by this number

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def triton_target(name: str) -> GPUTarget:
    properties = TARGETS[name].properties
    if properties.backend == "cuda":
        major, minor = properties.capability
        return GPUTarget("cuda", 10 * major + minor, properties.warp_size)
    return GPUTarget("hip", properties.architecture, properties.warp_size)


def compile_config(
    target: str,
    config: dict,
    layout: str = "NT",
    dtype: torch.dtype | None = None,
    M: int = 512,
    has_bias: bool = False,
    disassemble: bool = False,
) -> dict:
    """What the compiler makes of ``config``. The dtype is bfloat16, where the target computes it."""
    N = K = 4096
    dtype = dtype or (torch.float16 if target == "sm_75" else torch.bfloat16)
    a = torch.empty(M, K, dtype=dtype)
    b = torch.empty(N, K, dtype=dtype).t() if layout == "NT" else torch.empty(K, N, dtype=dtype)
    out = torch.empty(M, N, dtype=dtype)
    bias = torch.empty(N, dtype=dtype) if has_bias else None
    family = gemm_kernel.kernels.FAMILIES[config.get("kernel", "tiled")]
    problem = family.operand_problem(config, a, b, out)
    if problem:
        return {"refused": problem}
    launch = family.prepare(a, b, out, config)
    options = gemm_kernel.config.launch_options(config, TARGETS[target].properties.backend)
    options.update(launch.options)
    compiled = launch.kernel.warmup(*launch.arguments(a, b, out, bias), grid=launch.grid, **options)
    report = {"shared": compiled.metadata.shared}
    if "ptx" in compiled.asm:
        report.update(_nvidia_report(compiled.asm["ptx"], compiled.asm["cubin"], disassemble))
    elif "amdgcn" in compiled.asm:
        report.update(_amd_report(compiled.asm["amdgcn"]))
    return report


def _nvidia_report(ptx: str, cubin: bytes, disassemble: bool) -> dict:
    report = {
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "tcgen05": len(re.findall(r"tcgen05\.mma", ptx)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10", ptx)),
        "bulk_copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
    }
    if "griddepcontrol.wait" in ptx:
        before = ptx[: ptx.index("griddepcontrol.wait")]
        accesses = r"\b(ld\.global|st\.global|cp\.async|atom)"
        report["accesses_before_wait"] = len(re.findall(accesses, before))
        report["prefetches_before_wait"] = before.count("prefetch.global.L2")
        report["lets_dependents_start"] = ptx.count("griddepcontrol.launch_dependents")
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump("-res-usage", cubin)))
    report["registers"] = int(usage["REG"])
    # Bytes of a thread. ptxas keeps nothing but spilled registers there: no kernel here has an array.
    report["spilled"] = int(usage["STACK"]) + int(usage["LOCAL"])
    if report["wgmma"] and disassemble:
        # Waits for each: 1 or more where ptxas could not leave several in flight (its message C7515).
        code = _cuobjdump("-sass", cubin)
        waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
        report["wgmma_waits"] = waits / code.count("HGMMA")
    return report


def _amd_report(code: str) -> dict:
    registers = int(re.search(r"\.vgpr_count:\s*(\d+)", code)[1])
    return {
        "mfma": len(re.findall(r"\bv_mfma_", code)),
        "wmma": len(re.findall(r"\bv_wmma_", code)),
        "registers": registers,
        # What a lane keeps in scratch memory: 4 bytes for each spilled register.
        "spilled": 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", code)[1]),
    }


def missing_instructions(target: str, report: dict) -> str | None:
    """Which instructions that a family stands for are not in what was compiled, or None if all are."""
    config = report["config"]
    family = config.get("kernel", "tiled")
    wanted = []
    if family in ("tma", "gluon"):
        wanted.append("bulk_copies")
    # Turing's tensor cores are not used by Triton, and a product with one row uses none.
    if family != "gemv" and target != "sm_75":
        rows = config["BLOCK_SIZE_N" if family == "swap" or config.get("SWAP") else "BLOCK_SIZE_M"]
        wanted.append(_product(target, is_wide=rows >= 64))
    missing = [name for name in wanted if not report[name]]
    return f"has no {' and no '.join(missing)}" if missing else None


def _product(target: str, is_wide: bool) -> str:
    """The instruction that multiplies a tile; Hopper's and Blackwell's own take 64 rows at least."""
    if target.startswith("gfx"):
        return "mfma" if target.startswith("gfx9") else "wmma"
    return {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target, "mma") if is_wide else "mma"


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class _Worker:
    """A process that compiles: without the interpreter, and one that a compiler may end."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen:
        # It ends with this process, when nothing is left to come in.
        return subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "TRITON_INTERPRET": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def compile(self, request: dict) -> dict:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        status = self._process.wait()
        self._process = self._start()
        return {**request, "error": f"the compiler ended its process, status {status}"}


@functools.cache
def _worker(number: int) -> _Worker:
    return _Worker()


def compile_all(target: str, requests: list[dict], processes: int = 1) -> list[dict]:
    """Compile ``requests`` (config, and optionally layout, dtype, M) for ``target``; each with its report."""

    reports: list[Any] = [None] * len(requests)

    def work(number: int) -> None:
        for i in range(number, len(requests), processes):
            reports[i] = _worker(number).compile({**requests[i], "target": target})

    with ThreadPoolExecutor(max_workers=processes) as pool:
        list(pool.map(work, range(processes)))
    return reports


OPTIONS = ("layout", "M", "has_bias", "disassemble")


def answer(lines: Iterable[str]) -> None:
    drivers = {name: TargetDriver(triton_target(name), i) for i, name in enumerate(TARGETS)}
    for line in lines:
        request = json.loads(line)
        target = request["target"]
        triton.runtime.driver.set_active(drivers[target])
        dtype = getattr(torch, request["dtype"]) if "dtype" in request else None
        options = {name: request[name] for name in OPTIONS if name in request}
        try:
            report = compile_config(target, request["config"], dtype=dtype, **options)
        except Exception as error:
            message = (str(error).strip() or "no message").splitlines()[0]
            report = {"error": f"{type(error).__name__}: {message[:300]}"}
        print(json.dumps({**request, **report}), flush=True)


if __name__ == "__main__":
    answer(sys.stdin)
