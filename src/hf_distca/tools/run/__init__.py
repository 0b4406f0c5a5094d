"""``hf-distca run train.py ...`` or ``python -m hf_distca.tools.run train.py``: runs a script that
does not import hf_distca, under distca.

The options apply to the script and to Python processes that it starts, such as those of
accelerate's launcher. The folder ``child_start`` is put in front of their ``PYTHONPATH``, so each
process executes the folder's ``sitecustomize`` module when it starts. ``sitecustomize`` reads the
options in ``HF_DISTCA_RUN``. No other way reaches all processes, because launchers write their own
command lines, and packages call launchers in too many ways. The folder is part of the installed
package, so a process that outlives the run still finds it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from errno import ENOEXEC
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal, NamedTuple, NoReturn

from hf_distca.errors import ConfigError, DistCAError
from hf_distca.import_hooks import call_after_import, call_after_models_load, call_at_exit

__all__ = [
    "Options",
    "begin",
    "find_command",
    "find_module",
    "read_options",
    "run_command",
    "run_module",
]

_OPTIONS, _PYTHONPATH = "HF_DISTCA_RUN", "PYTHONPATH"
_CHILD_START = str(Path(__file__).parents[1] / "cli" / "child_start")
_NO_OPTIONS = ("settings", "launched", "given")  # fields that a file cannot set
_MOST_SECONDS = 366 * 86400
# For each option, a check of its value, and the error text for a value that fails the check.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attn_implementation": (lambda value: value in (None, "distca"), "'distca'"),
    "collator": (lambda value: value in ("check", "replace"), "'check' or 'replace'"),
    "summary": (lambda value: isinstance(value, bool), "True or False"),
    "observe": (lambda value: isinstance(value, bool), "True or False"),
    "servers": (
        lambda value: type(value) is int and value >= 0,
        "a whole number of at least 0",
    ),
    "server_wait": (
        lambda value: type(value) in (int, float) and 1 <= value <= _MOST_SECONDS,
        f"a number of seconds from 1 to {_MOST_SECONDS}, a year",
    ),
}


class Options(NamedTuple):
    """Options for a script and all processes that it starts.

    Attributes:
        attn_implementation: "distca" for models that are loaded without naming an attention
            implementation; None to let transformers choose.
        summary: whether to print the balance at the end.
        instead_of: the attention that distca replaces; None to replace no attention.
        tokens_per_rank: number of tokens that every Trainer deals to each rank, like
            `hf_distca.deal`; None if documents are not dealt.
        settings: fields of `DistCAConfig` and their values, for `hf_distca.configure`; None to
            leave settings to the script.
        observe: whether to measure the imbalance of attention and change nothing.
        collator: see `hf_distca.deal`; ``"replace"`` also replaces the script's own collator.
        servers: number of attention servers on each node: the last processes that a launcher
            starts there.
        server_wait: seconds to wait for servers; on servers, seconds to wait for ranks that train.
        launched: on ranks that train, number of nodes of the launch, and number of servers on each
            node.
        given: names of options that a user gave. Child processes get all of these options, even
            those with default values.
    """

    attn_implementation: Literal["distca"] | None = None
    summary: bool = True
    instead_of: str | None = None
    tokens_per_rank: int | None = None
    settings: Mapping[str, Any] | None = None
    observe: bool = False
    collator: Literal["check", "replace"] = "check"
    servers: int = 0
    server_wait: float = 300.0
    launched: tuple[int, int] | None = None
    given: tuple[str, ...] = ()

    def make_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that give the options to Python processes.

        Args:
            environment: the present variables. They may hold the options of an outer run, which
                stay unless this run overrides them.
        """
        changed = {
            name: value
            for name, value in self._asdict().items()
            if name in self.given or (name != "given" and value != self._field_defaults[name])
        }
        before = environment.get(_PYTHONPATH)
        paths = [_CHILD_START, *(before.split(os.pathsep) if before else [])]
        return {
            _OPTIONS: json.dumps(json.loads(environment.get(_OPTIONS) or "{}") | changed),
            _PYTHONPATH: os.pathsep.join(dict.fromkeys(paths)),
        }

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Options:
        """Read the options that `make_environment` has put into a variable.

        Raises:
            ConfigError: if the variable has other contents, such as options of another version.
        """
        text = environment.get(_OPTIONS) or "{}"
        try:
            return cls(**json.loads(text)).check()
        except (DistCAError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{_OPTIONS}={text!r:.200} does not hold options of this version of `hf-distca run`"
                f" ({error}). Unset this variable, or install the same version for the command and"
                " for the processes that it starts."
            ) from error

    def check(self) -> Options:
        """Check that a script can run with these options, and return them.

        Raises:
            ConfigError, UnsupportedError: if no script can run with these options.
        """
        for name, (is_right, expected) in _CHECKS.items():
            value = getattr(self, name)
            if not is_right(value):
                raise ConfigError(f"{name}={value!r} must be {expected}.")
        changing = ("attn_implementation", "instead_of", "tokens_per_rank", "settings", "servers")
        given = [name for name in changing if getattr(self, name)]
        if self.observe and given:
            raise ConfigError(
                f"observe measures training as it is, but {', '.join(given)} would change it: leave"
                " out one or the other."
            )
        if self.instead_of is not None:
            from hf_distca.config import check_replaceable

            check_replaceable(self.instead_of)
        return self


def read_options(file: Path | None, changes: Sequence[str], **given: Any) -> Options:
    """Read the options of a run, including its settings.

    Args:
        file: YAML or JSON, with fields of `Options` and of `DistCAConfig`; None for no file.
        changes: ``NAME=VALUE`` for the same names. These override the file.
        given: fields of `Options` that override `file` and `changes`; None for a field not given.

    Raises:
        ConfigError: if a name or value is wrong. The message is one line, and names the file or
            option.
        UnsupportedError: if distca cannot replace the named attention.
    """
    Options.read(os.environ)  # check the options of an outer run
    options, settings = dict[str, Any](), dict[str, Any]()
    for change in changes:
        if "=" not in change:
            raise ConfigError(f"--set {change} must be NAME=VALUE, such as --set ping_pong=true.")
    if file is not None or changes:
        from hf_distca.config import is_built_in, parse_values, read_values, split_settings

        sources = {} if file is None else {str(file): read_values(file)}
        sources["--set"] = parse_values(
            "\n".join(change.replace("=", ": ", 1) for change in changes), "--set"
        )
        names = tuple(name for name in Options._fields if name not in _NO_OPTIONS)
        for source, values in sources.items():
            _, others = split_settings(values, source, names)
            try:
                Options(**others).check()
            except DistCAError as error:
                raise ConfigError(f"{source}: {error}") from error
            options = options | others
            settings = settings | {n: v for n, v in (values or {}).items() if n not in names}
        # A child process may run in another folder, where a relative path would be wrong.
        if not is_built_in(settings.get("cost_model", "analytic")):
            settings["cost_model"] = str(Path(settings["cost_model"]).absolute())
    options |= {name: value for name, value in given.items() if value is not None}
    return Options(**options, settings=settings or None, given=tuple(options)).check()


def begin(options: Options) -> None:
    """Set up this process. In a process that a launcher started as a server, this runs the server
    and does not return.
    """
    if options.servers:
        try:
            options = _become_launched(options)
        except ConfigError as error:  # an error of the user needs no traceback
            sys.stderr.write(f"hf-distca: {error}\n")
            os._exit(2)
    if options.observe:
        call_after_models_load(_observe)
        call_after_import("transformers.trainer", _observe_trainers)
        return
    call_after_models_load(partial(_prepare_models, options))
    call_after_import("transformers.trainer", partial(_prepare_trainers, options))
    if options.summary:
        call_at_exit(_print_summary)


def _become_launched(options: Options) -> Options:
    """Turn this process into a server, or into a rank of a world that has no servers. Return the
    options of the rank. A server does not return.

    Change nothing in a process that no launcher started, such as the launcher itself.
    """
    from hf_distca.pool.launch import LaunchPlace

    place = LaunchPlace.from_environment(os.environ, options.servers)
    if place is None:
        return options
    os.environ.pop(_OPTIONS, None)  # from now on, each process sets its own options
    if place.server is not None:
        arguments = f"{place.server}, {place.local}, {options.server_wait}"
        code = f"from hf_distca.pool.server import serve; serve({arguments})"
        changes = Options(summary=False).make_environment(os.environ)
        # This keeps torch from printing C++ stack frames when rank 0 closes its connections.
        changes["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.execve(sys.executable, [sys.executable, "-c", code], os.environ | changes)
    options = options._replace(servers=0, launched=(place.nodes, options.servers))
    # Processes that this process starts also belong to the world without servers.
    os.environ |= place.make_trainer_environment() | options.make_environment(os.environ)
    return options


def find_command(command: str) -> Path:
    """Find the file of a command. As in a shell, a name with a slash is a path, and other names
    are looked up on the PATH.

    A name that ends in ``.py`` is looked up in the current folder first, as ``python`` does.

    Raises:
        FileNotFoundError: if there is no such command.
    """
    path = Path(command)
    is_path = os.sep in command
    is_file = os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises if a name is too long
    if (is_path or path.suffix == ".py") and is_file:
        return path.absolute()
    on_the_path = None if is_path else which(command)
    if on_the_path is not None:
        return Path(on_the_path)
    if is_path or path.suffix == ".py":
        raise FileNotFoundError(
            f"there is no file {command!r} in {Path.cwd()}, and no such command on the PATH. The"
            " first argument must be the script or command to run."
        )
    hint = f" The file in this folder is ./{command}." if is_file else ""
    raise FileNotFoundError(
        f"there is no command {command!r} on the PATH. The first argument must be the script or"
        f" command to run.{hint}"
    )


def find_module(name: str) -> None:
    """Raise unless a module can be run by this name. Put the current folder in front of the search
    path.

    Raises:
        FileNotFoundError: if there is no such module.
    """
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd())  # like `python -m`
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
        why = ""
    except (ImportError, ValueError) as error:
        spec, why = None, f" ({error})"
    if spec is None:
        raise FileNotFoundError(
            f"there is no module {name!r} that can be run, neither in {Path.cwd()} nor among the"
            f" installed modules{why}."
        )


# This keeps the objects of the script until the interpreter ends, as `python train.py` does. A DDP
# model that is freed earlier may hang, because it waits for threads of gloo that wait for the
# interpreter.
_script_names: dict[str, Any] = {}


def run_module(name: str, arguments: Sequence[str], options: Options) -> None:
    """Run a module in this process as ``__main__``, like ``python -m``."""
    _start_distca(options)
    sys.argv = [name, *arguments]
    _script_names.update(runpy.run_module(name, run_name="__main__", alter_sys=True))


def run_command(path: Path, arguments: Sequence[str], options: Options) -> None:
    """Run a Python script in this process as ``__main__``, or replace this process by another
    command. Such a command gets signals and the terminal and sets the exit status, as if it had
    been started directly.

    Args:
        path: path of the script or command, from `find_command`.
        arguments: arguments of the script or command.
        options: options for this process and the processes that it starts.

    Raises:
        SystemExit: if the file is not a program.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(256)
    except OSError:  # it may be a program that can be run but not read
        beginning = b"\0"
    first_line = beginning.partition(b"\n")[0]
    if path.suffix != ".py" and not (first_line.startswith(b"#!") and b"python" in first_line):
        is_text = b"\0" not in beginning and not beginning.startswith(b"\x7fELF")
        _execute(
            [str(path), *arguments], os.environ | options.make_environment(os.environ), is_text
        )
    _start_distca(options)
    sys.argv = [str(path), *arguments]
    if not sys.flags.safe_path:  # a script can import files next to it
        sys.path[0] = str(path.resolve().parent)
    _script_names.update(runpy.run_path(str(path), run_name="__main__"))


def _start_distca(options: Options) -> None:
    os.environ |= options.make_environment(os.environ)
    begin(options)


def _execute(command: list[str], environment: Mapping[str, str], is_text: bool) -> NoReturn:
    """Replace this process by a program. A text file without a ``#!`` line runs in a shell, like
    files that a shell starts.
    """
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        shell = which("bash") or which("sh")
        if error.errno == ENOEXEC and is_text and shell is not None:
            os.execve(shell, [shell, *command], environment)
        sys.stderr.write(f"hf-distca: {command[0]} cannot be run: {error.strerror}.\n")
        raise SystemExit(2) from None


def _prepare_models(options: Options) -> None:
    """Apply the options that concern models, before the first model is made."""
    from hf_distca.config import DistCAConfig
    from hf_distca.integration.attention_names import make_distca_default
    from hf_distca.integration.current_session import configure

    if options.launched is not None or options.servers:
        from hf_distca.pool.observer import PoolObserver
        from hf_distca.runtime.group import AttentionGroup

        nodes, each_node = options.launched or (0, options.servers)
        AttentionGroup.observer = PoolObserver(nodes, each_node, options.server_wait)
    if options.settings is not None or options.instead_of is not None:
        configure(DistCAConfig(**(options.settings or {})), instead_of=options.instead_of)
    if options.attn_implementation is not None:
        make_distca_default()


def _prepare_trainers(options: Options) -> None:
    """Apply the options that concern Trainers, before the first Trainer is made."""
    from hf_distca.integration.training.callback import add_callbacks
    from hf_distca.integration.training.deal_trainer import deal_before_training

    if options.tokens_per_rank is not None:
        deal_before_training(options.tokens_per_rank, options.collator)
    add_callbacks(options.summary)


def _observe() -> None:
    """Measure the imbalance of all training in this process."""
    from hf_distca.tools.observe.run_observer import Observer

    observer = Observer()
    observer.begin()
    call_at_exit(observer.end)


def _observe_trainers() -> None:
    from hf_distca.tools.observe.imbalance_callback import observe_trainers

    observe_trainers()


def _print_summary() -> None:
    """Print the balance if this process balanced anything and has not printed it yet."""
    if "hf_distca.integration.current_session" in sys.modules:
        from hf_distca.integration.current_session import print_last_summary

        print_last_summary()
