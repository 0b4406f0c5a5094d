"""Predictions by several processes: the same figures, errors as themselves, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from hf_distca.errors import ConfigError
from hf_distca.simulate import workers
from hf_distca.simulate.document_lengths import distribution
from hf_distca.simulate.predict import simulate
from hf_distca.simulate.setting import Setting

# Processes start however little there is to save.
AT_ONCE = "_START_SECONDS"


def all_gone(group: int) -> bool:
    """Whether no process of a group is left, within some seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def worse_later(number: int) -> int:
    if number == 2:
        raise ConfigError("the second one is wrong.")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_several_processes_predict_what_one_does(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    arranged, before = replace(setting, micro_batches=2), set(active_children())
    monkeypatch.setattr(workers, AT_ONCE, -1.0)
    found, told = [], []
    for jobs in (1, 2):
        names, documents = ["plain", "wlb", "dealt"], distribution("prolong", 32768)
        found.append(simulate(arranged, documents, names, batches=4, jobs=jobs, told=lambda: told.append(1)))
    assert found[0] == found[1]
    assert len(told) == 2 * 4 * 3
    assert set(active_children()) <= before


def test_errors_of_a_process_are_raised_as_they_are_and_a_killed_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(active_children())  # of other tests
    monkeypatch.setattr(workers, AT_ONCE, -1.0)
    with pytest.raises(ConfigError, match=r"^the second one is wrong\.$"):
        list(workers.map_in_order(worse_later, iter([0, 1, 2, 3]), 2, count=4, sample=1))
    with pytest.raises(ConfigError, match="one of 2 processes that predict was killed"):
        list(workers.map_in_order(worse_later, iter([0, 1, 5, 3]), 2, count=4, sample=1))
    until = time.monotonic() + 5
    while set(active_children()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert set(active_children()) <= before


@pytest.mark.parametrize(("count", "jobs", "least"), [(1, 8, -1.0), (8, 1, -1.0), (8, 8, 1.0)])
def test_no_process_starts_for_one_batch_one_job_or_little_work(
    monkeypatch: pytest.MonkeyPatch, count: int, jobs: int, least: float
) -> None:
    def refused(*_: object, **__: object) -> ProcessPoolExecutor:
        raise AssertionError("a process would start")

    monkeypatch.setattr(workers, AT_ONCE, least)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", refused)
    found = workers.map_in_order(lambda number: number, iter(range(count)), jobs, count=count, sample=1)
    assert list(found) == list(range(count))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")
@pytest.mark.parametrize("interrupted", [True, False])
def test_processes_end_without_a_word_when_the_first_one_is_interrupted_or_killed(tmp_path: Path, interrupted: bool) -> None:
    code = """
        import sys, time
        from hf_distca.simulate import workers

        def slow(number):
            if number:
                print("slow", flush=True)
                time.sleep(60)
            return number

        if __name__ == "__main__":
            workers._START_SECONDS = -1.0
            try:
                list(workers.map_in_order(slow, iter(range(9)), 2, count=9, sample=1))
            except KeyboardInterrupt:
                sys.exit(7)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, script], stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "slow\n"
            if interrupted:
                os.killpg(process.pid, signal.SIGINT)  # as the keyboard does: all of them get it
            else:
                process.kill()
            _, errors = process.communicate(timeout=20)
            assert process.returncode == (7 if interrupted else -signal.SIGKILL)
            assert not interrupted or errors == ""
            assert all_gone(process.pid)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("jobs", [0, -1, True, 2.0, 10**6])
def test_jobs_out_of_range(setting: Setting, jobs: int) -> None:
    with pytest.raises(ConfigError, match="jobs="):
        simulate(setting, distribution("equal:64", 64), ["plain"], jobs=jobs)
