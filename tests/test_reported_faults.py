"""Faults that people reported of kernels like this one: a test for each kind, K1 to K9 and K13.

A report is named in the comment of its test. What is tested elsewhere: layouts (`test_layouts.py`),
files (`test_files.py`), saving, K11 (`test_saving.py`), several devices, K5 (`test_devices.py`),
look-up (`test_look_up.py`), the tuner, K10 (`test_tuning.py`) and the package (`test_package.py`).
"""

import json
import logging
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import kernels
import pytest
import torch

from .exact import assert_product
from .processes import without_rights
from .test_config import GOOD
from .test_look_up import entry, warnings_of, write
from .test_package import CONFIG_FILES, LOAD, ROOT, run_python
from .test_tuning import fixed_timer

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
launch_gemm_kernel = gemm_kernel.kernels.launch_gemm_kernel

N, K = 48, 80

# One configuration of each family, none narrowed by a size.
FAMILY_CONFIGS = {c.get("kernel", "tiled"): c for c in reversed(tuning.candidate_configs())}


def half(*shape, device):
    return torch.randn(shape, dtype=torch.float16, device=device)


def runs(config, a, b, out):
    properties = gemm_kernel.device.device_properties(a.device)
    return not (
        gemm_kernel.kernels.config_problem(config, properties)
        or gemm_kernel.kernels.operand_problem(config, a, b, out)
    )


def test_each_family_has_a_candidate():
    assert set(FAMILY_CONFIGS) == set(gemm_kernel.kernels.FAMILIES)


# K1: address arithmetic and launch limits


def far_apart(rows, columns, axis, device):
    """A matrix whose neighbours along ``axis`` lie more than 2**30 elements apart: the third is past 2**31.

    On the CPU the memory between them is never touched, so it is not there.
    """
    stride = (1 << 30) + 8
    strides = (stride, 1) if axis == 0 else (1, stride)
    extent = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * extent + 2**30:
        pytest.skip(f"needs {2 * extent} bytes of free memory")
    try:
        buffer = torch.empty(extent, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip(f"needs {2 * extent} bytes of address space")
    return buffer.as_strided((rows, columns), strides)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_k1_an_offset_past_2_to_the_31_is_right(device, operand, axis, family):
    # R01 databricks/megablocks PR 185, triton-lang/triton 5022, 6748, fla-org/flash-linear-attention PR 1082
    M = 1 if family == "gemv" else 3
    shapes = {"a": (M, 3), "b": (3, 3), "out": (M, 3)}
    # Rows of 16 bytes, as the kernels want them that take no others.
    tensors = {name: half(rows, 8, device=device)[:, :3] for name, (rows, _) in shapes.items()}
    tensors["b"] = tensors["b"].t() if axis == 1 else tensors["b"]
    tensors[operand] = far_apart(*shapes[operand], axis, device)
    tensors[operand].copy_(half(*shapes[operand], device=device))
    a, b, out = tensors["a"], tensors["b"], tensors["out"]
    config = FAMILY_CONFIGS[family]
    if not runs(config, a, b, out):
        pytest.skip(f"{family} takes no such {operand}")
    assert_product(launch_gemm_kernel(a, b, out, config), a, b)
    out.fill_(torch.nan)
    assert_product(gemm_kernel.gemm(a, b, out=out), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("long", ["M", "N", "K"])
def test_k1_two_to_the_31_elements_of_each_operand_are_right(device, long, layout):
    # R01: a real batch, through look-up, whatever family it gives
    sizes = {"M": 4096, "N": 4096, "K": 4096, long: (1 << 31) // 4096 + 65}
    if long != "K":
        sizes["K"] = 64
    M, N, K = sizes.values()
    if torch.cuda.mem_get_info(device)[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    a = half(M, K, device=device)
    b = half(N, K, device=device).t() if layout == "NT" else half(K, N, device=device)
    if long == "K":
        a, b = a.mul_(2**-10), b  # the sum over so many stays in the range of float16
    out = gemm_kernel.gemm(a, b)
    for rows, columns in ((slice(-64, None), slice(-64, None)), (slice(64), slice(-64, None))):
        assert_product(out[rows, columns], a[rows], b[:, columns])
    assert_product(out[-64:, :64], a[-64:], b[:, :64])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
@pytest.mark.parametrize("side", ["M", "N"])
def test_k1_more_than_65535_tiles_on_a_side_launch(device, side, family):
    # R03 triton-lang/triton 3299, 580, fla-org/flash-linear-attention 172
    config = FAMILY_CONFIGS[family]
    long = config[f"BLOCK_SIZE_{side}"] * 65_536 + 8
    short = 1 if family == "gemv" else 16
    M, N = (long, 16) if side == "M" else (short, long)
    a, b = half(M, 16, device=device), half(N, 16, device=device).t()
    out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
    if not runs(config, a, b, out):
        pytest.skip(f"{family} does not take ({M}, 16) @ (16, {N})")
    launch_gemm_kernel(a, b, out, config)
    assert not out.isnan().any()
    assert_product(out[-70:, -70:], a[-70:], b[:, -70:])


# K2: layout, alignment, aliasing and checking


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_k2_a_view_that_is_negated_when_read_is_right(device, operand):
    # kind of R04 NVIDIA/TransformerEngine 2734: the memory is not what the tensor is
    tensors = {
        "a": half(5, 7, device=device),
        "b": half(7, 6, device=device),
        "out": torch.full((5, 6), torch.nan, dtype=torch.float16, device=device),
    }
    tensors[operand] = torch._neg_view(tensors[operand])
    a, b, out = tensors.values()
    try:
        assert gemm_kernel.gemm(a, b, out=out) is out
    except RuntimeError:  # torch's own refusal, before the op is called
        assert operand == "out"
        return
    exact = (a.double() @ b.double()).resolve_neg()
    assert torch.allclose(out.double().resolve_neg(), exact, atol=1e-2)
    assert torch.allclose(gemm_kernel.gemm(a, b).double(), exact, atol=1e-2)


def test_k2_alignment_is_not_kept_across_calls(device):
    # R11 pytorch/torchdynamo PR 1338: compiled for 16 bytes, reused at 2
    M, N, K = 32, 64, 128
    sizes = {"a": (M, K), "b": (K, N), "out": (M, N)}
    for off_by_one in ([], ["a"], ["b"], ["out"], [], ["a", "b", "out"], []):
        tensors = {}
        for name, (rows, columns) in sizes.items():
            start = int(name in off_by_one)
            buffer = half(rows * columns + 8, device=device)
            tensors[name] = buffer[start : start + rows * columns].view(rows, columns)
        a, b, out = tensors.values()
        out.fill_(torch.nan)
        for _ in range(2):
            assert_product(gemm_kernel.gemm(a, b, out=out), a, b, off_by_one)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["compiled", "captured"])
def test_k2_alignment_is_not_kept_in_a_compiled_or_captured_call(device, how):
    # R11: the same under torch.compile and in a CUDA graph
    M, N, K = 32, 64, 128
    compiled = torch.compile(lambda a, b: gemm_kernel.gemm(a, b), fullgraph=True)
    for start in (0, 1, 0, 3):
        a = half(M * K + 8, device=device)[start : start + M * K].view(M, K)
        b = half(K * N + 8, device=device)[start : start + K * N].view(K, N)
        if how == "compiled":
            out = compiled(a, b)
        else:
            out = gemm_kernel.gemm(a, b)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gemm_kernel.gemm(a, b, out=out)
            out.fill_(torch.nan)
            graph.replay()
        assert_product(out, a, b, start)


def test_k2_a_refused_out_has_a_neighbour_that_stays(device):
    # R07 flagos-ai/FlagGems PR 3828, R09 pytorch/pytorch 13892, R10 pytorch/pytorch 23063
    a, b = half(16, 8, device=device), half(8, 24, device=device)
    buffer = torch.full((4, 16 * 24), 7.0, dtype=torch.float16, device=device)
    refused = {
        "shape": buffer[0].view(24, 16),
        "address of its own": buffer[0].as_strided((16, 24), (8, 1)),
        "dtype": buffer[0].view(torch.bfloat16).view(16, 24),
        "dense": buffer[0].view(16, 24).to_sparse(),
    }
    for message, out in refused.items():
        with pytest.raises(ValueError, match=message):
            gemm_kernel.gemm(a, b, out=out)
    assert (buffer == 7.0).all()


# K3: empty sizes, tails, memory that nobody wrote


@pytest.mark.parametrize(
    "shape", [(0, 48, 80), (0, 48, 0), (3, 0, 80), (3, 48, 0), (0, 0, 0)], ids=str
)
@pytest.mark.parametrize("tuned", [True, False])
def test_k3_empty_sizes_need_no_configuration(device, tuned_dir, caplog, shape, tuned):
    # R12 triton-lang/triton PR 10427
    M, N, K = shape
    if tuned:
        write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    a, b = half(M, K, device=device), half(K, N, device=device)
    out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
    assert torch.equal(gemm_kernel.gemm(a, b, out=out), torch.mm(a, b))
    assert torch.equal(gemm_kernel.gemm(a, b), torch.mm(a, b))
    assert not warnings_of(caplog)
    # Nor does the nearest of no rows take a logarithm.
    assert tuning.get_config(0, N, K, device)


TAILS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 96, 100, 1001]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", TAILS)
def test_k3_a_tail_of_any_length_is_right(device, K, dtype):
    # R14 triton-lang/triton 630, meta-pytorch/applied-ai 21
    shapes = [(1, 1), (1, 999), (17, 33)]
    if device.type != "cpu":
        shapes += [(511, 1024), (1000, 999)]
    for M, N in shapes:
        a = torch.randn(M, K, dtype=dtype, device=device)
        b = torch.randn(K, N, dtype=dtype, device=device)
        assert_product(gemm_kernel.gemm(a, b), a, b, (M, N, K))


# K4: results that depend on the configuration


def test_k4_a_row_is_as_right_in_any_batch(device, tuned_dir):
    # R20 torch-spyre/torch-spyre 3624, vllm-project/vllm 966
    K = 300
    blocks = {"1": 128, "16": 16, "64": 64, "1024": 32}
    write(
        tuned_dir, {M: {**GOOD, "BLOCK_SIZE_K": k} for M, k in blocks.items()}, N, K, device=device
    )
    batch, b = half(1000, K, device=device), half(K, N, device=device)
    exact = batch[:1].double() @ b.double()
    ulp = 2.0 ** (exact.abs().max().log2().floor().item() - 10)
    for M in (1, 2, 16, 17, 64, 1000):
        row = gemm_kernel.gemm(batch[:M], b)[:1]
        assert (row.double() - exact).abs().max() <= ulp, M


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_k4_what_is_in_out_does_not_count(device, family):
    # R22 triton-lang/triton 2183: atomic adds onto what only the benchmark cleared
    M = 1 if family == "gemv" else 16
    a, b = half(M, 512, device=device), half(128, 512, device=device).t()
    out = torch.full((M, 128), torch.nan, dtype=torch.float16, device=device)
    config = FAMILY_CONFIGS[family]
    if not runs(config, a, b, out):
        pytest.skip(f"{family} is not for this device")
    first = launch_gemm_kernel(a, b, out, config).clone()
    assert_product(first, a, b)
    for _ in range(3):
        assert torch.equal(launch_gemm_kernel(a, b, out, config), first)


# K5: wrong device


@pytest.mark.parametrize("name", ["neither", "cuda", "xpu", "both"])
def test_k5_the_backend_is_that_of_the_device(monkeypatch, name):
    # R25 intel/torch-xpu-ops 3657, huggingface/kernels-community PR 1078
    def refuse(*_):
        raise AssertionError("Torch not compiled with this backend enabled")

    for backend in ("cuda", "xpu"):
        module = getattr(torch, backend)
        is_there = name in (backend, "both")
        monkeypatch.setattr(module, "is_available", lambda is_there=is_there: is_there)
        named = {"cuda": lambda device=None: "A cuda", "xpu": lambda device=None: "A xpu"}[backend]
        monkeypatch.setattr(module, "get_device_name", named if is_there else refuse)
        monkeypatch.setattr(module, "current_device", (lambda: 0) if is_there else refuse)
    if name == "neither":
        assert tuning.device_name() == "CPU"
        return
    for backend in ("cuda", "xpu") if name == "both" else (name,):
        device = torch.device(backend, 0)
        assert tuning.device_name(device) == f"A_{backend}"
        assert f"device_name=A_{backend}." in tuning.config_file_name(N, K, device)
        assert tuning.device_name(torch.device(backend)) == f"A_{backend}"
    if name != "both":
        assert tuning.device_name() == f"A_{name}"


@pytest.mark.gpu
def test_k5_operands_of_the_cpu_are_refused(device):
    # R28 AnswerDotAI/ModernBERT 152
    a, b = half(4, 8, device=device), half(8, 4, device=device)
    for left, right in ((a.cpu(), b.cpu()), (a, b.cpu()), (a.cpu(), b)):
        with pytest.raises(ValueError, match="on one device|on a GPU"):
            gemm_kernel.gemm(left, right)
    with pytest.raises(ValueError, match="on one device"):
        gemm_kernel.gemm(a, b, out=torch.empty(4, 4, dtype=torch.float16))


# K6: a device's name in a file name


@pytest.fixture
def fake_gpu(monkeypatch):
    """Gives cuda:0 a name and properties, for look-up alone."""
    properties = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
    monkeypatch.setattr(tuning, "device_properties", lambda device: properties)
    device = torch.device("cuda", 0)

    def name(text):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: text)
        tuning._load_tuned_configs.cache_clear()
        return device

    yield name
    tuning._load_tuned_configs.cache_clear()


# fmt: off
NEAR_MISSES = {
    "a trailing blank": ("NVIDIA L4", "NVIDIA L4 "),  # R31 vllm-project/vllm 50436
    "another case": ("NVIDIA L4", "nvidia l4"),
    "no vendor": ("NVIDIA L4", "L4"),
    "a slice of it": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"),  # R33 NVIDIA MIG User Guide
    "another label": ("X Workstation Edition", "X Max-Q Workstation Edition"),  # R35 local-inference-lab/b12x PR 407
}
# fmt: on


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_k6_a_near_miss_is_named_and_never_used(tuned_dir, fake_gpu, caplog, case):
    tuned_for, asked_for = NEAR_MISSES[case]
    device = fake_gpu(tuned_for)
    write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    assert tuning.get_config(16, N, K, device) == entry(2)
    fake_gpu(asked_for)
    for _ in range(3):
        assert tuning.get_config(16, N, K, device) == tuning.default_config(16, N, K)
    (warning,) = warnings_of(caplog)
    name = tuning.config_file_name(N, K, device)
    assert name in warning.getMessage()
    assert str(tuned_dir) in warning.getMessage()
    # The documented remedy: the file under the name that the warning gives.
    write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    assert (tuned_dir / name).exists()
    assert tuning.get_config(16, N, K, device) == entry(2)


@pytest.mark.parametrize(
    "name",
    [
        "AMD Instinct MI250X / MI250",  # R29 vllm-project/vllm PR 47781
        "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb+me",  # R33
        "../../../etc/passwd",
        "con",
        "A\x00B\nC",
        "Graphics: Intel(R) Arc(TM)* [0x56a0]",
        "显卡",
        ".",
    ],
)
def test_k6_any_name_makes_one_file_that_is_found_again(
    device, tmp_path, monkeypatch, fake_gpu, name
):
    encoded = tuning.device_name(fake_gpu(name))
    monkeypatch.setattr(tuning, "device_name", lambda device=None: encoded)
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", str(tmp_path))
    path = gemm_kernel.tune_gemm(
        N, K, (16,), torch.float16, tmp_path, [entry(2)], device=device, timer=fixed_timer(2.0, 1.0)
    )
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_file()
    assert tuning.get_config(16, N, K, device) == entry(2)
    a, b = half(16, K, device=device), half(K, N, device=device)
    assert_product(gemm_kernel.gemm(a, b), a, b)


def test_k6_shipped_names_are_portable(tmp_path):
    # R34 huggingface/datasets PR 194
    reserved = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
    archive = tmp_path / "configs.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in CONFIG_FILES:
            assert not reserved.fullmatch(path.name)
            assert path.stem == path.stem.rstrip(". ")
            assert path.name.isascii()
            file.write(path, path.name)
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path / "out")
    for path in CONFIG_FILES:
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


# K7: what a file may hold


# fmt: off
FOREIGN_KEYS = {
    "waves_per_eu": (2, True), "matrix_instr_nonkdim": (16, True), "kpack": (2, True), "grf_mode": ("256", True),
    "maxnreg": (128, True), "SPLIT_K": (1, True), "kernel": ("tiled", True),
    "num_ctas": (1, False), "NUM_WARPS": (4, False), "BLOCK_SIZE_m": (64, False), "cache_modifier": (None, False),
    "allow_fp8": (True, False), "a_ptr": (0, False), "stride_am": (0, False), "grid": (1, False), "debug": (True, False),
}
# fmt: on


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_k7_a_key_of_another_backend_or_tool_never_breaks_a_call(device, tuned_dir, caplog, key):
    # R39 sgl-project/sglang PR 20090, intel/intel-xpu-backend-for-triton 5137
    value, is_known = FOREIGN_KEYS[key]
    path = write(tuned_dir, {"16": {**GOOD, key: value}}, N, K, device=device)
    a, b = half(16, K, device=device), half(K, N, device=device)
    for _ in range(3):
        assert_product(gemm_kernel.gemm(a, b), a, b)
    lines = [record.getMessage() for record in warnings_of(caplog)]
    if is_known:
        assert lines == []
    else:
        (line,) = lines
        assert f"M=16: {key} is not a key of this kernel" in line
        assert str(path) in line


def test_k7_an_entry_with_all_keys_runs(device, tuned_dir, caplog):
    # R89 triton-lang/triton 5164: the interpreter refuses launch options that it does not know
    config = {**GOOD, "kernel": "tiled", "SPLIT_K": 1, "maxnreg": 128, "grf_mode": "auto"}
    config.update(waves_per_eu=1, matrix_instr_nonkdim=16, kpack=1)
    write(tuned_dir, {"17": config}, 33, 19, device=device)
    assert tuning.get_config(17, 33, 19, device) == config
    for dtype in (torch.float16, torch.bfloat16):
        a = torch.randn(17, 19, dtype=dtype, device=device)
        b = torch.randn(19, 33, dtype=dtype, device=device)
        assert_product(gemm_kernel.gemm(a, b), a, b)
    assert not warnings_of(caplog)


LARGE = {
    "BLOCK_SIZE_M": 256,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 8,
    "num_warps": 8,
    "num_stages": 5,
}


@pytest.mark.parametrize("others", [{}, {"64": GOOD}], ids=["alone", "beside a good one"])
def test_k7_an_entry_too_large_for_the_device_costs_no_compile(
    device, tuned_dir, caplog, monkeypatch, others
):
    # R41 sgl-project/sglang PR 28038, 3219, triton-lang/triton 8182
    properties = gemm_kernel.device.device_properties(device)
    if device.type == "cpu":
        small = properties._replace(shared_memory=232448)
        monkeypatch.setattr(tuning, "device_properties", lambda device: small)
    launched = []
    launch = gemm_kernel.kernels.launch_gemm_kernel
    monkeypatch.setattr(
        gemm_kernel.kernels,
        "launch_gemm_kernel",
        lambda a, b, out, config: launched.append(config) or launch(a, b, out, config),
    )
    write(tuned_dir, {"256": LARGE, **others}, N, K, device=device)
    a, b = half(256, K, device=device), half(K, N, device=device)
    for _ in range(3):
        assert_product(gemm_kernel.gemm(a, b), a, b)
    expected = GOOD if others else tuning.default_config(256, N, K)
    assert launched
    assert all(config == expected for config in launched)
    (warning,) = warnings_of(caplog)
    assert "M=256: needs" in warning.getMessage()
    assert "bytes of shared memory" in warning.getMessage()


LOCALE = f"""
import logging, os
logging.basicConfig()
{LOAD}
directory = os.environ["GEMM_TUNED_CONFIG_DIR"]
name = k.tuning.config_file_name({N}, {K})
text = '{{"_comment": "\\u00b5s \\u5f20", "16": ' + {json.dumps(json.dumps(GOOD))} + '}}'
with open(os.path.join(directory, name), "wb") as file:
    file.write(b"\\xef\\xbb\\xbf" + text.replace(",", ",\\r\\n").encode())
assert k.tuning.get_config(16, {N}, {K}) == {GOOD!r}
assert "tuned, from" in k.explain(16, {N}, {K})
path = k.tuned_file.Path(directory) / name
k.tuned_file.save_tuned_configs(path, {{32: {GOOD!r}}})
k.tuning._load_tuned_configs.cache_clear()
assert list(k.tuning._load_tuned_configs({N}, {K})) == [16, 32]
path.write_bytes(b"{{")
k.tuning._load_tuned_configs.cache_clear()
assert k.tuning.get_config(16, {N}, {K}) == k.tuning.default_config(16, {N}, {K})
print("read")
"""


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1", "C.UTF-8"])
def test_k7_the_locale_changes_nothing(device, tmp_path, locale):
    # R38 volcengine/OpenViking PR 500, 31December99/Unit3Dup 175
    directory = tmp_path / "µ 张"
    directory.mkdir()
    environment = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run_python(LOCALE, GEMM_TUNED_CONFIG_DIR=str(directory), **environment) == "read"


# K8: which configuration is chosen


def test_k8_far_outside_the_tuned_ms_the_default_is_used(device, tuned_dir):
    # R44 vllm-project/vllm PR 52192 and 40542: a file cut short to the large M served M = 1
    write(tuned_dir, {"1": entry(2)}, N, K, device=device)
    assert tuning.get_config(16, N, K, device) == entry(2)
    for M in (17, 8192, 10**9):
        assert tuning.get_config(M, N, K, device) == tuning.default_config(M, N, K)
    assert "more than 16 times outside M=1 to 1 of" in gemm_kernel.explain(17, N, K, device)

    write(tuned_dir, {"2048": entry(2), "4096": entry(3)}, N, K, device=device)
    assert tuning.get_config(128, N, K, device) == entry(2)
    for M in (1, 16, 127):
        assert tuning.get_config(M, N, K, device) == tuning.default_config(M, N, K)
    assert "more than 16 times outside M=2048 to 4096" in gemm_kernel.explain(1, N, K, device)

    # From thousands of rows on, more rows are more of the same.
    write(tuned_dir, {"16": entry(2), "1024": entry(3)}, N, K, device=device)
    assert tuning.get_config(1, N, K, device) == entry(2)
    for M in (2000, 100_000, 10**12):
        assert tuning.get_config(M, N, K, device) == entry(3)


def test_k8_an_entry_that_takes_the_operands_is_no_reason_to_reach_far(tuned_dir, device):
    # R44: the nearest that takes them may be as far away as in a file of its own
    write(tuned_dir, {"1": entry(2), "64": entry(3), "4096": entry(4)}, N, K, device=device)

    def accepts(config):
        return config != entry(4)

    assert tuning.get_config(4096, N, K, device, accepts=accepts) == tuning.default_config(
        4096, N, K
    )
    assert tuning.get_config(1024, N, K, device, accepts=accepts) == entry(3)


def test_k8_products_far_outside_are_right(device, tuned_dir):
    write(tuned_dir, {"1": entry(2)}, N, K, device=device)
    b = half(K, N, device=device)
    for M in (1, 16, 17, 300):
        a = half(M, K, device=device)
        assert_product(gemm_kernel.gemm(a, b), a, b)


def test_k8_both_dtypes_share_a_file_and_it_says_so(device, tuned_dir):
    # R46 m87-labs/kestrel PR 19
    for dtype, stages in ((torch.bfloat16, 2), (torch.float16, 3)):
        path = gemm_kernel.tune_gemm(
            N, K, (16,), dtype, tuned_dir, [entry(stages)], timer=fixed_timer(3.0, 1.0, 2.0)
        )
    assert json.loads(path.read_text()) == {"16": entry(3)}
    assert "share a file" in " ".join(gemm_kernel.tune_gemm.__doc__.split())
    for dtype in (torch.float16, torch.bfloat16):
        a = torch.randn(16, K, dtype=dtype, device=device)
        b = torch.randn(K, N, dtype=dtype, device=device)
        assert_product(gemm_kernel.gemm(a, b), a, b)


# K9: caches, threads, logging


@pytest.mark.parametrize("obstacle", ["a folder", "not UTF-8", "cut short"])
def test_k9_an_unreadable_file_is_the_same_each_time(device, tuned_dir, caplog, obstacle):
    # R49 ROCm/aiter PR 4447: the first call gives the honest error, later ones a puzzling one
    path = tuned_dir / tuning.config_file_name(N, K, device)
    if obstacle == "a folder":
        path.mkdir()
    else:
        path.write_bytes({"not UTF-8": b'{"1": "\xff"}', "cut short": b'{"1": {"BLOCK_'}[obstacle])
    a, b = half(16, K, device=device), half(K, N, device=device)
    results = [gemm_kernel.gemm(a, b) for _ in range(3)]
    assert_product(results[0], a, b)
    assert all(torch.equal(result, results[0]) for result in results)
    reasons = {gemm_kernel.explain(16, N, K, device) for _ in range(3)}
    assert len(reasons) == 1
    assert str(path) in reasons.pop()
    (warning,) = warnings_of(caplog)
    assert str(path) in warning.getMessage()


def test_k9_a_failing_load_is_tried_again(device, tuned_dir, monkeypatch):
    # R49: nothing is kept of a load that did not end
    write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    read = tuning.read_tuned_file

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "read_tuned_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning.get_config(16, N, K, device)
    monkeypatch.setattr(tuning, "read_tuned_file", read)
    assert tuning.get_config(16, N, K, device) == entry(2)


def test_k9_what_a_caller_does_to_a_configuration_is_his_own(device, tuned_dir):
    write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    for M in (16, 10**6):
        before = dict(tuning.get_config(M, N, K, device))
        tuning.get_config(M, N, K, device).clear()
        tuning.get_config(M, N, K, device)["num_warps"] = 64
        assert tuning.get_config(M, N, K, device) == before


def test_k9_a_thousand_calls_make_one_line_for_each_weight(device, tuned_dir, caplog, monkeypatch):
    # R52 sgl-project/sglang 9562, vllm-project/vllm PR 38743
    monkeypatch.setattr(
        gemm_kernel.kernels, "launch_gemm_kernel", lambda a, b, out, config: out.zero_()
    )
    caplog.set_level(logging.DEBUG)
    weights = [half(K, n, device=device) for n in (8, 16, 24)]
    for M in range(1, 335):
        for b in weights:
            gemm_kernel.gemm(half(M, K, device=device), b)
    records = [record for record in caplog.records if record.name.startswith("gemm")]
    assert [record.levelname for record in records] == ["WARNING"] * 3
    assert {record.name for record in records} == {"gemm_triton_autotune"}


def test_k9_a_hit_is_no_warning(device, tuned_dir, caplog):
    caplog.set_level(logging.DEBUG)
    path = write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    for M in range(1, 100):
        tuning.get_config(M, N, K, device)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert str(path) in record.getMessage()


def test_k9_what_was_reported_is_not_reported_again_after_tuning(device, tuned_dir, caplog):
    # tuning another weight in a server reads all files anew, and says nothing new about them
    write(tuned_dir, {"16": {**GOOD, "num_warps": 3}}, N, K, device=device)
    tuning.get_config(16, N, K, device)
    gemm_kernel.tune_gemm(8, 8, (1, 2, 3), torch.float16, tuned_dir, [], timer=fixed_timer(1.0))
    tuning.get_config(16, N, K, device)
    assert len(warnings_of(caplog)) == 1


def test_k9_warnings_as_errors_and_an_untouched_root_logger_are_fine():
    # R52: run with -W error
    code = f"""
import logging, torch, warnings
{LOAD}
warnings.simplefilter("error")
device = k.tuning.resolve_device(None)
a = torch.ones(3, 5, dtype=torch.float16, device=device)
for _ in range(3):
    assert float(k.gemm(a, a.t()).sum()) == 45.0
root = logging.getLogger()
assert not root.handlers and root.level == logging.WARNING
print("fine")
"""
    assert run_python(code) == "fine"


# K13: import, packaging, operating system


IMPORT = f"""
import multiprocessing, os, pickle, subprocess, threading
import kernels, torch, triton, triton.language
kernels_before = threading.active_count()
def refuse(*_, **__): raise AssertionError("not at import")
pickle.dumps = pickle.loads = pickle.dump = pickle.load = refuse
pickle.Pickler = pickle.Unpickler = refuse
os.fork = subprocess.Popen = multiprocessing.Process.start = threading.Thread.start = refuse
os.mkdir = os.makedirs = refuse
{LOAD}
assert threading.active_count() == kernels_before
print("imported")
"""


def test_k13_importing_starts_and_pickles_nothing():
    assert run_python(IMPORT, PYTHONDONTWRITEBYTECODE="1") == "imported"


LOOK_UP_IMPORTS = f"""
import json, sys, torch
{LOAD}
tuning = k.tuning
cpu = torch.device("cpu")
plain = k.config.conservative_config(1)
good = json.dumps({{"16": {{**plain, "GROUP_SIZE_M": 3}}}}).encode()
found = []
before = set(sys.modules)
for N, data in enumerate((good, b"\\xef\\xbb\\xbf" + good, b"{{", b"\\xff"), 64):
    (tuning.search_path()[0] / tuning.config_file_name(N, 64, cpu)).write_bytes(data)
    found.append(tuning.get_config(16, N, 64, cpu)["GROUP_SIZE_M"])
    k.explain(16, N, 64, cpu)
print(found, sorted(set(sys.modules) - before))
"""


def test_k13_a_look_up_imports_nothing(tmp_path):
    # A process that has given up its rights, or whose Python was replaced under it, may not find a module any
    # more: the codec utf-8-sig is one.
    result = run_python(LOOK_UP_IMPORTS, GEMM_TUNED_CONFIG_DIR=str(tmp_path))
    default = gemm_kernel.config.conservative_config(1)["GROUP_SIZE_M"]
    assert result == f"{[3, 3, default, default]} []"


# fmt: off
HOMES = {
    "no HOME": {"HOME": None, "XDG_CACHE_HOME": None},
    "HOME is /": {"HOME": "/", "XDG_CACHE_HOME": None},
    "HOME is nowhere": {"HOME": "/nowhere/at/all", "XDG_CACHE_HOME": None},
    "HOME is a file": {"HOME": __file__, "XDG_CACHE_HOME": None},
    "a cache that is relative": {"HOME": "/nowhere", "XDG_CACHE_HOME": "relative/cache"},
    "a cache that is empty": {"HOME": "/nowhere", "XDG_CACHE_HOME": ""},
    "a cache in a file": {"XDG_CACHE_HOME": "/dev/null"},
    "a cache with a NUL in mind": {"XDG_CACHE_HOME": "/\udcff/x"},
}
# fmt: on


@pytest.mark.parametrize("case", HOMES)
def test_k13_a_home_that_cannot_be_used_is_survived(device, tmp_path, monkeypatch, caplog, case):
    # R88 triton-lang/triton 518, foundation-model-stack/fms-hf-tuning 367
    monkeypatch.chdir(tmp_path)
    for name, value in HOMES[case].items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    tuning._load_tuned_configs.cache_clear()
    try:
        a, b = half(3, 5, device=device), half(5, 7, device=device)
        assert_product(gemm_kernel.gemm(a, b), a, b)
        assert all(directory.is_absolute() for directory in tuning.search_path())
        assert len(warnings_of(caplog)) == 1
        # A log file, a terminal and whoever collects logs may take nothing but text.
        for message in (caplog.text, gemm_kernel.explain(3, 7, 5, torch.device(device))):
            message.encode("utf-8")
    finally:
        tuning._load_tuned_configs.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_k13_a_user_without_a_home_has_no_cache(device, tmp_path, monkeypatch):
    # R88: the random user id of a container is in no list, so "~" stays what it is
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuning.user_cache_dir() is None
    assert tuning.search_path() == [tuning._CONFIGS_DIR]
    with pytest.raises(ValueError, match="no home folder; pass save_dir"):
        gemm_kernel.tune_gemm(N, K, (1,), timer=fixed_timer(1.0))
    assert list(tmp_path.iterdir()) == []


def test_k13_a_read_only_package_is_used_without_a_write(device, tmp_path, monkeypatch):
    # R63 huggingface/huggingface_hub 2797
    cpu = torch.device("cpu")
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / tuning.config_file_name(N, K, cpu)).write_text(json.dumps({"16": entry(2)}))
    monkeypatch.setattr(tuning, "_CONFIGS_DIR", configs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no" / "cache"))
    for directory in (configs, *configs.parents[:-1]):
        if (
            directory.stat().st_uid == os.geteuid()
            and stat.S_IMODE(directory.stat().st_mode) == 0o700
        ):
            directory.chmod(0o711)
    configs.chmod(0o555)
    tmp_path.chmod(0o555)

    def use():
        torch.set_num_threads(1)
        tuning._load_tuned_configs.cache_clear()
        assert tuning.get_config(16, N, K, cpu) == entry(2)
        assert "tuned, from" in gemm_kernel.explain(16, N, K, cpu)
        if gemm_kernel.kernels.INTERPRETED:
            for n in (N, N + 1):
                a, b = half(16, K, device=cpu), half(K, n, device=cpu)
                assert_product(gemm_kernel.gemm(a, b), a, b)
            with pytest.raises(PermissionError, match="pass another save_dir"):
                gemm_kernel.tune_gemm(N, K, (1,), timer=fixed_timer(1.0))

    try:
        without_rights(use)
    finally:
        tmp_path.chmod(0o755)
        configs.chmod(0o755)
        tuning._load_tuned_configs.cache_clear()
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


def test_k13_a_long_device_name_still_makes_a_path_that_windows_takes(fake_gpu):
    # R90 intel/intel-xpu-backend-for-triton 4477, pytorch/pytorch 187283
    name = tuning.config_file_name(128256, 16384, fake_gpu("N" * 64), "NT")
    prefix = 120 + len("/snapshots//build/torch-cuda/configs/") + 40
    assert prefix + len(name) < 260 + 64
    longest = max(len(path.name) for path in CONFIG_FILES)
    assert prefix + longest < 260


def test_k13_the_command_speaks_in_any_locale(tmp_path):
    # R38 and R85: a table with µ, printed to a file in a locale that has none
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["LOCAL_KERNELS"] = f"kernels-test/gemm-triton-autotune={ROOT}"
    result = subprocess.run(
        [sys.executable, str(ROOT / "tune.py"), "--n", "16", "--k", "16", "--m", "1"]
        + ["--layout", "nn", "--save-dir", str(tmp_path)],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert b"default" in result.stdout
