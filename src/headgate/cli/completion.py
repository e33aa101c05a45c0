"""`headgate completion`: shell completion scripts, generated from the argument parser."""

from __future__ import annotations

from argparse import SUPPRESS
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "SCRIPTS", "CompletionPoint", "add_arguments", "completion_points", "run"]

ABOUT = "print a shell completion script"
EXAMPLES = """
    headgate completion bash > ~/.local/share/bash-completion/completions/headgate
    headgate completion zsh > ~/.zfunc/_headgate
    headgate completion fish > ~/.config/fish/completions/headgate.fish
"""

FILE: Final = "FILE"
"""The metavar of options and arguments that take a file."""


class Option(NamedTuple):
    name: str
    about: str
    takes: tuple[str, ...] | str | None
    """Its choices, FILE, or "" for any value; None for a flag."""


class CompletionPoint(NamedTuple):
    """The possible continuations after a command."""

    path: tuple[str, ...]
    commands: dict[str, str]
    """Subcommands with their descriptions."""
    options: tuple[Option, ...]
    arguments: tuple[str, ...]
    """Choices of positional arguments."""
    takes_files: bool


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate import cli

    out.write(SCRIPTS[arguments.shell]([*completion_points(cli.build_parser())]))
    return 0


def completion_points(parser: ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[CompletionPoint]:
    """The commands of a parser, in depth-first order."""
    commands: dict[str, str] = {}
    options: list[Option] = []
    words: list[str] = []
    inner: dict[str, ArgumentParser] = {}
    takes_files = False
    formatter = parser._get_formatter()  # noqa: SLF001 - argparse has no public introspection
    for action in parser._actions:  # noqa: SLF001 - argparse has no public introspection
        if action.help == SUPPRESS:
            continue
        if isinstance(action.choices, dict):
            inner = action.choices
            subactions = action._get_subactions()  # type: ignore[attr-defined]  # noqa: SLF001 - as above
            abouts = {each.dest: each.help or "" for each in subactions}
            commands = {name: abouts.get(name, "") for name in inner}
        elif action.option_strings:
            takes = None if action.nargs == 0 else _values(action)
            about = _brief(formatter._expand_help(action)) if action.help else ""  # noqa: SLF001 - as --help says it
            options += [Option(name, about, takes) for name in action.option_strings]
        elif action.choices is not None:
            words += [str(word) for word in action.choices]
        else:
            takes_files |= action.metavar == FILE
    yield CompletionPoint(path, commands, tuple(options), tuple(words), takes_files)
    for name, each in inner.items():
        yield from completion_points(each, (*path, name))


def _values(action: Any) -> tuple[str, ...] | str:
    return tuple(map(str, action.choices)) if action.choices is not None else FILE if action.metavar == FILE else ""


def _brief(about: str) -> str:
    return about.split(";")[0]


# ------------------------------------------------------------------ bash


def _bash(points: list[CompletionPoint]) -> str:
    return f"""\
# Completes headgate in bash.
_headgate() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} path='' words='' files='' place
    # bash takes --option=word for three words.
    if [[ $word == '=' ]]; then
        word=''
    elif [[ $before == '=' ]]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    for ((place = 1; place < COMP_CWORD; place++)); do
        case "$path ${{COMP_WORDS[place]}}" in
{_indent(_bash_paths(points), 12)}
        esac
    done
    COMPREPLY=()
    case "$path $before" in
{_indent(_bash_values(points), 8)}
    *)
        case $path in
{_indent(_bash_words(points), 8)}
        esac
        ;;
    esac
    [[ -n $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$word")
    fi
    return 0
}}
complete -F _headgate headgate
"""


def _bash_paths(points: list[CompletionPoint]) -> Iterator[str]:
    for point in points:
        if point.path:
            yield f"{quote(_key(point.path))}) path={quote(_key(point.path))} ;;"


def _bash_values(points: list[CompletionPoint]) -> Iterator[str]:
    for point in points:
        for option in point.options:
            if option.takes is not None:
                given = "files=1" if option.takes == FILE else f"words={quote(' '.join(option.takes))}"
                yield f"{quote(f'{_key(point.path)} {option.name}')}) {given} ;;"


def _bash_words(points: list[CompletionPoint]) -> Iterator[str]:
    for point in points:
        files = " files=1" if point.takes_files else ""
        yield f"{quote(_key(point.path))}) words={quote(' '.join(_words(point)))}{files} ;;"


def _key(path: tuple[str, ...]) -> str:
    """Each command preceded by a space, so that no path is a prefix of another."""
    return "".join([f" {name}" for name in path])


def _words(point: CompletionPoint) -> list[str]:
    return [*point.commands, *point.arguments, *(option.name for option in point.options)]


def _indent(lines: Iterator[str], width: int) -> str:
    return "\n".join([" " * width + line for line in lines])


# ------------------------------------------------------------------ zsh


def _zsh(points: list[CompletionPoint]) -> str:
    return f"""\
#compdef headgate
# Completes headgate in zsh.
_headgate() {{
    local path_so_far='' before=${{words[CURRENT - 1]}} place
    local -a given
    for ((place = 2; place < CURRENT; place++)); do
        case "$path_so_far ${{words[place]}}" in
{_indent((line.replace("path=", "path_so_far=") for line in _bash_paths(points)), 12)}
        esac
    done
    case "$path_so_far $before" in
{_indent(_zsh_values(points), 8)}
    *)
        case $path_so_far in
{_indent(_zsh_words(points), 8)}
        esac
        ;;
    esac
}}
if [[ $funcstack[1] == _headgate ]]; then
    _headgate "$@"
else
    compdef _headgate headgate
fi
"""


def _zsh_values(points: list[CompletionPoint]) -> Iterator[str]:
    for point in points:
        for option in point.options:
            if option.takes is not None:
                words = " ".join([quote(word) for word in option.takes])
                given = "_files" if option.takes == FILE else f"compadd -- {words}" if words else "_message value"
                yield f"{quote(f'{_key(point.path)} {option.name}')}) {given} ;;"


def _zsh_words(points: list[CompletionPoint]) -> Iterator[str]:
    for point in points:
        told = [*point.commands.items(), *((word, "") for word in point.arguments)]
        told += [(option.name, option.about) for option in point.options]
        given = " ".join([quote(f"{name.replace(':', chr(92) + ':')}:{about}") for name, about in told])
        files = "; _files" if point.takes_files else ""
        yield f"{quote(_key(point.path))}) given=({given}); _describe headgate given{files} ;;"


# ------------------------------------------------------------------ fish


def _fish(points: list[CompletionPoint]) -> str:
    lines = [
        "# Completes headgate in fish.",
        "function __headgate_at",
        "    # Whether the commands so far are exactly these.",
        "    set -l path",
        "    for word in (commandline -opc)[2..-1]",
        '        contains -- (string join -- " " $path $word) $__headgate_paths; and set -a path $word',
        "    end",
        '    test "$path" = "$argv"',
        "end",
        "set -g __headgate_paths " + " ".join([_fish_quoted(" ".join(point.path)) for point in points if point.path]),
        "complete -c headgate -f",
    ]
    for point in points:
        at = f"complete -c headgate -n {_fish_quoted('__headgate_at ' + ' '.join(point.path))}"
        lines += [f"{at} -a {name} -d {_fish_quoted(about)}" for name, about in point.commands.items()]
        lines += [f"{at} -a {_fish_quoted(' '.join(point.arguments))}"] if point.arguments else []
        lines += [f"{at} -F"] if point.takes_files else []
        for option in point.options:
            kind = f"-l {option.name[2:]}" if option.name.startswith("--") else f"-s {option.name[1:]}"
            takes = "" if option.takes is None else " -r -F" if option.takes == FILE else " -x"
            words = f" -a {_fish_quoted(' '.join(option.takes))}" if isinstance(option.takes, tuple) else ""
            lines.append(f"{at} {kind}{takes}{words} -d {_fish_quoted(option.about)}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: Final = {"bash": _bash, "zsh": _zsh, "fish": _fish}
