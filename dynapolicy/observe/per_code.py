"""``audit``: what each code object has compiled, against what was declared for it."""

from __future__ import annotations

import types
from collections.abc import Iterator

import attrs

from ..apply import current_policy
from ..compiled import Compiled, compiled
from ..declare import Declaration
from ..policy import CompilePolicy
from ..records import Records
from ..targets import code_named
from ..torch_compat.capabilities import capabilities
from ..torch_compat.codes import met, resume_functions, resumed
from ..torch_compat.entries import count, shared_code
from ..torch_compat.guards import Specialization, last_reason, specializations, what_differs
from ..torch_compat.settings import find, limit_names
from ..watch import hit_of

__all__ = ["CodeRecord", "audit"]

#: Other code is reported from this share of its limit on.
_NEAR = 0.75


@attrs.frozen
class CodeRecord:
    """One code object.

    Attributes:
        code: ``"module:qualname"``; of torch's shared code object, its own name.
        file: where it is defined.
        line: its first line.
        declared: cache entries declared for it.
        entries: cache entries it has, those of its resume functions left out.
        undeclared: entries that fit no declared shape, or go beyond the declared ones.
        limit: the recompile limit in force for it, in entries.
        accumulated_limit: the accumulated recompile limit in force, in entries.
        state: ``fine``, ``never seen``, ``undeclared shapes``, ``guarded state``, ``full``,
            ``exhausted``, or ``near its limit`` for code that was not declared.
        last_reason: why it recompiled last, in torch's words, or None.
        why: the state in one sentence.
        targets: what counts on this code object, where there are several.
    """

    code: str
    file: str
    line: int
    declared: int
    entries: int
    undeclared: int
    limit: int
    accumulated_limit: int
    state: str
    last_reason: str | None
    why: str
    targets: tuple[str, ...]


class CodeRecords(Records[CodeRecord]):
    """The rows of ``audit``; as text without the long fields, which follow below the table."""

    __slots__ = ()

    def columns(self) -> list[str]:
        """The short fields."""
        return ["code", "declared", "entries", "undeclared", "limit", "state"]

    def __str__(self) -> str:
        notes = [f"{one.code} ({one.file}:{one.line}): {one.why}" for one in self if one.state != "fine"]
        return "\n".join([super().__str__(), *([""] if notes else []), *notes])


@attrs.define
class _Row:
    """What is known of one code object before it is looked at."""

    name: str
    code: types.CodeType | None
    line: int = 0
    declarations: list[Declaration] = attrs.field(factory=list)
    wrappers: list[Compiled] = attrs.field(factory=list)


def audit(policy: CompilePolicy | None = None) -> Records[CodeRecord]:
    """Report each code object that was declared or compiled through ``dynapolicy.compile``.

    Other code of the process is added where it is near its limit. Costs a walk over all cache entries:
    call it after warm-up or on demand, not per request.

    Args:
        policy: whose declarations; where not given, those of the policy in force.
    """
    policy = policy or current_policy()
    rows = _rows(policy)
    known = {id(row.code) for row in rows}
    records = [_record(row) for row in rows]
    return CodeRecords((*records, *_others(known)))


def _rows(policy: CompilePolicy | None) -> list[_Row]:
    rows: list[_Row] = []
    for declaration in policy.declarations if policy is not None else ():
        code = shared_code() if declaration.shared else code_named(declaration.name, declaration.line)
        row = _row_of(rows, code, declaration.name, declaration.line)
        row.declarations.append(declaration)
    for one in compiled():
        row = _row_of(rows, one.code, one.target.name, one.target.line)
        row.wrappers.append(one)
        # A name may stand for several code objects, such as copies of one function: each is declared.
        if not row.declarations and policy is not None and (found := policy.declaration(one.target)) is not None:
            row.declarations.append(found)
    return rows


def _row_of(rows: list[_Row], code: types.CodeType | None, name: str, line: int) -> _Row:
    for row in rows:
        if code is not None and row.code is code:
            return row
    rows.append(_Row(name, code, line))
    return rows[-1]


def _record(row: _Row) -> CodeRecord:
    declared = sum(one.entries for one in row.declarations)
    entries = specializations(row.code) if row.code is not None else []
    undeclared = _undeclared(row, declared, entries)
    limit, accumulated = _limits(row)
    state, why = _state(row, declared, entries, undeclared, limit)
    names = sorted({one.name for one in row.declarations} | {one.target.name for one in row.wrappers})
    return CodeRecord(
        code=_name(row),
        file=row.code.co_filename if row.code is not None else "?",
        line=row.code.co_firstlineno if row.code is not None else row.line,
        declared=declared,
        entries=len(entries),
        undeclared=undeclared,
        limit=limit,
        accumulated_limit=accumulated,
        state=state,
        last_reason=_last_reason(row.code),
        why=why,
        targets=tuple(names) if len(names) > 1 else (),
    )


def _name(row: _Row) -> str:
    if row.code is not None and row.code is shared_code():
        return "torch._dynamo.external_utils:wrap_inline.<locals>.inner"
    return row.name


def _last_reason(code: types.CodeType | None) -> str | None:
    if code is None:
        return None
    hit = hit_of(code)
    return hit.reason if hit is not None else last_reason(code)


def _limits(row: _Row) -> tuple[int, int]:
    limit_name, accumulated_name, _ = limit_names(capabilities())
    limit, accumulated = (int(found.read()) if (found := find(name)) else 0 for name in (limit_name, accumulated_name))
    if not row.wrappers:
        return limit, accumulated
    # Isolated wrappers have budgets of their own, which add up; all others share one count.
    isolated = [one for one in row.wrappers if one.isolated and one.keyword is not None]
    if capabilities().isolate_recompiles and isolated:
        return sum(one.keyword or 0 for one in isolated), accumulated
    own = [one.keyword for one in row.wrappers]
    return max(limit if keyword is None else keyword for keyword in own), accumulated


def _undeclared(row: _Row, declared: int, entries: list[Specialization]) -> int:
    beyond = max(0, len(entries) - declared)
    shapes = [tuple(shape.values()) for one in row.declarations for bucket in one.buckets for shape in bucket.shapes]
    if not shapes or len(row.declarations) > 1:
        return beyond
    fits = [one.fits_any(shapes) for one in entries]
    # Axes may not be sizes at all, such as a flattened batch; then only the count tells.
    return max(beyond, fits.count(False)) if any(fits) else beyond


def _state(row: _Row, declared: int, entries: list[Specialization], undeclared: int, limit: int) -> tuple[str, str]:
    code, seen = row.code, len(entries)
    if code is None or not seen:
        if declared:
            return "never seen", "Declared, but nothing was compiled for it in this process"
        return "fine", "Nothing was compiled for it yet"
    cause = _cause(row, code, entries, undeclared)
    hit = hit_of(code) or next((hit for one in resume_functions(code) if (hit := hit_of(one))), None)
    if hit is not None:
        outcome = "torch raised" if hit.error is not None else "new shapes run eager until dynapolicy.recover()"
        return "exhausted", f"It hit {hit.setting}={hit.limit}: {outcome}. {cause[1]}"
    if seen >= limit:
        return "full", f"All entries that the limit allows; torch doesn't tell whether one more came. {cause[1]}"
    return cause


def _cause(row: _Row, code: types.CodeType, entries: list[Specialization], undeclared: int) -> tuple[str, str]:
    """What made the entries that nobody declared."""
    declared = sum(one.entries for one in row.declarations)
    shapes = sum(len(bucket.shapes) for one in row.declarations for bucket in one.buckets)
    sizes = len({one.sizes for one in entries})
    made = f"{sizes} shapes made {len(entries)} entries"
    if not declared:
        return "fine", f"{made}; none is declared"
    if not undeclared:
        return "fine", f"{made} of {declared} declared"
    differs = ", ".join(what_differs(code, entries))
    if sizes <= shapes and len(entries) > declared:
        differs = differs or "a guard that torch doesn't name"
        return "guarded state", (
            f"{made}: not a shape, but {differs} differs between them. Declare it with variants=, or keep it the same"
        )
    besides = f"; besides, {differs} differs between entries of one shape" if differs else ""
    return "undeclared shapes", (
        f"{made}, {undeclared} of them fit no declared shape or go beyond the declared ones{besides}"
    )


def _others(known: set[int]) -> Iterator[CodeRecord]:
    """Code that nobody declared and that is near its limit: it may belong to another library."""
    limit, accumulated = _limits(_Row("", None))
    for code in met():
        if id(code) in known or id(resumed(code)) in known:
            continue
        known.add(id(code))
        entries = count(code)
        hit = hit_of(code)
        if entries < max(2, _NEAR * limit) and hit is None:
            continue
        why = f"{entries} of {limit} entries, and it was not declared"
        yield CodeRecord(
            code=f"?:{getattr(code, 'co_qualname', code.co_name)}",
            file=code.co_filename,
            line=code.co_firstlineno,
            declared=0,
            entries=entries,
            undeclared=entries,
            limit=limit,
            accumulated_limit=accumulated,
            state="near its limit" if hit is None else "exhausted",
            last_reason=_last_reason(code),
            why=why if hit is None else f"It hit {hit.setting}={hit.limit}; {why}",
            targets=(),
        )
