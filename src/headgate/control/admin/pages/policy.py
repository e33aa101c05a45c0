"""The policy: its document, its versions, what changed between two of them, and the way back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.control.admin.pages.forms import Entered, Mistake, attempt, change_context, reason
from headgate.control.service.errors import NotAllowed, NotFound
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.config.history import Difference
    from headgate.control.service import Change

__all__ = ["diff", "edit", "policy", "put", "restore", "version", "versions"]

MOST: Final = 30
SECTIONS: Final = {
    "documents": "Document",
    "tiers": "Tiers",
    "routes": "Route costs",
    "clients": "Clients",
    "overrides": "Overrides",
    "blocked": "Blocks",
}
MOST_DIFFERENCES: Final = 200
FILES: Final = {"yaml": "policy.yaml", "toml": "policy.toml", "json": "policy.json"}
_LINE: Final = re.compile(r"[^:\s]+:(\d+):(?:\d+:)? ")


class DocumentLine(NamedTuple):
    """A line of what changed."""

    css: str
    sign: str
    text: str
    words: str
    """What the sign means, for who does not see it."""


class DocumentProblem(NamedTuple):
    """What is wrong with a document."""

    line: int | None
    text: str


class Section(NamedTuple):
    key: str
    name: str
    lines: list[DocumentLine]


def policy(visit: Visit, entered: Entered | None = None) -> Response:
    view = visit.service.policy.get()
    classes = [each for rule in view.rules for each in rule.classes]
    return visit.page(
        "policy.html",
        status=entered.status if entered else 200,
        here="/policy",
        view=view,
        entered=entered,
        limits=list(dict.fromkeys([*(rule.name for rule in view.rules), *classes])),
        classes=list(dict.fromkeys(classes)),
        lines=view.text.splitlines(),
        tiers=visit.service.policy.tiers(),
        routes=visit.service.policy.routes(),
        versions=visit.service.policy.versions(most=8),
    )


def versions(visit: Visit) -> Response:
    found = visit.service.policy.versions(before=visit.query.number("before"), most=MOST)
    return visit.page(
        "versions.html", here="/policy", versions=found, before=visit.query.number("before"), is_more=len(found) == MOST
    )


def version(visit: Visit) -> Response:
    return _version(visit)


def diff(visit: Visit) -> Response:
    one, other = visit.query.number("one"), visit.query.number("other")
    if one is None or other is None:
        raise InvalidInput("enter two versions to compare")
    sections, left_out = _sections(visit.service.policy.diff(one, other))
    return visit.page("diff.html", here="/policy", one=one, other=other, sections=sections, left_out=left_out)


def restore(visit: Visit) -> Response:
    number: int = visit.request.path_params["version"]
    chosen = [name for name in visit.form.all("sections") if name in SECTIONS]

    is_whole = len(chosen) == len(SECTIONS)
    sections = None if is_whole else chosen

    def do() -> Any:
        if not chosen:
            raise Mistake("sections", "Select at least one section.")
        if "sure" not in visit.form:
            reason(visit)
            raise _Unseen
        return visit.service.policy.rollback(change_context(visit), number, sections=sections)

    what = "Everything" if is_whole else " and ".join(SECTIONS[name] for name in chosen)
    try:
        return _roll_back(visit, number, do, what=what)
    except _Unseen:
        return _preview(visit, number, chosen)


class _Unseen(Exception):
    """The preview of a rollback was not confirmed yet."""


def _preview(visit: Visit, number: int, chosen: list[str]) -> Response:
    """The confirmation of a rollback: every row that it changes, whoever wrote it, and what happens to blocks."""
    preview = visit.service.policy.preview_rollback(visit.actor, number, sections=chosen)
    sections, left_out = _sections(list(preview.differences))
    return visit.page(
        "rollback.html",
        here="/policy",
        number=number,
        preview=preview,
        sections=sections,
        left_out=left_out,
        others=[each for each in preview.undone if each.author != visit.actor.name],
        kept=[(name, value) for name, value in visit.form.pairs if name in ("sections", "reason")],
        chosen=[SECTIONS[name] for name in chosen],
    )


def _roll_back(visit: Visit, number: int, do: Callable[[], Change], *, what: str) -> Response:
    return attempt(
        visit,
        "restore",
        do,
        question=f"Roll back to version {number}?",
        said=f"{what} rolled back to version {number}.",
        back="/policy",
        again=lambda entered: _version(visit, entered),
    )


def edit(visit: Visit) -> Response:
    if not visit.actor.may("operator"):
        raise NotAllowed("change the policy", role=visit.actor.role, needed="operator")
    return _edit(visit)


def put(visit: Visit) -> Response:
    file, text = visit.form.get("file", ""), _document(visit)
    if "check" in visit.form:
        problems = visit.service.policy.check(text, file=file)
        return _edit(visit, Entered("policy", visit.form, status=200), problems=problems, is_checked=True)

    return attempt(
        visit,
        "policy",
        lambda: visit.service.policy.put(change_context(visit), text, file=file),
        question="Save this policy?",
        said="Policy saved. All servers use it within a second.",
        back="/policy",
        again=lambda entered: _edit(visit, entered, problems=entered.problems),
    )


# ---------------------------------------------------------------------- within


def _version(visit: Visit, entered: Entered | None = None) -> Response:
    number: int = visit.request.path_params["version"]
    found = next(iter(visit.service.policy.versions(before=number + 1, most=1)), None)
    if found is None or found.number != number:
        raise NotFound(f"version {number} does not exist")
    sections, left_out = _sections(visit.service.policy.diff(number - 1, number))
    view = visit.service.policy.get(number)
    return visit.page(
        "version.html",
        status=entered.status if entered else 200,
        here="/policy",
        found=found,
        sections=sections,
        left_out=left_out,
        view=view,
        lines=view.text.splitlines(),
        names=SECTIONS,
        chosen=visit.form.all("sections") if entered else list(SECTIONS),
        entered=entered,
    )


def _edit(
    visit: Visit, entered: Entered | None = None, *, problems: Iterable[str] = (), is_checked: bool = False
) -> Response:
    view = visit.service.policy.get()
    told = [*map(_problem, problems)]
    if entered is not None:
        entered = entered._replace(problems=())  # they stand beside the document, each with its line
    text = _document(visit) if entered else view.text
    return visit.page(
        "edit.html",
        status=entered.status if entered else 200,
        here="/policy",
        file=(visit.form.get("file") if entered else "") or FILES.get(view.format, view.name or "policy.yaml"),
        files=[(name, name) for name in FILES.values()],
        text=text,
        problems=told,
        marked=[*_marked(told, text.splitlines())],
        is_checked=is_checked,
        entered=entered,
    )


def _document(visit: Visit) -> str:
    """As it was typed: blanks at the begin of a line mean something, lines end with one sign."""
    return next(iter(visit.form.all("text")), "").replace("\r\n", "\n").removeprefix("\n")


def _problem(text: str) -> DocumentProblem:
    match = _LINE.match(text)
    return DocumentProblem(None, text) if match is None else DocumentProblem(int(match[1]), text[match.end() :])


def _marked(problems: Iterable[DocumentProblem], lines: list[str]) -> Iterator[tuple[int, str]]:
    """The lines that something is wrong with."""
    for problem in problems:
        if problem.line is not None and 0 < problem.line <= len(lines):
            yield problem.line, lines[problem.line - 1]


def _sections(differences: Sequence[Difference]) -> tuple[list[Section], int]:
    """What changed, by section, and how much more there is."""
    shown = differences[:MOST_DIFFERENCES]
    sections = [
        Section(name, title, [line for each in shown if each.section == name for line in _lines(each)])
        for name, title in SECTIONS.items()
    ]
    return [section for section in sections if section.lines], len(differences) - len(shown)


def _lines(difference: Difference) -> Iterator[DocumentLine]:
    for line in difference.lines:
        match line[:1]:
            case "+":
                yield DocumentLine("plus", "+", line[1:], "added: ")
            case "-":
                yield DocumentLine("minus", "−", line[1:], "removed: ")
            case "@":
                if difference.section == "documents":
                    yield DocumentLine("at", "", line, "")
            case _:
                yield DocumentLine("", "", line[1:], "")
