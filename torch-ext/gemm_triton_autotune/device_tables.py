"""The kinds of devices; and for those other than Hopper the tiles that are candidates, with their launch options.

Nothing here was measured by us. The tiles are those that published work favours on such a device (torch's
own templates, https://github.com/pytorch/pytorch/tree/main/torch/_inductor/template_heuristics; AMD's
https://github.com/ROCm/aiter and https://github.com/ROCm/tritonBLAS; Intel's
https://github.com/intel/intel-xpu-backend-for-triton), without those that do not fit the device or that
spill in its inner loop: `make matrix` compiles every entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .device import DeviceProperties


class Table(NamedTuple):
    """What is worth measuring on one kind of device."""

    # (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages)
    tiled: list[tuple[int, int, int, int, int]]
    # (BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages)
    swap: list[tuple[int, int, int, int]]
    # Of `tiled` those that the default is chosen from, from few rows to many, with the first of the options.
    defaults: tuple[tuple[int, int, int, int, int], ...] = ()
    # Each tile is tried with each of these sets of launch options.
    options: tuple[dict[str, Any], ...] = ({},)


# Triton has no tensor core instruction for Turing: it multiplies element by element, from registers, which
# a deep tile runs out of, and loads nothing ahead.
_SM_75 = Table(
    tiled=[
        *[(16, 16, k, 2, 2) for k in (32, 64)],
        *[(16, 32, k, 4, 2) for k in (32, 64)],
        *[(16, 64, 32, w, 2) for w in (2, 4)],
        *[(32, 32, k, 4, 2) for k in (16, 32)],
        *[(32, 64, k, 4, 2) for k in (16, 32)],
        *[(64, 64, 16, w, 2) for w in (4, 8)],
        (64, 64, 32, 8, 2),
        (128, 64, 16, 8, 2),
    ],
    swap=[],
    defaults=((16, 64, 32, 4, 2), (32, 64, 32, 4, 2), (64, 64, 16, 4, 2), (128, 64, 16, 8, 2)),
)

# Ampere with 163 KiB of shared memory
_SM_80 = Table(
    tiled=[
        *[(16, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 4))],
        *[(16, n, k, 2, s) for n in (16, 32) for k, s in ((128, 4), (256, 3))],
        *[(32, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 4), (128, 3))],
        *[(64, n, k, 4, s) for n in (32, 64, 128) for k, s in ((32, 5), (64, 3), (64, 4))],
        *[(64, 128, 64, 8, s) for s in (3, 4)],
        (64, 256, 32, 4, 4),
        *[(128, 64, k, 4, s) for k, s in ((32, 5), (64, 3), (64, 4))],
        *[(128, 128, k, w, s) for w in (4, 8) for k, s in ((32, 4), (64, 3))],
        *[(m, n, k, 8, s) for m, n in ((128, 256), (256, 128)) for k, s in ((32, 4), (64, 3))],
    ],
    swap=[
        *[(64, k, 4, s) for k, s in ((64, 5), (128, 3), (128, 4))],
        *[(128, k, 4, s) for k, s in ((64, 4), (128, 3))],
    ],
    defaults=(
        *[(16, n, 128, 4, 4) for n in (32, 64)],
        (32, 64, 64, 4, 4),
        *[(64, n, 64, 4, 4) for n in (64, 128)],
        (128, 128, 32, 4, 4),
        (128, 256, 64, 8, 3),
    ),
)

# The same tensor cores with 99 KiB (Ampere's and Ada's smaller chips), and consumer Blackwell, which Triton
# gives the same instructions
_SM_89 = Table(
    tiled=[
        *[(16, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 4), (64, 5), (128, 3))],
        *[(16, n, 128, 2, 4) for n in (16, 32)],
        *[(32, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 4), (128, 3))],
        *[(64, n, k, 4, s) for n in (32, 64, 128) for k, s in ((32, 5), (64, 3), (64, 4))],
        (64, 256, 32, 4, 4),
        *[(128, 64, k, 4, s) for k, s in ((32, 4), (64, 3))],
        *[(128, 128, k, w, s) for w in (4, 8) for k, s in ((32, 3), (32, 4), (64, 3))],
        *[(m, n, 32, 8, s) for m, n in ((128, 256), (256, 128)) for s in (3, 4)],
    ],
    swap=[
        *[(64, k, 4, s) for k, s in ((64, 4), (64, 5), (128, 3))],
        (128, 64, 4, 4),
    ],
    defaults=(
        *[(16, n, 128, 4, 3) for n in (32, 64)],
        (32, 64, 64, 4, 4),
        *[(64, n, 64, 4, 3) for n in (64, 128)],
        (128, 128, 32, 4, 3),
        (128, 256, 32, 8, 3),
    ),
)

# Data-centre Blackwell: an instruction takes 128 rows, and 64 at least
_SM_100 = Table(
    tiled=[
        *[(16, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 4))],
        *[(32, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3))],
        *[(64, n, k, 4, s) for n in (64, 128) for k, s in ((64, 4), (128, 3))],
        (64, 256, 64, 4, 4),
        *[(128, n, 64, w, s) for n in (64, 128) for w, s in ((4, 4), (8, 4))],
        *[(128, 256, 64, w, s) for w in (4, 8) for s in (3, 4)],
        *[(256, 128, 64, 8, s) for s in (3, 4)],
    ],
    swap=[
        *[(64, k, 4, s) for k, s in ((64, 8), (128, 4), (128, 6))],
        *[(128, k, 4, s) for k, s in ((64, 4), (64, 6), (128, 4))],
    ],
    defaults=(
        *[(16, n, 128, 4, 4) for n in (32, 64)],
        (32, 64, 128, 4, 3),
        (64, 128, 64, 4, 4),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 4),
    ),
)

# AMD keeps one stage less in shared memory (LDS) than there are, and a 16x16 instruction, which leaves more
# registers than one of 32x32, wins nearly everywhere.
_CDNA_TILED = [
    *[(16, n, k, 4, 2) for n in (16, 32, 64) for k in (128, 256)],
    *[(16, n, 256, 2, 2) for n in (16, 32)],
    *[(32, n, 128, 4, 2) for n in (32, 64, 128)],
    *[(32, 64, k, 4, s) for k, s in ((64, 3), (256, 2))],
    *[(64, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 2), (128, 2), (64, 3))],
    *[(64, 128, 64, 8, s) for s in (2, 3)],
    *[(128, 64, k, w, 2) for k, w in ((64, 4), (128, 8))],
    *[(128, 128, 64, w, 2) for w in (4, 8)],
    (128, 128, 32, 8, 3),
    *[(m, n, k, 8, s) for m, n in ((128, 256), (256, 128)) for k, s in ((32, 3), (64, 2))],
    *[(256, 256, k, 8, 2) for k in (32, 64)],
]
_CDNA_DEFAULTS = (
    *[(16, n, 256, 4, 2) for n in (16, 32)],
    (32, 64, 128, 4, 2),
    (64, 64, 64, 4, 2),
    (128, 128, 64, 8, 2),
    (128, 256, 64, 8, 2),
)
_CDNA_SWAP = [(64, 128, 4, 2), (64, 256, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2)]
# kpack, two steps of an instruction from one load of LDS, is gone from gfx950 on: its instructions are as deep.
_CDNA = Table(
    _CDNA_TILED,
    _CDNA_SWAP,
    _CDNA_DEFAULTS,
    (
        {"matrix_instr_nonkdim": 16, "kpack": 2},
        {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 2},
    ),
)
_GFX950 = Table(
    [
        *_CDNA_TILED,
        *[(64, 128, 128, 4, 3), (128, 128, 128, 8, 2), (128, 128, 64, 8, 3)],
        *[(m, n, 64, 8, 3) for m, n in ((128, 256), (256, 128))],
    ],
    [*_CDNA_SWAP, (64, 256, 4, 3), (128, 128, 4, 3)],
    _CDNA_DEFAULTS,
    ({"matrix_instr_nonkdim": 16}, {"matrix_instr_nonkdim": 16, "waves_per_eu": 2}),
)
_RDNA = Table(
    tiled=[
        *[(16, n, k, 2, 2) for n in (16, 32) for k in (64, 128)],
        *[(16, n, k, 4, 2) for n in (32, 64) for k in (64, 128)],
        *[(32, n, 64, 4, 2) for n in (32, 64, 128)],
        *[(64, n, k, 4, 2) for n in (32, 64) for k in (32, 64)],
        (64, 128, 32, 4, 2),
        *[(m, n, k, 8, 2) for m, n in ((64, 128), (128, 64), (128, 128)) for k in (32, 64)],
        (128, 128, 32, 4, 2),
        *[(m, n, 32, 8, 2) for m, n in ((128, 256), (256, 128))],
    ],
    swap=[(64, 64, 4, 2), (64, 128, 4, 2)],
    defaults=(
        *[(16, n, 64, 4, 2) for n in (32, 64)],
        (32, 64, 64, 4, 2),
        (64, 64, 32, 4, 2),
        (128, 128, 32, 8, 2),
    ),
)

# An Intel warp is 16 or 32 wide and a large tile takes 32 of them; 256 registers for a thread instead of 128
# halve how many run at once, which pays where a tile is large.
_XPU = Table(
    tiled=[
        *[(16, n, 64, w, 2) for n, w in ((64, 4), (128, 4), (256, 16), (256, 32))],
        *[(32, n, k, w, 2) for n, k, w in ((64, 128, 4), (128, 32, 16), (256, 32, 32))],
        *[(64, n, 32, w, s) for n, w in ((64, 8), (128, 16), (128, 32)) for s in (2, 3)],
        *[(128, 128, 32, 32, s) for s in (2, 3)],
        *[(m, n, 32, 32, s) for m, n in ((128, 256), (256, 128), (256, 256)) for s in (2, 3)],
    ],
    swap=[(64, 64, 4, 2), (64, 128, 8, 2), (128, 64, 8, 2)],
    defaults=(
        (16, 64, 64, 4, 2),
        (32, 64, 128, 4, 2),
        (64, 64, 32, 8, 2),
        (128, 128, 32, 32, 2),
        (256, 256, 32, 32, 2),
    ),
    options=({}, {"grf_mode": "256"}),
)


_TABLES = {
    "sm_75": _SM_75,
    "sm_80": _SM_80,
    "sm_89": _SM_89,
    "sm_100": _SM_100,
    "gfx9": _CDNA,
    "gfx950": _GFX950,
    "gfx11": _RDNA,
    "xpu": _XPU,
}


def device_kind(properties: DeviceProperties | None) -> str | None:
    """The kind of device that this one is, by its first architecture; None for what is not known."""
    if properties is None:
        return None
    if properties.backend == "cuda":
        major, minor = properties.capability or (0, 0)
        if major == 8:
            return "sm_80" if minor == 0 else "sm_89"
        return {7: "sm_75", 9: "sm_90", 10: "sm_100", 12: "sm_89"}.get(major)
    if properties.backend == "rocm":
        architecture = properties.architecture or ""
        if architecture in ("gfx90a", "gfx942"):
            return "gfx9"
        if architecture == "gfx950":
            return "gfx950"
        return "gfx11" if architecture.startswith(("gfx11", "gfx12")) else None
    return "xpu" if properties.backend == "xpu" else None


def table_for(properties: DeviceProperties | None) -> Table | None:
    """The table of devices like this one, or None: Hopper, and what is not known."""
    return _TABLES.get(device_kind(properties) or "")
