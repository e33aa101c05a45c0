"""The policy pages: document, versions, differences and rollback."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.control.admin.pages.forms import FieldError, Submission, change_context, reason, submit
from headgate.control.service.errors import NotAllowed, NotFound
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.config.history import Difference
    from headgate.control.service import Change

__all__ = ["diff", "edit", "policy", "put", "restore", "version", "versions"]

PAGE_SIZE: Final = 30
SECTIONS: Final = {
    "documents": "Document",
    "tiers": "Tiers",
    "routes": "Route costs",
    "clients": "Clients",
    "overrides": "Overrides",
    "blocked": "Blocks",
}
MAX_DIFFERENCES: Final = 200
FILES: Final = {"yaml": "policy.yaml", "toml": "policy.toml", "json": "policy.json"}
_LINE: Final = re.compile(r"[^:\s]+:(\d+):(?:\d+:)? ")


class DocumentLine(NamedTuple):
    """A line of a difference."""

    css: str
    sign: str
    text: str
    label: str
    """The meaning of the sign, for screen readers."""


class DocumentProblem(NamedTuple):
    """A problem in a document."""

    line: int | None
    text: str


class Section(NamedTuple):
    key: str
    name: str
    lines: list[DocumentLine]


def policy(visit: Visit, submission: Submission | None = None) -> Response:
    view = visit.service.policy.get()
    classes = [each for rule in view.rules for each in rule.classes]
    return visit.page(
        "policy.html",
        here="/policy",
        view=view,
        submission=submission,
        limits=list(dict.fromkeys([*(rule.name for rule in view.rules), *classes])),
        classes=list(dict.fromkeys(classes)),
        lines=view.text.splitlines(),
        tiers=visit.service.policy.tiers(),
        routes=visit.service.policy.routes(),
        versions=visit.service.policy.versions(most=8),
    )


def versions(visit: Visit) -> Response:
    found = visit.service.policy.versions(before=visit.query.number("before"), most=PAGE_SIZE)
    return visit.page(
        "versions.html",
        here="/policy",
        versions=found,
        before=visit.query.number("before"),
        is_more=len(found) == PAGE_SIZE,
    )


def version(visit: Visit, submission: Submission | None = None) -> Response:
    number: int = visit.request.path_params["version"]
    found = next(iter(visit.service.policy.versions(before=number + 1, most=1)), None)
    if found is None or found.number != number:
        raise NotFound(f"version {number} does not exist")
    sections, left_out = _sections(visit.service.policy.diff(number - 1, number))
    view = visit.service.policy.get(number)
    return visit.page(
        "version.html",
        here="/policy",
        found=found,
        sections=sections,
        left_out=left_out,
        view=view,
        lines=view.text.splitlines(),
        names=SECTIONS,
        chosen=visit.form.all("sections") if submission else list(SECTIONS),
        submission=submission,
    )


def diff(visit: Visit) -> Response:
    one, other = visit.query.number("one"), visit.query.number("other")
    if one is None or other is None:
        raise InvalidInput("enter two versions to compare")
    sections, left_out = _sections(visit.service.policy.diff(one, other))
    return visit.page("diff.html", here="/policy", one=one, other=other, sections=sections, left_out=left_out)


def restore(visit: Visit) -> Response:
    number: int = visit.request.path_params["version"]
    chosen = [name for name in visit.form.all("sections") if name in SECTIONS]
    is_complete = len(chosen) == len(SECTIONS)

    def change() -> Change:
        if not chosen:
            raise FieldError("sections", "Select at least one section.")
        if "sure" not in visit.form:
            reason(visit)
            raise _PreviewNeeded
        return visit.service.policy.rollback(change_context(visit), number, sections=None if is_complete else chosen)

    what = "Everything" if is_complete else " and ".join(SECTIONS[name] for name in chosen)
    try:
        return submit(
            visit,
            "restore",
            change,
            question=f"Roll back to version {number}?",
            done=f"{what} rolled back to version {number}.",
            redirect="/policy",
            page=version,
        )
    except _PreviewNeeded:
        return _preview(visit, number, chosen)


class _PreviewNeeded(Exception):
    """The rollback has not been confirmed on its preview yet."""


def _preview(visit: Visit, number: int, chosen: list[str]) -> Response:
    """The preview of a rollback: all rows that it changes, and its effect on blocks."""
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
        hidden_fields=[(name, value) for name, value in visit.form.pairs if name in ("sections", "reason")],
        chosen=[SECTIONS[name] for name in chosen],
    )


def edit(visit: Visit) -> Response:
    if not visit.actor.may("operator"):
        raise NotAllowed("change the policy", role=visit.actor.role, needed="operator")
    return _edit(visit)


def put(visit: Visit) -> Response:
    file, text = visit.form.get("file", ""), _document(visit)
    if "check" in visit.form:
        problems = visit.service.policy.check(text, file=file)
        return _edit(visit, Submission("policy", visit.form, status=200), problems=problems, is_checked=True)

    return submit(
        visit,
        "policy",
        lambda: visit.service.policy.put(change_context(visit), text, file=file),
        question="Save this policy?",
        done="Policy saved. All servers use it within a second.",
        redirect="/policy",
        page=lambda visit, submission: _edit(visit, submission, problems=submission.problems),
    )


# ---------------------------------------------------------------------- internals


def _edit(
    visit: Visit, submission: Submission | None = None, *, problems: Iterable[str] = (), is_checked: bool = False
) -> Response:
    view = visit.service.policy.get()
    located = [*map(_locate, problems)]
    if submission is not None:
        submission = submission._replace(problems=())  # shown next to the document instead
    text = _document(visit) if submission else view.text
    return visit.page(
        "policy_edit.html",
        here="/policy",
        file=(visit.form.get("file") if submission else "") or FILES.get(view.format, view.name or "policy.yaml"),
        files=[(name, name) for name in FILES.values()],
        text=text,
        problems=located,
        marked=[*_problem_lines(located, text.splitlines())],
        is_checked=is_checked,
        submission=submission,
    )


def _document(visit: Visit) -> str:
    """The text as typed, with its indentation, and normalized line ends."""
    return next(iter(visit.form.all("text")), "").replace("\r\n", "\n").removeprefix("\n")


def _locate(text: str) -> DocumentProblem:
    match = _LINE.match(text)
    return DocumentProblem(None, text) if match is None else DocumentProblem(int(match[1]), text[match.end() :])


def _problem_lines(problems: Iterable[DocumentProblem], lines: list[str]) -> Iterator[tuple[int, str]]:
    """The numbers and texts of lines with problems."""
    for problem in problems:
        if problem.line is not None and 0 < problem.line <= len(lines):
            yield problem.line, lines[problem.line - 1]


def _sections(differences: Sequence[Difference]) -> tuple[list[Section], int]:
    """The differences by section, and the number of those left out."""
    shown = differences[:MAX_DIFFERENCES]
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
