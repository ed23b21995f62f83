"""The published results are made of the files that are kept, and say where gemm is slower."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import results  # noqa: E402
import tables  # noqa: E402
from headline import headline  # noqa: E402
from results_file import write_results  # noqa: E402

ENVIRONMENT = {
    "device": "Some GPU", "driver": "1.2", "torch": "2.x", "triton": "3.x", "date": "2001-02-03",
    "dtype": "bfloat16", "protocol": "a protocol", "command": "python benchmarks/compare.py",
    "copy_tb_s": 4.0, "mm_tflop_s": 700.0,
}  # fmt: skip


def point(M, ratio, layout="NT", N=8192, K=4096, **others):
    """gemm takes 100 µs, the default 200, the floor 80; others as multiples of gemm's time."""
    multiples = {"default": 2.0, "torch": ratio, **others}
    us = {"gemm": 100.0, **{name: 100.0 * multiple for name, multiple in multiples.items()}}
    return {
        "N": N, "K": K, "layout": layout, "M": M, "floor_us": 80.0, "us": us, "ratio": ratio,
        "multiples": multiples, "configs": {"gemm": {"kernel": "swap"}},
    }  # fmt: skip


def suite(*rows, cpu=()):
    return {"compare": {"environment": ENVIRONMENT, "cpu": list(cpu), "rows": list(rows)}}


def cells(text, *first):
    """The cells of the one line of a table that begins so."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    (line,) = [line for line in found if line[: len(first)] == list(first)]
    return line


def test_bands_have_geometric_means():
    rows = [point(1, 0.5), point(16, 2.0), point(17, 0.9), point(1023, 1.6), point(1024, 1.1)]
    table = tables.band_table([*rows, point(1, 3.0, "NN")])
    assert cells(table, "NT", "M <= 16")[2:5] == ["2", "1.000", "0.500"]
    # points, mean, worst, below 0.97, torch over default, part of the floor
    assert cells(table, "NT", "M 17 to 1023")[2:] == ["2", "1.200", "0.900", "1", "0.600", "0.800"]
    assert cells(table, "NT", "M >= 1024")[2:4] == ["1", "1.100"]
    assert cells(table, "NT", "all")[2] == "5"
    assert cells(table, "NN", "all")[2:4] == ["1", "3.000"]


def test_every_point_that_is_lost_is_named():
    lost = [point(M, 0.9 - M / 1000) for M in range(1, 15)]
    page = results.results_page(suite(*lost, point(64, 0.97), point(65, 1.2)))
    section = page.partition("### Every point below 0.97: 14 of 16")[2].partition("###")[0]
    named = re.findall(r"\| (\d+) x 8192 x 4096", section)
    assert [int(M) for M in named] == list(range(14, 0, -1))
    slowest = page.partition("### The 10 slowest points")[2].partition("###")[0]
    assert len(re.findall(r"x 8192 x 4096", slowest)) == 10
    assert len(re.findall(r"x 8192 x 4096", page.partition("### All points")[2])) == 16


def test_the_headline_says_against_what_on_what_and_where_it_loses():
    text = headline(suite(point(16, 2.0), point(64, 0.5), point(1024, 0.96)))
    assert "0.986 times as fast as `torch.mm`" in text
    for said in (
        "Some GPU",
        "driver 1.2",
        "torch 2.x",
        "Triton 3.x",
        "2001-02-03",
        "bfloat16",
        "a protocol",
    ):
        assert said in text
    assert "by more than 3 % at 2 points; it is slower at all at 2 of 3 points" in text
    assert "64 x 8192 x 4096 NT at 0.500; 1024 x 8192 x 4096 NT at 0.960" in text
    assert (
        "with the default, the mean is 0.493, and 2 points are slower by more than 3 %, the slowest at 0.250"
        in text
    )
    text = headline(suite(point(16, 0.97)))
    assert (
        "nowhere is it slower than `torch.mm` by more than 3 % (the slowest point is at 0.970)"
        in text
    )
    assert "slower at all at 1 of 1 points" in text


def test_the_bandwidth_at_one_row_is_of_large_weights_only():
    table = tables.bandwidth_table([point(1, 0.5), point(2, 1.0), point(1, 1.0, N=4096, K=4096)])
    assert cells(table, "NT", "8192 x 4096") == ["NT", "8192 x 4096", "100.0", "0.800", "1.600"]
    assert table.count("x 4096") == 1


def test_a_point_without_a_time_is_left_empty_with_its_reason():
    row = point(16, 1.2, compile=0.9)
    failed = {**point(32, 1.2), "missing": {"compile": "too hard"}}
    failed["us"]["compile"] = None
    kept = {"providers": {"environment": ENVIRONMENT, "cpu": [], "rows": [row, failed]}}
    page = results.results_page(kept)
    assert cells(page, "compile") == ["compile", "1", "0.900", "0.900", "0.900"]
    assert cells(page, "NT", "32 x 8192 x 4096")[-1] == ""
    assert "- compile: too hard (NT 32 x 8192 x 4096)" in page


def test_a_point_at_which_gemm_failed_is_left_out_of_the_means_and_named():
    failed = {**point(32, 1.2), "ratio": None, "multiples": {}, "configs": {}}
    failed["us"]["gemm"], failed["missing"] = None, {"gemm": "wrong result"}
    page = results.results_page(suite(point(16, 1.5), failed))
    assert cells(page, "NT", "all")[2:4] == ["1", "1.500"]
    assert "- gemm: wrong result (NT 32 x 8192 x 4096)" in page


def test_what_the_nearest_m_costs_is_against_what_was_tuned_there():
    rows = [point(3, 1.0, **{"configs:there": 0.5}), point(12, 1.44, **{"configs:there": 0.8})]
    kept = {"between": {"environment": ENVIRONMENT, "cpu": [], "rows": [*rows, point(24, 1.0)]}}
    page = results.results_page(kept)
    # points, mean, worst, the default's; against torch.mm, and the worst
    assert cells(page, "NT", "all")[2:] == ["2", "1.581", "2.000", "3.162", "1.200", "1.000"]
    assert cells(page, "NT", "12 x 8192 x 4096")[-2:] == ["80.0", "1.250"]
    text = headline({**suite(point(1, 1.0)), **kept})
    assert (
        "(2 points): 1.200 times as fast as `torch.mm`, the slowest at 1.000; a call takes 1.581"
        in text
    )
    assert "at worst 2.000." in text


def test_first_results_of_processes_are_told():
    timed = {
        "case": "gemm", "cold_ms": 900.0, "import_ms": 4000.0, "device_ms": 300.0, "first_ms": 21.5,
        "second_ms": 0.1, "least_ms": 20.0, "most_ms": 23.0, "configs_measured": None, "right": True,
    }  # fmt: skip
    rows = [timed, {**timed, "case": "other", "cold_ms": None}, {"case": "third", "missing": "why"}]
    environment = {**ENVIRONMENT, "shape": [16, 64, 32], "rounds": 3}
    kept = {"latency": {"environment": environment, "rows": rows}}
    page = results.results_page(kept)
    assert cells(page, "gemm")[1:4] == ["900", "21.5", "20.0 to 23.0"]
    assert cells(page, "other")[1] == ""
    assert "why" in cells(page, "third")
    assert "(M=16, K=32) @ (K=32, N=64)" in page
    assert "ms: gemm 22 (900); other 22." in headline({**suite(point(1, 1.0)), **kept})


def test_each_section_says_how_to_repeat_it():
    # What one section or another asks of its file beside rows.
    more = {"shape": [1, 2, 3], "rounds": 1, "layers": 1, "transformers": "5.x"}
    one = {
        "environment": {**ENVIRONMENT, **more},
        **{"cpu": [], "models": {}, "training": {"original": [1.0], "ours": [1.0]}},
        "training_difference": 0.0,
    }
    for name in results.NAMES:
        rows = [] if name in ("latency", "models") else [point(16, 1.0)]
        kept = {name: {**one, "rows": rows}}
        page = results.results_page(kept)
        assert "`python benchmarks/compare.py`" in page, name
        assert "Some GPU, driver 1.2, torch 2.x, Triton 3.x, 2001-02-03, bfloat16" in page, name


def test_only_what_is_between_the_markers_is_replaced():
    readme = f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n"
    made = results.replaced_part(readme, "new")
    assert made == f"before\n{results.BEGIN}\n\nnew\n\n{results.END}\nafter\n"
    assert results.replaced_part(made, "new") == made
    for broken in ("no markers", f"{results.END}{results.BEGIN}"):
        with pytest.raises(ValueError, match="README"):
            results.replaced_part(broken, "new")


def test_results_that_are_kept_are_read_back(tmp_path):
    kept = suite(point(16, 1.5), cpu=[{"family": "tma", "a @ b": 1.0, "gemm": 2.0}])
    content = dict(kept["compare"])
    write_results(tmp_path / "compare.json", content.pop("environment"), **content)
    (tmp_path / "other.json").write_text("not one of ours")
    assert results.read_kept(tmp_path) == kept


def test_the_plots_are_drawn_and_small(tmp_path):
    pytest.importorskip("matplotlib")
    import plots

    rows = [
        point(M, 1.0 + M / 9999, layout, N=N)
        for layout in ("NT", "NN")
        for N in (1024, 2048, 4096, 8192)
        for M in (1, 64, 4096)
    ]
    rows[0]["us"].pop("default")
    for name, draw in (("ratio", plots.plot_ratio), ("throughput", plots.plot_throughput)):
        path = tmp_path / f"{name}.png"
        draw(path, suite(*rows)["compare"])
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 4_000 < path.stat().st_size < 200_000


def test_what_is_published_is_made_of_what_is_kept():
    kept, readme = results.read_kept(), results.README.read_text()
    if not kept:
        pytest.skip("no results are kept in benchmarks/results")
    made = results.texts(kept, readme)
    for path, text in made.items():
        assert path.read_text() == text, f"run `python benchmarks/results.py`: {path} is stale"
    for path, text in made.items():
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
            assert (path.parent / picture).is_file(), picture
    # Markers that nothing fills would be an empty promise.
    assert (results.BEGIN in readme) <= ("compare" in kept)


def unseen(*rows):
    return {"unseen": {"environment": ENVIRONMENT, "rows": list(rows)}}


def test_what_the_default_reaches_is_told_by_band_and_at_worst():
    rows = [
        point(1, 1.5, **{"default": 1.25, "upstream-default": 4.0}),
        point(16, 1.5, **{"default": 1.25, "upstream-default": 4.0}),
        point(64, 0.9, **{"default": 2.0, "upstream-default": 1.0}),
    ]
    page = results.results_page(unseen(*rows))
    assert cells(page, "NT", "M <= 16")[2:] == ["2", "0.800", "0.800", "1.200"]
    assert cells(page, "NT", "M 17 to 1023")[2:] == ["1", "0.500", "0.500", "0.450"]
    worst = page.index("64 x 8192 x 4096"), page.index("1 x 8192 x 4096")
    assert worst[0] < worst[1]
    text = headline({**suite(*rows), **unseen(*rows)})
    assert "reaches 0.684 of the speed that tuning finds, at worst 0.500 (3 points)" in text
    assert "the default of the example that this format comes from reaches 0.397" in text


def test_whole_models_are_told_with_the_slowest():
    row = {"model": "A", "regime": "decode", "how": "graph", "original_ms": 2.0, "our_ms": 1.0}
    kept = {
        "models": {
            "environment": {**ENVIRONMENT, "layers": 4, "transformers": "5.x"},
            "rows": [{**row, "ratio": 2.0}, {**row, "how": "eager", "ratio": 0.9}],
            "models": {"A": {"original_error": 0.02, "our_error": 0.01, "untuned": ["1x2"]}},
            "training": {"original": [3.0, 1.0], "ours": [3.0, 1.01]},
            "training_difference": 0.01,
        }
    }
    page = results.results_page(kept)
    assert cells(page, "A", "decode", "eager")[3:] == ["2.000", "1.000", "0.900"]
    assert cells(page, "A", "2.00e-02")[2:] == ["1.00e-02", "1x2"]
    assert "largest difference 1.00e-02 of the loss" in page
    assert "(A; decode and prefill, eager and CUDA graphs): 0.900 to 2.000" in headline(
        {**suite(point(1, 1.0)), **kept}
    )


def test_what_a_call_without_a_file_says_of_the_default_is_what_was_measured():
    import kernels

    defaults = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1).defaults
    rows = results.read_kept()["unseen"]["rows"]
    reached = tables.default_reached(rows)
    assert defaults._REACHED["sm_90"] == (round(tables.mean(reached), 2), round(min(reached), 2))
