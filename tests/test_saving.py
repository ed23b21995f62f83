"""Saving tuned files: by several at once, killed at any moment, on a full disk, where it is not allowed.

Afterwards the file is a valid one that holds all that was reported as saved. Writers are processes that
do nothing but save; GEMM_TEST_KILLS sets the number of kills.
"""

import ctypes
import errno
import json
import os
import random
import resource
import signal
import stat
import struct
import tempfile
import threading
import time
from pathlib import Path

import kernels
import pytest
import torch

from .processes import fork, wait_for, without_rights
from .test_config import GOOD
from .test_tuning import fixed_timer

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, tuned_file = gemm_kernel.tuning, gemm_kernel.tuned_file

KILLS = int(os.environ.get("GEMM_TEST_KILLS", "20"))
NAME = "N=64,K=64,device_name=Any_GPU.json"
PROPERTIES = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
OLD = {"_comment": "kept", "8": {"BLOCK_SIZE_M": "of another version"}, "1024": GOOD}


def numbered(number):
    """A configuration that says which save it came from."""
    return {**GOOD, "GROUP_SIZE_M": number}


def valid_content(path, unusable=()):
    """What ``path`` holds, once it is proved to be a file that look-up takes."""
    data = path.read_bytes()
    content = json.loads(data)
    # A copy, since another writer may be at work.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(data)
        tuned, problems = tuned_file.read_tuned_file(copy, PROPERTIES)
    assert set(problems) == set(unusable), problems
    assert {str(M) for M in tuned} == {key for key in content if key.isdigit()} - set(unusable)
    Ms = [int(key) for key in content if key.isdigit()]
    assert Ms == sorted(Ms)
    return content


class Writer:
    """A process that saves one M after the other, over and over, and reports each save when it is done."""

    def __init__(self, path, Ms, first):
        self.first = first
        self.reports, write_end = os.pipe()
        self.pid = fork(lambda: self._save(path, Ms, write_end))
        os.close(write_end)

    def _save(self, path, Ms, write_end):
        number = self.first
        while True:
            M = Ms[number % len(Ms)]
            tuned_file.save_tuned_configs(path, {M: numbered(number)})
            os.write(write_end, struct.pack("qq", M, number))
            number += 1

    def kill(self):
        """End it wherever it is; the number of the last save that it reported for each M, and the last."""
        pid, self.pid = self.pid, None
        os.kill(pid, signal.SIGKILL)
        assert wait_for(pid) == -signal.SIGKILL
        with os.fdopen(self.reports, "rb") as file:
            reports = list(struct.iter_unpack("qq", file.read()))
        return dict(reports), reports[-1][1] if reports else self.first - 1


def without_directory_locks(monkeypatch):
    """A file system that locks only what is open for writing, as NFS does."""
    fcntl = tuned_file.fcntl
    flock = fcntl.flock

    def strict(descriptor, operation):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", strict)


@pytest.mark.parametrize("locks", ["of directories", "of files"])
def test_k11_killed_writers_lose_nothing(tmp_path, monkeypatch, request, locks):
    # NVIDIA/TensorRT-LLM PR 14441; vllm-project/vllm 52752: files cut short by a race of their writers
    if locks == "of files":
        without_directory_locks(monkeypatch)
    path = tmp_path / NAME
    path.write_text(json.dumps(OLD))
    Ms = {0: [1, 4, 16, 64], 1: [2, 32, 128, 256, 512]}
    last = {M: 0 for own in Ms.values() for M in own}
    first = {0: 1, 1: 1}
    draw = random.Random(0)
    saves = 0
    for _ in range(KILLS):
        writers = {side: Writer(path, Ms[side], first[side]) for side in Ms}
        request.addfinalizer(lambda writers=writers: [w.kill() for w in writers.values() if w.pid])
        # One of them is killed while the other goes on; then that one.
        sides = draw.sample(list(Ms), 2)
        for side in sides:
            time.sleep(draw.uniform(0, 0.02))
            reported, number = writers[side].kill()
            saves += number + 1 - first[side]
            last.update(reported)
            # What was under way when it died may have been saved, too.
            under_way = Ms[side][(number + 1) % len(Ms[side])]
            content = valid_content(path, unusable=["8"])
            for M in Ms[side]:
                saved = content.get(str(M), {}).get("GROUP_SIZE_M", 0)
                allowed = {last[M], number + 1} if under_way == M else {last[M]}
                assert saved in allowed, (M, saved, allowed)
                last[M] = saved
            first[side] = number + 2
        assert {key: content[key] for key in OLD} == OLD
    assert saves > KILLS
    print(f"{2 * KILLS} kills, {saves} saves reported, locks {locks}")
    tuned_file.save_tuned_configs(path, {1: GOOD})
    left = {file.name for file in tmp_path.iterdir()} - {".lock"}
    assert left == {NAME}


def test_k11_threads_lose_nothing(tmp_path):
    path = tmp_path / NAME
    Ms = range(1, 33)

    def save(start):
        for M in Ms[start::4]:
            tuned_file.save_tuned_configs(path, {M: numbered(M)})

    threads = [threading.Thread(target=save, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert valid_content(path) == {str(M): numbered(M) for M in Ms}
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_k11_a_lock_is_not_left_to_a_forked_process(tmp_path):
    path = tmp_path / NAME
    with tuned_file._locked(tmp_path):
        sleeper = fork(lambda: time.sleep(60))
    try:
        saver = fork(lambda: tuned_file.save_tuned_configs(path, {1: GOOD}))
        assert wait_for(saver, timeout_s=20) == 0
    finally:
        os.kill(sleeper, signal.SIGKILL)
        wait_for(sleeper)
    assert valid_content(path) == {"1": GOOD}


def test_k11_where_nothing_can_be_locked_it_is_saved_all_the_same(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tuned_file.fcntl, "flock", no_locks)
    path = tmp_path / NAME
    other = tmp_path / f".{NAME}.0123456789abcdef.tmp"
    other.write_text("of a writer who may be alive")
    for M in (4, 1):
        tuned_file.save_tuned_configs(path, {M: GOOD})
    assert valid_content(path) == {"1": GOOD, "4": GOOD}
    assert other.exists()


@pytest.mark.parametrize("stage", ["json.dumps", "open", "write", "fsync", "replace"])
def test_k11_a_save_that_fails_anywhere_leaves_the_old_file(tmp_path, monkeypatch, stage):
    path = tmp_path / NAME
    tuned_file.save_tuned_configs(path, {1: GOOD})
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if stage == "json.dumps":
        monkeypatch.setattr(tuned_file.json, "dumps", fail)
    elif stage == "open":
        monkeypatch.setattr(tuned_file, "open", fail, raising=False)
    elif stage == "write":
        real_open = open

        def open_full(*arguments, **options):
            file = real_open(*arguments, **options)
            return _Full(file) if "x" in arguments[1] else file

        monkeypatch.setattr(tuned_file, "open", open_full, raising=False)
    else:
        monkeypatch.setattr(os, stage, fail)
    with pytest.raises(OSError, match="No space left"):
        tuned_file.save_tuned_configs(path, {2: GOOD})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


class _Full:
    """A file on a full disk: half of what is written fits."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def _in_a_full_file_system(directory):
    """Mount a file system of 16 KiB at ``directory``, for this process alone; False if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    MS_REC, MS_PRIVATE, CLONE_NEWNS = 1 << 14, 1 << 18, 1 << 17
    return not (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, b"size=16k")
    )


@pytest.mark.parametrize("limit", ["file size", "file system"])
def test_k11_a_full_disk_costs_the_last_save_alone(tmp_path, limit):
    def fill():
        if limit == "file size":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        elif not _in_a_full_file_system(tmp_path):
            os._exit(77)
        path = tmp_path / NAME
        saved = {}

        def save_until_it_fails():
            for M in range(1, 10_000):
                tuned_file.save_tuned_configs(path, {M: numbered(M)})
                saved[str(M)] = numbered(M)

        with pytest.raises(OSError, match="No space left|File too large"):
            save_until_it_fails()
        assert len(saved) > 5
        assert valid_content(path) == saved
        assert [file.name for file in tmp_path.iterdir()] == [NAME]

    status = wait_for(fork(fill))
    if status == 77:
        pytest.skip("needs the right to mount a file system")
    assert status == 0


def test_k11_a_read_only_folder_is_refused_before_anything_is_measured(tmp_path):
    # huggingface/huggingface_hub 2797: using must work where only reading is allowed, tuning must say so
    folder = tmp_path / "closed"
    folder.mkdir()
    path = folder / NAME
    tuned_file.save_tuned_configs(path, {1: GOOD})
    before = path.read_bytes()
    for directory in (folder, *folder.parents[:-1]):
        mode = stat.S_IMODE(directory.stat().st_mode)
        if directory.stat().st_uid == os.geteuid() and mode == 0o700:
            directory.chmod(0o711)
    folder.chmod(0o555)

    def refuse():
        assert tuned_file.read_tuned_file(path, PROPERTIES)[0] == {1: GOOD}
        with pytest.raises(PermissionError, match="cannot write tuned files here .*save_dir"):
            gemm_kernel.arguments.writable(folder)
        with pytest.raises(PermissionError):
            tuned_file.save_tuned_configs(path, {2: GOOD})

    try:
        without_rights(refuse)
    finally:
        folder.chmod(0o755)
    assert path.read_bytes() == before
    assert [file.name for file in folder.iterdir()] == [NAME]


def tune(save_dir, Ms=(4,)):
    return gemm_kernel.tune_gemm(
        32, 48, Ms, torch.float16, save_dir, candidates=[GOOD], timer=fixed_timer(1.0)
    )


def test_k11_a_link_that_leads_to_a_new_folder_is_written_through(device, tmp_path):
    link = tmp_path / "link" / tuning.config_file_name(32, 48, device)
    link.parent.mkdir()
    link.symlink_to(tmp_path / "not" / "yet" / "there.json")
    tune(link.parent)
    assert link.is_symlink()
    assert list(json.loads((tmp_path / "not" / "yet" / "there.json").read_text())) == ["4"]


@pytest.mark.parametrize("target", ["itself", "a folder", "a device"])
def test_k11_a_link_that_leads_to_no_file_is_refused(device, tmp_path, target):
    link = tmp_path / tuning.config_file_name(32, 48, device)
    link.symlink_to({"itself": link, "a folder": tmp_path, "a device": Path("/dev/null")}[target])
    with pytest.raises((OSError, ValueError), match="symbolic links|not a regular file"):
        tune(tmp_path)
    assert link.is_symlink()
    assert [file.name for file in tmp_path.iterdir()] == [link.name]


def test_k11_what_another_version_wrote_stays(device, tmp_path):
    # vllm-project/vllm PR 3389: a partial run keeps what is there
    path = tmp_path / tuning.config_file_name(32, 48, device)
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"schema": 9, "1024": {"kernel": "new"}, **OLD}).encode()
    )
    tune(tmp_path)
    content = json.loads(path.read_text())
    assert list(content) == ["4", "8", "1024", "schema", "_comment"]
    assert {key: content[key] for key in OLD} == OLD


def test_k11_two_tuning_runs_at_once_keep_the_union(device, tmp_path):
    # flashinfer-ai/flashinfer 3186: each rank tunes alone. Processes of their own, as ranks are.
    if device.type != "cpu":
        pytest.skip("a forked process has no GPU: see test_k11_two_ranks_keep_the_union")
    kernel = gemm_kernel.kernels

    def rank(Ms):
        torch.set_num_threads(1)
        # The product is not what this is about, and a child has no use for the parent's interpreter.
        kernel.launch_gemm_kernel = lambda a, b, out, config: out.copy_(a.float() @ b.float())
        tune(tmp_path, Ms)

    Ms = {0: range(1, 40, 2), 1: range(2, 41, 2)}
    pids = [fork(lambda own=own: rank(own)) for own in Ms.values()]
    assert [wait_for(pid) for pid in pids] == [0, 0]
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())) == {str(M) for own in Ms.values() for M in own}


def test_k11_the_search_path_may_hold_what_cannot_be_looked_at(device, tmp_path, monkeypatch):
    # After hours of tuning, the question what hides the new file must not fail.
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "file").write_text("")
    folders = [
        loop,
        tmp_path / "file",
        tmp_path / "nowhere",
        Path("~"),
        Path("\udcff"),
        Path("x" * 300),
    ]
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", os.pathsep.join(map(str, folders)))
    path = tune(tmp_path / "new")
    assert tuning.outranked_by(path) is None
    assert tuning.get_config(4, 32, 48, device) == tuning.default_config(4, 32, 48)
