"""The policy pages: document, tiers and routes, versions, differences and rollback."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.control.admin.pages.canary import MEASURES, canary_spec, canary_values, format_measure
from headgate.control.admin.pages.forms import FieldError, Submission, bucket, change_context, submit
from headgate.control.service.errors import NotFound
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.config.history import Difference
    from headgate.control.service import Change

__all__ = [
    "diff",
    "edit",
    "policy",
    "promote",
    "promote_scripts",
    "put",
    "remove_route",
    "remove_tier",
    "restore",
    "rollback_canary",
    "rollback_scripts",
    "set_route",
    "set_tier",
    "version",
    "versions",
]

PAGE_SIZE: Final = 30
SECTIONS: Final = {
    "documents": "Document",
    "tiers": "Tiers",
    "routes": "Route costs",
    "clients": "Clients",
    "overrides": "Overrides",
    "blocked": "Blocks",
}
"""Sections that can be rolled back."""
TITLES: Final = {**SECTIONS, "canaries": "Canary"}
MAX_DIFFERENCES: Final = 200
FILES: Final = {"yaml": "policy.yaml", "toml": "policy.toml", "json": "policy.json"}
REMOVED: Final = "Removed. The value in the policy document applies again."
_LINE: Final = re.compile(r"[^:\s]+:(\d+):(?:\d+:)? ")


class Section(NamedTuple):
    """The differences of a section, each line with its CSS class, sign and, for screen readers, its meaning."""

    key: str
    name: str
    lines: list[tuple[str, str, str, str]]


def policy(visit: Visit, submission: Submission | None = None) -> Response:
    view = visit.service.policy.get()
    classes = [each for rule in view.rules for each in rule.classes]
    return visit.page(
        "policy.html",
        "/policy",
        submission=submission,
        view=view,
        limits=list(dict.fromkeys([*(rule.name for rule in view.rules), *classes])),
        classes=list(dict.fromkeys(classes)),
        lines=view.text.splitlines(),
        tiers=visit.service.policy.tiers(),
        routes=visit.service.policy.routes(),
        versions=visit.service.policy.versions(most=8),
        scripts=visit.service.scripts.status(),
        **_canary(visit),
    )


def versions(visit: Visit) -> Response:
    before = visit.query.number("before")
    found = visit.service.policy.versions(before=before, most=PAGE_SIZE)
    is_more, canary = len(found) == PAGE_SIZE, {} if before else _canary(visit)
    return visit.page("versions.html", "/policy", versions=found, before=before, is_more=is_more, **canary)


def version(visit: Visit, submission: Submission | None = None) -> Response:
    number: int = visit.request.path_params["version"]
    found = next(iter(visit.service.policy.versions(before=number + 1, most=1)), None)
    if found is None or found.number != number:
        raise NotFound(f"version {number} does not exist")
    differences = visit.service.policy.diff(number - 1, number)
    view = visit.service.policy.get(number)
    return visit.page(
        "version.html",
        "/policy",
        submission=submission,
        found=found,
        view=view,
        lines=view.text.splitlines(),
        names=SECTIONS,
        chosen=visit.form.all("sections") if submission else list(SECTIONS),
        **_sections(differences),
    )


def diff(visit: Visit) -> Response:
    one, other = visit.query.number("one"), visit.query.number("other")
    if one is None or other is None:
        raise InvalidInput("enter two versions to compare")
    differences = visit.service.policy.diff(one, other)
    return visit.page("diff.html", "/policy", one=one, other=other, **_sections(differences))


def restore(visit: Visit) -> Response:
    """Roll back to a version, after a preview."""
    number: int = visit.request.path_params["version"]
    chosen = [name for name in visit.form.all("sections") if name in SECTIONS]
    is_complete = len(chosen) == len(SECTIONS)

    def change() -> Change | Response:
        if not chosen:
            raise FieldError("sections", "Select at least one section.")
        context = change_context(visit)
        if "sure" not in visit.form:
            return _preview(visit, number, chosen)
        return visit.service.policy.rollback(context, number, sections=None if is_complete else chosen)

    what = "Everything" if is_complete else " and ".join(SECTIONS[name] for name in chosen)
    question, done = f"Roll back to version {number}?", f"{what} rolled back to version {number}."
    return submit(visit, "restore", change, question=question, done=done, redirect="/policy", page=version)


def _preview(visit: Visit, number: int, chosen: list[str]) -> Response:
    """The preview of a rollback: all rows that it changes, and its effect on blocks."""
    preview = visit.service.policy.preview_rollback(visit.actor, number, sections=chosen)
    return visit.page(
        "rollback.html",
        "/policy",
        number=number,
        preview=preview,
        others=[each for each in preview.undone if each.author != visit.actor.name],
        hidden_fields=[(name, value) for name, value in visit.form.pairs if name in ("sections", "reason")],
        chosen=[SECTIONS[name] for name in chosen],
        **_sections(preview.differences),
    )


def edit(visit: Visit, submission: Submission | None = None, *, problems: Iterable[str] | None = None) -> Response:
    """The editor. `problems` are those of a check; otherwise those of the submission are shown."""
    visit.actor.require("operator", "change the policy")
    view = visit.service.policy.get()
    is_checked = problems is not None
    if submission is not None:
        problems = submission.problems if problems is None else problems
        submission = submission._replace(problems=())  # shown next to the document instead
    located = [*map(_locate, problems or ())]
    text = _document(visit) if submission else view.text
    lines = dict(enumerate(text.splitlines(), 1))
    return visit.page(
        "policy_edit.html",
        "/policy",
        submission=submission,
        file=(visit.form.get("file") if submission else "") or FILES.get(view.format, view.name or "policy.yaml"),
        files=FILES.values(),
        text=text,
        problems=located,
        marked=[(number, lines[number]) for number, _ in located if number in lines],
        is_checked=is_checked,
        is_canary="canary" in visit.form,
        is_promoted="promote" in visit.form,
    )


def put(visit: Visit) -> Response:
    file, text = visit.form.get("file", ""), _document(visit)
    if "check" in visit.form:
        problems = visit.service.policy.check(text, file=file)
        return edit(visit, Submission("policy", visit.form, status=200), problems=problems)

    if "canary" in visit.form:
        return _start_canary(visit, text, file)

    def change() -> Change:
        return visit.service.policy.put(change_context(visit), text, file=file)

    question, done = "Save this policy?", "Policy saved. All servers use it within a second."
    return submit(visit, "policy", change, question=question, done=done, redirect="/policy", page=edit)


def _start_canary(visit: Visit, text: str, file: str) -> Response:
    def change() -> Change:
        spec = canary_spec(visit)
        return visit.service.canaries.start(change_context(visit), text, spec, file=file)

    question, done = "Start a canary of this policy?", "Canary started."
    return submit(visit, "policy", change, question=question, done=done, redirect="/policy", page=edit)


def promote(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.canaries.promote(change_context(visit))

    question, done = "Promote the candidate?", "Candidate promoted. All servers use it within a second."
    return submit(visit, "promote", change, question=question, done=done, redirect="/policy", page=policy)


def rollback_canary(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.canaries.rollback(change_context(visit))

    done = "Canary rolled back. All servers use the current policy within a second."
    return submit(visit, "rollback-canary", change, done=done, redirect="/policy", page=policy)


def promote_scripts(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.scripts.promote(change_context(visit))

    question, done = "Promote these scripts?", "Scripts promoted. All servers use them within a second."
    return submit(visit, "promote-scripts", change, question=question, done=done, redirect="/policy", page=policy)


def rollback_scripts(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.scripts.rollback(change_context(visit))

    done = "Scripts rolled back. All servers use those of their library within a second."
    return submit(visit, "rollback-scripts", change, done=done, redirect="/policy", page=policy)


def set_tier(visit: Visit) -> Response:
    tier, limit = visit.form.get("tier", ""), visit.form.get("limit", "")

    def change() -> Change:
        if not tier:
            raise FieldError("tier", "Enter the name of an existing or a new tier.")
        return visit.service.policy.set_tier(change_context(visit), tier, limit, bucket(visit))

    question, done = "Set tier {tier} to {bucket} on {limit}?", "Tier {tier} is now allowed {bucket} on {limit}."
    return submit(visit, "tier", change, question=question, done=done, redirect="/policy", page=policy)


def remove_tier(visit: Visit) -> Response:
    def change() -> Change:
        tier, limit = visit.form.get("tier", ""), visit.form.get("limit", "")
        return visit.service.policy.remove_tier(change_context(visit), tier, limit)

    question, form = "Remove the limit of tier {tier} on {limit}?", f"remove-tier-{visit.form.number('row')}"
    return submit(visit, form, change, question=question, done=REMOVED, redirect="/policy", page=policy)


def set_route(visit: Visit) -> Response:
    path, cost = visit.form.get("path", ""), visit.form.number("cost")

    def change() -> Change:
        if not path:
            raise FieldError("path", 'Enter a route, for example "POST /posts" or "/users/{id}".')
        if cost is None:
            raise FieldError("cost", "Enter a whole number, for example 5.")
        route_class = visit.form.get("class") or None
        return visit.service.policy.set_route(change_context(visit), path, cost, route_class=route_class)

    question, done = "Set the cost of {path} to {cost}?", "{path} now costs {cost}."
    return submit(visit, "route", change, question=question, done=done, redirect="/policy", page=policy)


def remove_route(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.policy.remove_route(change_context(visit), visit.form.get("path", ""))

    question, form = "Remove the cost of {path}?", f"remove-route-{visit.form.number('row')}"
    return submit(visit, form, change, question=question, done=REMOVED, redirect="/policy", page=policy)


def _canary(visit: Visit) -> dict[str, Any]:
    """The values of the template of the canary."""
    values = canary_values(visit)
    difference = values.pop("candidate_difference")
    lines = [] if difference is None else [*_lines(difference)]
    return {**values, "candidate_lines": lines, "measure_names": MEASURES, "format_measure": format_measure}


def _document(visit: Visit) -> str:
    """The text as typed, with its indentation, and normalized line ends."""
    return next(iter(visit.form.all("text")), "").replace("\r\n", "\n").removeprefix("\n")


def _locate(problem: str) -> tuple[int | None, str]:
    """The line and the text of a problem."""
    match = _LINE.match(problem)
    return (None, problem) if match is None else (int(match[1]), problem[match.end() :])


def _sections(differences: Sequence[Difference]) -> dict[str, Any]:
    """The differences by section, and the number of those left out."""
    shown = differences[:MAX_DIFFERENCES]
    sections = [
        Section(name, title, [line for each in shown if each.section == name for line in _lines(each)])
        for name, title in TITLES.items()
    ]
    return {"sections": [each for each in sections if each.lines], "left_out": len(differences) - len(shown)}


def _lines(difference: Difference) -> Iterator[tuple[str, str, str, str]]:
    signs = {"+": ("plus", "+", "added: "), "-": ("minus", "−", "removed: ")}
    for line in difference.lines:
        if line[:1] != "@":
            yield *signs.get(line[:1], ("", "", "")), line[1:]
        elif difference.section == "documents":
            yield "at", "", "", line
