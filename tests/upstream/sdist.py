"""transformers' shared tests, taken from its source distribution: the wheel has none, and this
repository holds no copy.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = "transformers_shared_tests"
FILES = ("test_modeling_common.py", "test_training_mixin.py")
# What those files import and the source distribution lacks. No test of these two is run.
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}
CACHE = Path(__file__).parents[2] / "build" / "upstream"  # git-ignored


class SdistError(Exception):
    """The source distribution could not be had, or is not that of the installed version."""


def shared_tests(sdist: Path | None = None, *, timeout: float = 300) -> Path:
    """The folder to import `transformers_shared_tests` from, unpacked from `sdist`, or downloaded
    once a version.

    Raises:
        SdistError: says what is missing and how to go on.
    """
    name = f"transformers-{version('transformers')}"
    folder = CACHE / name
    if sdist is not None or not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            archive = _download(name, Path(scratch), timeout) if sdist is None else sdist
            unpacked = _unpack(archive, name, Path(scratch) / "unpacked")
            if not folder.is_dir():
                unpacked.rename(folder)  # whole or not at all, whoever else is doing the same
            else:
                for file in unpacked.rglob("*.py"):
                    file.replace(folder / file.relative_to(unpacked))
    return folder


def _download(name: str, folder: Path, timeout: float) -> Path:
    """pip finds the archive wherever it is configured to look; it reads its metadata on the way and
    builds no wheel.
    """
    requirement = name.replace("-", "==", 1)
    options = ["--no-deps", "--no-binary", "transformers", "--retries", "1", "--dest", str(folder)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        *options,
        requirement,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise SdistError(
            f"pip did not download {requirement} within {timeout:.0f} s. Give the archive with"
            " --sdist."
        ) from None
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        reason = (done.stderr.strip().splitlines() or ["no archive"])[-1]
        raise SdistError(
            f"pip could not download the sdist of {requirement}: {reason} Give the archive with"
            " --sdist."
        )
    return archives[0]


def _unpack(archive: Path, name: str, target: Path) -> Path:
    package = target / PACKAGE
    package.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            for file in FILES:
                member = tar.extractfile(f"{name}/tests/{file}")
                if member is not None:
                    (package / file).write_bytes(member.read())
    except (OSError, tarfile.TarError, KeyError) as error:
        raise SdistError(
            f"{archive} is not the source distribution of the installed {name}: {error}"
        ) from error
    for file, text in STUBS.items():
        (package / file).parent.mkdir(exist_ok=True)
        (package / file).write_text(text)
    return target
