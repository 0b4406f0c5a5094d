"""Run tests on the CPU with the build of torch that GPU images have, of a version of torch and of
transformers of one's choice.

    python tests/cuda_wheel.py --torch 2.11.0 --transformers 5.17.0 tests/kernels tests/runtime

torch's wheel is built for CUDA and needs gigabytes of CUDA's libraries to be imported. On a CPU
none of their functions is called but those of the small runtime: so the wheel and that are
unpacked, and a compiler makes libraries of functions that do nothing in place of all others.
Everything else comes from the environment that runs this, whose torch and transformers are hidden.
Wheels and libraries stay in the git-ignored `build/cuda_wheel`; half a gigabyte is downloaded.

What follows the options goes to pytest as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = (
    "torch",
    "functorch",
    "torchgen",
    "transformers",
    "huggingface_hub",
    "__editable__",
    "_virtualenv",
    "__pycache__",
)
# Of a system, as opposed to CUDA's.
SYSTEM = (
    "ld-linux",
    "libc.",
    "libdl.",
    "libgcc",
    "libm.",
    "libpthread.",
    "librt.",
    "libstdc",
    "libgomp",
)


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:4]))} ...: {done.stderr[-2000:]}")
    return done.stdout


def unpacked(requirement: str, folder: Path) -> Path:
    """A wheel without what it requires, downloaded and unpacked once."""
    target = folder / re.sub(r"\W+", "_", requirement)
    if not target.exists():
        wheels = folder / "wheels" / target.name
        run(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            wheels,
            requirement,
        )
        (wheel,) = wheels.glob("*.whl")
        partial = target.with_suffix(".part")
        zipfile.ZipFile(wheel).extractall(partial)
        partial.rename(target)
        wheel.unlink()
    return target


def stand_ins(libraries: Path, runtime: Path, folder: Path) -> Path:
    """The runtime, and libraries with the functions that torch's want of CUDA's others, none of
    which does anything.
    """
    target = folder / f"{libraries.parents[1].name}_stand_ins"
    if target.exists():
        return target
    partial = target.with_suffix(".part")
    partial.mkdir(exist_ok=True)
    for path in runtime.rglob("libcudart.so*"):
        shutil.copy(path, partial)
    there = {path.name for path in (*libraries.iterdir(), *partial.iterdir())}
    needed: set[str] = set()
    wanted: dict[str, str] = {}
    provided: set[str] = set()
    for path in libraries.glob("*.so*"):
        needed.update(re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", path)))
        for line in run("readelf", "-W", "--dyn-syms", path).splitlines():
            fields = line.split()
            if len(fields) > 7 and fields[0].rstrip(":").isdigit():
                name, _, version = fields[7].partition("@")
                if fields[6] == "UND":
                    wanted[name] = version.strip("@")
                else:
                    provided.add(name)
    for library in sorted(name for name in needed - there if not name.startswith(SYSTEM)):
        stem = re.sub(r"^lib|\.so.*$|_host", "", library)
        mine = [
            name
            for name in wanted
            if name.lower().startswith(stem.lower()) and name not in provided
        ]
        build(
            partial / library, {name: wanted[name] for name in mine if re.fullmatch(r"\w+", name)}
        )
    partial.rename(target)
    return target


def build(library: Path, functions: dict[str, str]) -> None:
    """A library with these functions; each has the version that torch asks for."""
    source, versions = library.with_suffix(".c"), library.with_suffix(".map")
    source.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in functions))
    named = {version for version in functions.values() if version}
    groups = {
        version: [name for name, one in functions.items() if one == version] for version in named
    }
    versions.write_text(
        "\n".join(
            f"{version} {{ global: {'; '.join(names)}; }};" for version, names in groups.items()
        )
    )
    script = [f"-Wl,--version-script={versions}"] if named else []
    run(
        "cc",
        "-w",
        "-fno-builtin",
        "-shared",
        "-fPIC",
        "-o",
        library,
        source,
        f"-Wl,-soname,{library.name}",
        *script,
    )


def environment(folder: Path, packages: list[Path]) -> Path:
    """A folder with links to the packages and to all that this environment has besides."""
    # Named so because libraries tell installed packages from others by it.
    target = folder / "_".join(path.name for path in packages) / "site-packages"
    target.mkdir(parents=True, exist_ok=True)
    for link in target.iterdir():
        link.unlink()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(HIDDEN) and entry.suffix != ".pth":
            (target / entry.name).symlink_to(entry)
    for package in packages:
        for entry in package.iterdir():
            (target / entry.name).symlink_to(entry)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="2.11.0", help="version (default: %(default)s)")
    parser.add_argument("--transformers", default="5.17.0", help="version (default: %(default)s)")
    parser.add_argument(
        "--hub",
        default="<2",
        help="version of huggingface_hub that transformers takes (default: %(default)s)",
    )
    runtime = "nvidia-cuda-runtime==13.0.*"
    parser.add_argument(
        "--runtime",
        default=runtime,
        help="CUDA's runtime as that torch has it (default: %(default)s)",
    )
    parser.add_argument(
        "--python", action="store_true", help="what follows is for Python itself, not for pytest"
    )
    arguments, rest = parser.parse_known_args()
    folder = ROOT / "build" / "cuda_wheel"
    hub = arguments.hub if arguments.hub[0] in "<>=" else f"=={arguments.hub}"
    wanted = (
        f"torch=={arguments.torch}",
        f"transformers=={arguments.transformers}",
        f"huggingface_hub{hub}",
    )
    packages = [unpacked(requirement, folder) for requirement in wanted]
    site = environment(folder, packages)
    libraries = stand_ins(
        packages[0] / "torch" / "lib", unpacked(arguments.runtime, folder), folder
    )
    variables = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", site)))
    pytest = [] if arguments.python else ["-m", "pytest", "-n", "0"]
    command = [sys.executable, "-S", *pytest, *rest]
    sys.exit(subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
