"""The README beside the tuned files says what is kept of how they were measured, and nothing else."""

import json

from tools import configs_readme

measurements = configs_readme.gemm_kernel.measurements
CONFIG = configs_readme.gemm_kernel.config.plain_config(16, 64, 64, 4, 3)
OTHER = {**CONFIG, "num_stages": 4}
NAME = "N=64,K=32,device_name=Some_GPU.json"


def environment(date):
    return {
        "date": date, "torch": "2.x", "triton": "3.x", "driver": "1.2", "protocol": "a protocol",
    }  # fmt: skip


def measured(config, tuned_us, default_us, torch_us, date="2001-02-03"):
    return measurements.Measurement(
        environment(date), "bfloat16", "0" * 12, tuned_us, default_us, torch_us, 0.01,
        ((tuned_us, config),),
    )  # fmt: skip


def readme(tmp_path, entries, found):
    for folder in ("configs", "measurements"):
        (tmp_path / folder).mkdir()
    for name, content in entries.items():
        (tmp_path / "configs" / name).write_text(json.dumps(content))
    if found:
        measurements.save_measurements(tmp_path / "measurements" / NAME, found)
    return configs_readme.configs_readme(tmp_path / "configs", tmp_path / "measurements")


def cells(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}`")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_committed_readme_is_what_is_made():
    text = configs_readme.configs_readme(configs_readme.CONFIGS, configs_readme.MEASUREMENTS)
    committed = (configs_readme.CONFIGS / "README.md").read_text()
    assert committed == text, "run `python -m tools.configs_readme --write`"


def test_ratios_are_geometric_means_over_the_measured_m(tmp_path):
    found = {1: measured(CONFIG, 10, 20, 5), 16: measured(CONFIG, 10, 80, 20, "2001-02-04")}
    # what a later run, or a hand, replaced was not measured
    found[64] = measured(OTHER, 10, 10, 10)
    # A note is no entry.
    entries = {"triton_version": "3.x", **dict.fromkeys(("1", "16", "64"), CONFIG)}
    text = readme(tmp_path, {NAME: entries}, found)
    assert cells(text, NAME) == ["3", "2", "4.000", "1.000", "bfloat16", "1, 2"]
    assert "1. 2001-02-03, torch 2.x, Triton 3.x, driver 1.2, a protocol" in text
    assert "2. 2001-02-04, torch 2.x" in text
    assert "## Some GPU" in text


def test_a_time_that_was_not_measured_counts_for_nothing(tmp_path):
    found = {1: measured(CONFIG, 10, 20, None), 16: measured(CONFIG, 10, None, None)}
    text = readme(tmp_path, {NAME: {"1": CONFIG, "16": CONFIG}}, found)
    assert cells(text, NAME) == ["2", "2", "2.000", "", "bfloat16", "1"]


def test_a_file_without_measurements_says_so(tmp_path):
    given = "N=4096,K=4096,device_name=NVIDIA_L4.json"
    text = readme(tmp_path, {NAME: {"1": CONFIG}, given: {"1": CONFIG}, "x.json": {}}, {})
    assert cells(text, NAME)[:2] == ["1", "no measurements kept"]
    assert "came to this project as it is" in cells(text, given)[1]
    assert cells(text, "x.json")[1] == "no measurements kept"


def test_the_readme_is_no_tuned_file_and_does_not_ship():
    kernel = configs_readme.gemm_kernel
    folder = kernel.tuning._CONFIGS_DIR
    assert folder.is_dir()
    assert {path.suffix for path in folder.iterdir()} == {".json"}
