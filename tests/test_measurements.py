"""`measurements/`: what is written beside the tuned files, what is left out on a second run, and what cannot harm."""

import itertools
import json
import os

import kernels
import pytest
import torch

from .cases import make_config
from .test_config import GOOD
from .test_tuning import CANDIDATES, DTYPE, K, N, entry, fixed_timer

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, measurements = gemm_kernel.tuning, gemm_kernel.measurements


@pytest.fixture
def configs(tuned_dir, monkeypatch):
    """A folder that is searched first, called `configs`."""
    folder = tuned_dir / "configs"
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", str(folder))
    return folder


def tune(configs, *times_ms, Ms=(4,), dtype=DTYPE, candidates=CANDIDATES, **options):
    """The path, and the Ms that were measured."""
    results = []
    path = gemm_kernel.tune_gemm(
        N, K, Ms, dtype, configs, list(candidates), timer=fixed_timer(*times_ms),
        on_result=results.append, **options,
    )  # fmt: skip
    return path, [result.M for result in results]


def measured_file(path):
    return path.parent.parent / "measurements" / path.name


def test_times_and_the_best_stand_beside_the_entry(device, configs):
    # default, entry(2), entry(3), torch.mm
    path, _ = tune(configs, 0.004, 0.003, 0.001, 0.002)
    content = json.loads(measured_file(path).read_text())
    assert content["schema_version"] == 1
    (environment,) = content["environments"]
    assert environment["torch"] == torch.__version__
    record = content["measurements"]["4"]
    assert (record["tuned_us"], record["default_us"], record["torch_us"]) == (1.0, 4.0, 2.0)
    assert record["dtype"] == "float16"
    default = tuning.default_config(4, N, K)
    assert [(best["time_us"], best["config"]) for best in record["top"]] == [
        (1.0, entry(3)), (3.0, entry(2)), (4.0, default),
    ]  # fmt: skip
    assert json.loads(path.read_text()) == {"4": entry(3)}
    assert ": 1.0 µs, the default 4.0 µs, torch.mm 2.0 µs" in gemm_kernel.explain(4, N, K, device)


def test_only_the_best_five_are_kept_the_chosen_one_first(device, configs):
    candidates = [entry(stages) for stages in range(2, 10)]
    path, _ = tune(configs, 9.0, *range(8, 0, -1), candidates=candidates)
    top = measurements.read_measurements(measured_file(path))[4].top
    assert [config for _, config in top] == [entry(stages) for stages in (9, 8, 7, 6, 5)]


def test_a_second_run_is_merged_by_m_and_keeps_what_each_was_measured_with(
    device, configs, monkeypatch
):
    tune(configs, 2.0, 1.0, Ms=(64, 4))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    path, _ = tune(configs, 2.0, 1.0, Ms=(16,))
    found = measurements.read_measurements(measured_file(path))
    assert list(found) == [4, 16, 64]
    assert [m.environment["torch"] == "9.9.9" for m in found.values()] == [False, True, False]
    assert len(json.loads(measured_file(path).read_text())["environments"]) == 2


def test_resuming_leaves_out_what_was_measured_alike(device, configs, monkeypatch):
    assert tune(configs, 2.0, 1.0, Ms=(4, 16), resume=True)[1] == [4, 16]
    path, Ms = tune(configs, 2.0, 1.0, Ms=(1, 4, 16), resume=True)
    assert Ms == [1]
    assert tune(configs, 2.0, 1.0, Ms=(1, 4, 16), resume=True)[1] == []
    # without it, all is measured
    assert tune(configs, 2.0, 1.0, Ms=(1, 4))[1] == [1, 4]
    # another dtype, another candidate, another version
    assert tune(configs, 2.0, 1.0, Ms=(4,), resume=True, dtype=torch.bfloat16)[1] == [4]
    assert tune(configs, 2.0, 1.0, resume=True)[1] == [4]
    assert tune(configs, 2.0, 1.0, resume=True, candidates=[entry(2), entry(4)])[1] == [4]
    monkeypatch.setattr(measurements.triton, "__version__", "9.9.9")
    assert tune(configs, 2.0, 1.0, Ms=(16,), resume=True)[1] == [16]
    # an entry that is not the one that was measured
    path.write_text(json.dumps({"16": entry(7)}))
    assert tune(configs, 2.0, 1.0, Ms=(16,), resume=True)[1] == [16]


def test_an_interrupted_run_goes_on_where_it_was(device, configs):
    def stop(M, *_):
        if M == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(configs, 2.0, 1.0, Ms=(4, 16, 64), on_progress=stop, resume=True)
    assert tune(configs, 2.0, 1.0, Ms=(4, 16, 64), resume=True)[1] == [16, 64]


def test_a_folder_of_another_name_gets_none_unless_it_is_named(device, tmp_path):
    path, _ = tune(tmp_path / "a", 1.0)
    assert list(tmp_path.rglob("*.json")) == [path]
    path, _ = tune(tmp_path / "b", 1.0, measurements=tmp_path / "m")
    assert (tmp_path / "m" / path.name).is_file()


# fmt: off
DAMAGED = {
    "cut": b'{"schema_version": 1, "measu', "no object": b"[]", "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000, "another version": b'{"schema_version": 2, "environments": [], "measurements": {}}',
    "parts of another kind": b'{"schema_version": 1, "environments": {}, "measurements": []}',
    "records of another kind": json.dumps({"schema_version": 1, "environments": [1, {}], "measurements": {
        "4": None, "8": {"environment": 9}, "-1": {}, "16": {"environment": 1, "dtype": "float16", "space": "", "top": [],
        "tuned_us": 1, "default_us": 1, "torch_us": 1, "noise": 1}}}).encode(),
}
# fmt: on


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_harms_nothing_and_is_replaced(device, configs, name, caplog):
    path, _ = tune(configs, 2.0, 1.0)
    measured_file(path).write_bytes(DAMAGED[name])
    assert measurements.read_measurements(measured_file(path)) == {}
    tuning._load_tuned_configs.cache_clear()
    assert "tuned, from" in gemm_kernel.explain(4, N, K, device)
    assert tune(configs, 2.0, 1.0, resume=True)[1] == [4]
    assert list(measurements.read_measurements(measured_file(path))) == [4]


def test_what_cannot_be_written_does_not_stop_the_run(device, configs, caplog):
    configs.parent.joinpath("measurements").write_text("a file where a folder should be")
    path, Ms = tune(configs, 2.0, 1.0, Ms=(4, 16))
    assert Ms == [4, 16]
    assert list(json.loads(path.read_text())) == ["4", "16"]
    assert sum("Measurements cannot be written" in text for text in caplog.messages) == 1


def test_a_failing_write_leaves_the_old_file(device, configs, monkeypatch):
    path, _ = tune(configs, 2.0, 1.0)
    before = measured_file(path).read_bytes()
    replace = os.replace

    def full(source, target):
        if "measurements" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    tune(configs, 2.0, 1.0, Ms=(64,))
    assert measured_file(path).read_bytes() == before
    assert [file.name for file in measured_file(path).parent.iterdir()] == [path.name]


class Bench:
    """A bench with rounds whose times are given: for each configuration those of its rounds, over and over."""

    has_rounds = True

    def __init__(self, times, lost=(), wrong=()):
        self.wrong = wrong
        self.times = {key: itertools.cycle(own) for key, own in times.items()}
        self.lost = list(lost)
        self.series = []

    def set_rows(self, M):
        pass

    def quick_ms(self, config):
        return next(self.times[config["num_stages"]])

    def verify(self, config):
        if config["num_stages"] in self.wrong:
            raise gemm_kernel.bench.Skip("wrong result")

    def interleaved_ms(self, configs, rounds):
        names = [None if config is None else config["num_stages"] for config in configs]
        self.series.append(names)
        for name in names:
            if name in self.lost:
                raise gemm_kernel.bench.Skip("took too long", turn=names.index(name))
        return [[next(self.times[name]) for _ in range(rounds)] for name in names]


def final(times, present=None, lost=(), torch_ms=3.0):
    """The num_stages of the chosen one, of default 1 and others, and the series that were measured."""
    bench = Bench({None: [torch_ms], **times}, lost)
    configs = [entry(stages) for stages in times]
    found = gemm_kernel.search.measure_final(bench, configs, entry(1))
    return found.choose(present and entry(present), entry(1))["num_stages"], bench.series


NOISY = (1.0, 1.05, 0.96, 1.02, 0.98)


def test_a_clear_winner_needs_one_series():
    chosen, series = final({1: [2.0], 2: [1.0, 1.001], 3: [1.5]})
    assert (chosen, len(series)) == (2, 1)


def test_one_series_is_enough_where_it_tells_within_half_a_percent_how_all_compare():
    quiet = [1 + (time - 1) / 40 for time in NOISY]
    shifted = quiet[1:] + quiet[:1]
    assert final({1: [2.0], 2: quiet, 3: shifted}) == (2, [[1, 2, 3, None]])
    # Two that are left, and the noise of one of them.
    assert len(final({1: [2.0], 2: quiet, 3: NOISY})[1]) > 1
    # One that is left, beside a default of which it is not known.
    assert len(final({1: [1.01 * time for time in NOISY], 2: quiet})[1]) > 1


def test_within_the_noise_the_default_is_chosen_or_what_is_used_at_present():
    better = [time * 0.999 for time in NOISY[1:] + NOISY[:1]]
    chosen, series = final({1: NOISY, 2: better}, present=2)
    assert (chosen, len(series)) == (1, gemm_kernel.search._MAX_SERIES)
    assert final({1: NOISY, 2: better})[0] == 1
    assert final({1: [2.0], 2: NOISY, 3: better}, present=2)[0] == 2


def test_the_default_is_not_given_up_for_less_than_a_percent_however_sure():
    assert final({1: [1.0], 2: [0.993]})[0] == 1
    assert final({1: [1.0], 2: [0.988]})[0] == 2


def test_where_torch_mm_is_faster_the_default_is_given_up_for_what_is_beyond_the_noise():
    assert final({1: [1.0], 2: [0.993]}, torch_ms=0.99)[0] == 2
    assert final({1: [1.0], 2: [0.993]}, torch_ms=1.0)[0] == 1
    slightly = [time * 0.999 for time in NOISY[1:] + NOISY[:1]]
    assert final({1: NOISY, 2: slightly}, torch_ms=0.9)[0] == 1


def test_a_gain_has_to_be_beyond_the_noise_and_beyond_a_percent_but_not_beyond_their_sum():
    # After one series the noise is 1.2 %, three times that 3.7 %.
    assert final({1: [1.03, 1.05, 1.07], 2: [1.0]}) == (2, [[1, 2, None]])


def test_what_takes_the_very_same_time_is_no_slower():
    assert final({1: [2.0], 2: [1.0], 3: [1.0]}, present=3)[0] == 3


def chosen_of(*times, torch_ms=(1.0, 1.0)):
    """The place of the chosen one; each is simpler than the one before it."""
    configs = [{**entry(2), **dict.fromkeys("abc"[place:], 1)} for place in range(len(times))]
    found = gemm_kernel.search._Final()
    found.add(configs, times, torch_ms)
    return configs.index(found.choose(None, GOOD))


def test_the_simplest_is_chosen_of_what_is_within_half_a_percent_however_noisy():
    noisy = [1.0, 1.2, 0.8, 1.1, 0.9]
    as_fast = [1.0, 0.8, 1.2, 1.1, 0.9]
    slower = [1.05, 0.84, 1.26, 1.0, 1.1]
    torch_ms = [1.0] * len(noisy)
    assert chosen_of(noisy, as_fast, torch_ms=torch_ms) == 1
    assert chosen_of(noisy, slower, torch_ms=torch_ms) == 0


def test_the_simplest_is_not_chosen_if_it_gains_too_little_on_the_default():
    # Noise, in which the simple one is not beaten.
    complex_one, simple = {**entry(2), "PDL": 2}, entry(3)
    noise = [0.98, 1.02, 1.0, 0.99, 1.01]
    simple_ms = [1.005 * time for time in (1.02, 0.98, 1.0, 1.01, 0.99)]
    for default_ms, expected in ((1.031, complex_one), (1.1, simple)):
        found = gemm_kernel.search._Final()
        default_times = [default_ms * time for time in noise]
        found.add([complex_one, simple, entry(1)], [noise, simple_ms, default_times], [2.0] * 5)
        assert found.choose(None, entry(1)) == expected


def test_without_rounds_the_first_of_the_fastest_is_chosen():
    assert chosen_of([2.0], [1.0], [1.0], torch_ms=[1.0]) == 1


def test_who_is_clearly_beaten_leaves_and_the_default_stays():
    _, series = final({1: [2.0], 2: NOISY, 3: NOISY[1:] + NOISY[:1], 4: [1.3]})
    assert [name for name in series[0] if name] == [1, 2, 3, 4]
    assert all(sorted(filter(None, names)) == [1, 2, 3] for names in series[1:])


class Warming(Bench):
    """From the second series on, the card is slower for all."""

    def interleaved_ms(self, configs, rounds):
        series = super().interleaved_ms(configs, rounds)
        return series if len(self.series) == 1 else [[1.2 * time for time in own] for own in series]


def test_who_left_while_the_card_was_cool_is_not_the_fastest():
    twice = [time * 1.1 for time in NOISY]
    bench = Warming({None: [1.0], 1: twice, 2: NOISY, 3: NOISY[1:] + NOISY[:1], 4: [1.15]})
    configs = [entry(stages) for stages in (1, 2, 3, 4)]
    found = gemm_kernel.search.measure_final(bench, configs, entry(1))
    assert len(bench.series) > 1
    assert [timed.config["num_stages"] for timed in found.ranked()][2:] == [1, 4]
    # By how much it is slower is what its rounds said; all times are of the same card.
    fastest = found.ranked()[0].time_ms
    assert found.time_ms(entry(4)) / fastest == pytest.approx(1.15, rel=0.02)
    assert found.time_ms(entry(1)) / fastest == pytest.approx(1.1, rel=0.02)


@pytest.mark.parametrize("torch_ms", [float("nan"), float("inf"), 0.0])
def test_a_time_of_torch_that_is_none_decides_nothing(torch_ms):
    times = [gemm_kernel.search.Timed(time, entry(stages)) for stages, time in ((2, 2.0), (3, 1.0))]
    found = gemm_kernel.search._Final.of_single_times(times, torch_ms)
    assert found.choose(None, entry(1)) == entry(3)
    assert found.time_ms(entry(2)) == 2.0


def test_no_more_than_a_few_are_in_the_final():
    bench = Bench({None: [1.0], **{stages: [1.0] for stages in range(2, 12)}})
    candidates = [entry(stages) for stages in range(2, 12)]
    result = gemm_kernel.search.search(40, N, K, bench, candidates, candidates[0])
    assert len(bench.series[0]) == 1 + gemm_kernel.search._FINALISTS
    # It is the default, so it has no lead on that, and no noise of it.
    assert (result.config, result.noise) == (candidates[0], None)


class Tiring(Bench):
    """From the second series on, `lost` are lost."""

    def interleaved_ms(self, configs, rounds):
        lost, self.lost = self.lost, self.lost if self.series else []
        try:
            return super().interleaved_ms(configs, rounds)
        finally:
            self.lost = lost


def test_a_finalist_that_is_lost_in_a_later_series_is_not_chosen_for_its_first():
    better = [time * 0.999 for time in NOISY[1:] + NOISY[:1]]
    bench = Tiring({None: [1.0], 1: [2.0], 2: better, 3: NOISY}, lost=[2])
    skipped = []
    found = gemm_kernel.search.measure_final(
        bench, [entry(1), entry(2), entry(3)], entry(1), lambda config, _: skipped.append(config)
    )
    assert skipped == [entry(2)]
    assert entry(2) not in [timed.config for timed in found.ranked()]
    assert found.choose(entry(2), entry(1)) == entry(3)


@pytest.mark.parametrize("turn", [None, 2])
def test_final_rounds_that_fail_through_no_finalist_are_an_error(turn):
    class Failing(Bench):
        def interleaved_ms(self, configs, rounds):
            raise gemm_kernel.bench.Skip("took too long", turn=turn)

    configs = [entry(1), entry(2)]
    with pytest.raises(RuntimeError, match="the final rounds failed: took too long"):
        gemm_kernel.search.measure_final(Failing({}), configs, entry(1))


def test_the_default_and_what_is_used_at_present_are_in_the_final_however_slow():
    bench = Bench({None: [1.0], 1: [2.0], 2: [1.0], 3: [1.5], 4: [1.4], 5: [1.05]})
    candidates = [entry(stages) for stages in range(1, 6)]
    gemm_kernel.search.search(40, N, K, bench, candidates, entry(1), present=entry(3))
    assert bench.series[0] == [2, 5, 3, 1, None]


def test_a_finalist_that_is_lost_costs_itself_alone():
    chosen, _ = final({1: [2.0], 2: [1.0], 3: [1.1]}, lost=[2])
    assert chosen == 3


def search(lost=(), wrong=()):
    bench = Bench({None: [1.0], 1: [2.0], 2: [1.0], 3: [1.05]}, lost, wrong)
    candidates = [entry(stages) for stages in (1, 2, 3)]
    return gemm_kernel.search.search(40, N, K, bench, candidates, default=candidates[0])


def test_a_winner_that_is_wrong_beside_its_m_gives_way_to_the_next():
    result = search(wrong=[2])
    assert (result.config, result.skipped) == (entry(3), {"wrong result": 1})
    assert entry(2) not in [timed.config for timed in result.top]


def test_if_all_are_lost_in_the_end_there_is_an_error():
    with pytest.raises(RuntimeError, match="None of 3 candidates runs .* 3 took too long"):
        search(lost=[1, 2, 3])
    with pytest.raises(RuntimeError, match="None of 3 candidates runs .* 3 wrong result"):
        search(wrong=[1, 2, 3])


class Listing(Bench):
    """All take as long; the configurations of the quick look and of each series are listed."""

    def __init__(self):
        super().__init__({})
        self.looked = []

    def quick_ms(self, config):
        self.looked.append(config)
        return 1.0

    def interleaved_ms(self, configs, rounds):
        self.series.append(configs)
        return [[1.0] * rounds for _ in configs]


def test_no_configuration_is_measured_twice():
    # Of the default, which is launched early, and of the same that is not, some refinements are the same.
    plain = make_config("tma", 64, 64, 128, 4, 4)
    early = {**plain, "PDL": 2, "PREFETCH": 2}
    given = [early, plain, {**plain, "PDL": 1, "PREFETCH": 2}, plain]
    bench = Listing()
    gemm_kernel.search.search(40, N, K, bench, given, default=early)
    assert len(bench.looked) > len(given)
    for configs in (bench.looked, *bench.series):
        assert [configs.count(config) for config in configs] == [1] * len(configs)


@pytest.mark.parametrize(("capability", "early"), [((8, 9), False), ((9, 0), True)])
def test_no_refinement_is_tried_that_the_device_cannot_run(capability, early):
    properties = gemm_kernel.device.DeviceProperties("cuda", capability)
    given = [
        make_config(*tile) for tile in (("swap", 16, 64, 128, 4, 4), ("gemv", 1, 2, 512, 4, 1))
    ]
    bench = Listing()
    gemm_kernel.search.search(1, N, K, bench, given, given[0], properties=properties)
    assert any("PDL" in config for config in bench.looked) == (
        early and gemm_kernel.kernels.dependent_launch.gdc_wait is not None
    )


def test_few_configurations_serve_all_ms_within_the_cost():
    fewest = gemm_kernel.tuner.fewest
    times = {
        1: {"a": 1.0, "b": 1.005},
        2: {"a": 1.02, "b": 1.0},
        4: {"b": 1.009, "c": 1.0},
        8: {"c": 1.0, "d": 1.5},
    }
    assert fewest(times, 0.01) == {1: "b", 2: "b", 4: "c", 8: "c"}
    assert fewest(times, 0.0) == {1: "a", 2: "b", 4: "c", 8: "c"}
    assert fewest({}, 0.01) == {}
    assert fewest({M: {"b": 1.005, "a": 1.0} for M in (1, 2)}, 0.01) == {1: "a", 2: "a"}


@pytest.mark.parametrize(
    ("default_ms", "torch_ms", "is_shared"),
    [
        (1.04, 2.0, True),
        (1.02, 2.0, False),
        (1.02, 1.01, True),
        (1.005, 1.0, False),
        (float("nan"), 2.0, True),
    ],
)
def test_what_is_shared_has_to_gain_on_the_default_as_much_as_any_other(
    default_ms, torch_ms, is_shared
):
    own, other = (gemm_kernel.tuner._key(entry(stages)) for stages in (2, 3))
    result = gemm_kernel.search.Result(16, entry(2), default_ms, 1.0, torch_ms, 2, {})
    # The card is slower than it was when the default was measured.
    times = {own: 1.5, other: 1.515}
    gaining = gemm_kernel.tuner._gaining(times, result)
    assert gaining == (times if is_shared else {own: 1.5})


class Sharing:
    """A bench with rounds, of given times by M and num_stages, at which the card is slower when winners are shared."""

    has_rounds = True

    def __init__(self, times, wrong=(), broken=()):
        self.times, self.wrong, self.broken = times, wrong, broken
        self.looked, self.shared = [], []

    def set_rows(self, M):
        self.M = M

    def quick_ms(self, config):
        self.looked.append(config)
        if config["num_stages"] not in self.times[self.M]:
            raise gemm_kernel.bench.Skip("took too long")
        return self._time_ms(config)

    def verify(self, config):
        if (self.M, config["num_stages"]) in self.wrong:
            raise gemm_kernel.bench.Skip("wrong result")

    def interleaved_ms(self, configs, rounds):
        if None in configs:
            return [
                [1.0 if config is None else self._time_ms(config)] * rounds for config in configs
            ]
        self.shared.append((self.M, [config["num_stages"] for config in configs]))
        if self.M in self.broken:
            raise RuntimeError("no answer")
        return [[1.5 * self._time_ms(config)] * rounds for config in configs]

    def _time_ms(self, config):
        times = self.times[self.M][config["num_stages"]]
        return times if config == entry(config["num_stages"]) else 9.0


def tune_on(bench, device, Ms, entries=(), candidates=(2, 3)):
    """The num_stages of the entries that are saved, and their measurements."""
    saved, measured = {}, {}
    gemm_kernel.tuner.Tuner(
        tuning.Problem(N, K, "NN", "float16"), bench, device, dict(entries),
        lambda M: [entry(stages) for stages in candidates], {},
        lambda new, found: (saved.update(new), measured.update(found)),
    ).run(Ms)  # fmt: skip
    return {M: config["num_stages"] for M, config in saved.items()}, measured


NINE = dict.fromkeys(range(1, 10), 9.0)


def test_a_winner_is_shared_by_rounds_at_the_m_that_gives_up_its_own(device):
    bench = Sharing({16: {**NINE, 2: 1.0, 3: 1.005}, 40: {**NINE, 2: 1.2, 3: 1.0}})
    saved, measured = tune_on(bench, device, (16, 40))
    assert saved == {16: 3, 40: 3}
    # What is too slow at a glance is not compared.
    assert bench.shared == [(16, [2, 3])]
    # In the measure of the rounds that the others are from.
    assert measured[16].tuned_us == 1005.0
    assert [config["num_stages"] for _, config in measured[16].top[:2]] == [3, 2]
    assert [config for _, config in measured[16].top].count(entry(3)) == 1


@pytest.mark.parametrize("fault", ["slower", "wrong", "no rounds"])
def test_an_m_that_cannot_share_keeps_its_own(device, fault):
    slower = 1.03 if fault == "slower" else 1.005
    times = {16: {**NINE, 2: 1.0, 3: slower}, 40: {**NINE, 2: 1.2, 3: 1.0}}
    wrong = [(16, 3)] if fault == "wrong" else []
    bench = Sharing(times, wrong, broken=[16] if fault == "no rounds" else [])
    assert tune_on(bench, device, (16, 40))[0] == {16: 2, 40: 3}
    assert bench.shared == [(16, [2, 3])]


def test_a_winner_of_another_m_is_verified_at_the_m_that_it_is_for(device):
    times = {
        16: {**NINE, 2: 1.0, 3: 1.005},
        40: {**NINE, 2: 1.2, 3: 1.0},
        64: {**NINE, 2: 1.2, 3: 1.0},
    }
    bench = Sharing(times)
    verified = []
    bench.verify = lambda config: verified.append((bench.M, config["num_stages"]))
    assert tune_on(bench, device, (16, 40, 64))[0] == {16: 3, 40: 3, 64: 3}
    assert verified == [(16, 2), (40, 3), (64, 3), (16, 3)]


def test_a_winner_that_does_not_run_at_an_m_costs_it_no_other(device):
    times = {16: {**NINE, 2: 1.0, 3: 1.005}, 40: {**NINE, 2: 1.2, 3: 1.0}, 64: {**NINE, 4: 1.0}}
    del times[16][4]
    bench = Sharing(times)
    assert tune_on(bench, device, (16, 40, 64), candidates=(2, 3, 4))[0] == {16: 3, 40: 3, 64: 4}


def test_the_entries_beside_an_m_are_candidates_if_they_can_run(device):
    bench = Sharing({16: NINE})
    entries = {M: entry(stages) for M, stages in ((1, 4), (2, 5), (16, 6), (64, 7), (128, 8))}
    tune_on(bench, device, [16], {**entries, 8: {**GOOD, "num_warps": 3}})
    tried = [
        config["num_stages"] for config in bench.looked if config == entry(config["num_stages"])
    ]
    assert sorted({2, 3, *tried}) == [2, 3, 5, 6, 7]
    assert all(config["num_warps"] != 3 for config in bench.looked)


def test_no_winner_is_shared_that_would_read_b_more_often(device, configs):
    # Default, 32 and 64 rows, torch.mm; at 64 the tile of 32 rows is as good as the one of 64.
    candidates = [{**entry(2), "BLOCK_SIZE_M": 32}, entry(3)]
    times = [9.0, 1.0, 1.2, 9.0, *(9.0, 1.005, 1.0, 9.0)]
    path, _ = tune(configs, *times, Ms=(32, 64), candidates=candidates)
    assert json.loads(path.read_text()) == {"32": candidates[0], "64": candidates[1]}
    # The other way round it is.
    times = [9.0, 1.005, 1.0, 9.0, *(9.0, 1.2, 1.0, 9.0)]
    path, _ = tune(configs, *times, Ms=(32, 64), candidates=candidates)
    assert json.loads(path.read_text()) == {"32": candidates[1], "64": candidates[1]}


def test_winners_are_shared_between_ms_and_the_default_is_kept(device, configs):
    # For each M: default, entry(2), entry(3), then torch.mm; at 16 the two are within a percent.
    four = [9.0, 1.0, 1.2, 9.0]
    sixteen = [9.0, 1.005, 1.0, 9.0]
    sixty_four = [1.0, 1.1, 1.2, 9.0]
    path, _ = tune(configs, *four, *sixteen, *sixty_four, Ms=(4, 16, 64))
    default = tuning.default_config(64, N, K)
    assert json.loads(path.read_text()) == {"4": entry(2), "16": entry(2), "64": default}
    found = measurements.read_measurements(measured_file(path))
    assert found[16].top[0] == (1005.0, entry(2))
    assert found[16].tuned_us == 1005.0
