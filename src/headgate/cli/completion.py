"""Print a shell completion script.

headgate completion bash > ~/.local/share/bash-completion/completions/headgate
headgate completion zsh > ~/.zfunc/_headgate
headgate completion fish > ~/.config/fish/completions/headgate.fish
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from shlex import quote
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.cli.options import option

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from headgate.cli.terminal import Terminal

__all__ = ["OPTIONS", "SCRIPTS", "CompletionPoint", "completion_points", "run"]

FILE: Final = "FILE"
"""The metavar of options and arguments that take a file."""


class CompletionOption(NamedTuple):
    name: str
    about: str
    takes: tuple[str, ...] | str | None
    """Its choices, FILE, or "" for any value; None for a flag."""


class CompletionPoint(NamedTuple):
    """The possible continuations after a command."""

    path: tuple[str, ...]
    commands: dict[str, str]
    options: tuple[CompletionOption, ...]
    arguments: tuple[str, ...]
    takes_files: bool

    @property
    def key(self) -> str:
        """Each command preceded by a space, so that no path is a prefix of another."""
        return "".join([f" {name}" for name in self.path])

    @property
    def words(self) -> dict[str, str]:
        """All words that may follow, with their descriptions."""
        return {
            **self.commands,
            **dict.fromkeys(self.arguments, ""),
            **{each.name: each.about for each in self.options},
        }


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate import cli

    out.write(SCRIPTS[arguments.shell]([*completion_points(cli.build_parser())]))
    return 0


def completion_points(parser: ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[CompletionPoint]:
    """The commands of a parser, in depth-first order."""
    commands: dict[str, str] = {}
    options: list[CompletionOption] = []
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
            takes: tuple[str, ...] | str | None = FILE if action.metavar == FILE else None if action.nargs == 0 else ""
            takes = takes if action.choices is None else tuple(map(str, action.choices))
            about = formatter._expand_help(action) if action.help else ""  # noqa: SLF001 - as --help says it
            options += [CompletionOption(name, about.split(";")[0], takes) for name in action.option_strings]
        elif action.choices is not None:
            words += [str(word) for word in action.choices]
        else:
            takes_files |= action.metavar == FILE
    yield CompletionPoint(path, commands, tuple(options), tuple(words), takes_files)
    for name, each in inner.items():
        yield from completion_points(each, (*path, name))


def _bash(points: list[CompletionPoint]) -> str:
    def value(takes: tuple[str, ...] | str) -> str:
        return "files=1" if takes == FILE else f"words={quote(' '.join(takes))}"

    def words(point: CompletionPoint) -> str:
        return f"words={quote(' '.join(point.words))}{' files=1' if point.takes_files else ''}"

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
{_path_arms(points, "path")}
        esac
    done
    COMPREPLY=()
    case "$path $before" in
{_value_arms(points, value)}
    *)
        case $path in
{_arms({point.key: words(point) for point in points})}
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


def _path_arms(points: list[CompletionPoint], variable: str) -> str:
    return _arms({point.key: f"{variable}={quote(point.key)}" for point in points if point.path}, 12)


def _value_arms(points: list[CompletionPoint], value: Callable[[tuple[str, ...] | str], str]) -> str:
    return _arms(
        {
            f"{point.key} {option.name}": value(option.takes)
            for point in points
            for option in point.options
            if option.takes is not None
        }
    )


def _arms(cases: dict[str, str], width: int = 8) -> str:
    return "\n".join([f"{' ' * width}{quote(pattern)}) {action} ;;" for pattern, action in cases.items()])


def _zsh(points: list[CompletionPoint]) -> str:
    def value(takes: tuple[str, ...] | str) -> str:
        return "_files" if takes == FILE else f"compadd -- {' '.join(map(quote, takes))}" if takes else "_message value"

    def words(point: CompletionPoint) -> str:
        given = [quote(f"{name.replace(':', chr(92) + ':')}:{about}") for name, about in point.words.items()]
        return f"given=({' '.join(given)}); _describe headgate given{'; _files' if point.takes_files else ''}"

    return f"""\
#compdef headgate
# Completes headgate in zsh.
_headgate() {{
    local path_so_far='' before=${{words[CURRENT - 1]}} place
    local -a given
    for ((place = 2; place < CURRENT; place++)); do
        case "$path_so_far ${{words[place]}}" in
{_path_arms(points, "path_so_far")}
        esac
    done
    case "$path_so_far $before" in
{_value_arms(points, value)}
    *)
        case $path_so_far in
{_arms({point.key: words(point) for point in points})}
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
        for each in point.options:
            kind = f"-l {each.name[2:]}" if each.name.startswith("--") else f"-s {each.name[1:]}"
            takes = "" if each.takes is None else " -r -F" if each.takes == FILE else " -x"
            words = f" -a {_fish_quoted(' '.join(each.takes))}" if isinstance(each.takes, tuple) else ""
            lines.append(f"{at} {kind}{takes}{words} -d {_fish_quoted(each.about)}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: Final = {"bash": _bash, "zsh": _zsh, "fish": _fish}
OPTIONS = (option("shell", choices=tuple(SCRIPTS), help="the shell"),)
