"""Processes for tests: forked, so that they cost milliseconds and know what the test knows."""

import ctypes
import os
import signal
import sys
import time
import traceback

NOBODY = 65534


def fork(function):
    """Run ``function`` in a child process; its id. It ends with status 0, or 1 after an exception."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if sys.platform == "linux":
            # No child survives a test that ends before it does.
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait_for(pid, timeout_s=60):
    """Wait until ``pid`` ends, and end it if it does not; its exit status, negative for a signal."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"process {pid} did not end in {timeout_s} s")
        time.sleep(0.001)


def without_rights(function):
    """Run ``function`` as a user who owns nothing; root, whom no mode stops, becomes one in a child."""
    if os.geteuid() != 0:
        function()
        return

    def drop_rights():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        function()

    assert wait_for(fork(drop_rights)) == 0, "failed in the child, see its output"
