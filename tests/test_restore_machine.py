"""Any order of applying, restoring and torch's own ``patch`` leaves every setting of every context exactly as it was.

The machine drives threads and asyncio tasks that live as long as it does. Its model knows no mechanism:
a context is a list of what was put there, newest last, and ending something takes it out of the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dynapolicy import CompilePolicy, RestoreError, ScopeWarning, apply_policy, capabilities
from dynapolicy.torch_compat.settings import Setting, find, limit_names
from strategies import LAW

# -- places ---------------------------------------------------------------------------------------------


class Thread:
    """A thread that runs what it is given, in one context of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                self._results.put((call(), None))
            except Exception as error:
                self._results.put((None, error))

    def run(self, call: Callable[[], Any]) -> Any:
        self._calls.put(call)
        result, error = self._results.get()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()


class Task:
    """An asyncio task, born in the context of another place."""

    def __init__(self, loop: asyncio.AbstractEventLoop, parent: Any) -> None:
        self._loop = loop
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        context = parent.run(contextvars.copy_context)
        self._task = context.run(loop.create_task, self._serve())

    async def _serve(self) -> None:
        while (asked := await self._calls.get()) is not None:
            call, result = asked
            try:
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)

    def run(self, call: Callable[[], Any]) -> Any:
        result: asyncio.Future[Any] = self._loop.create_future()
        self._calls.put_nowait((call, result))
        return self._loop.run_until_complete(result)

    def end(self) -> None:
        self._calls.put_nowait(None)
        self._loop.run_until_complete(self._task)


class Context:
    """An empty context on the thread that runs the test, so that no example sees what another one left."""

    def __init__(self) -> None:
        self._context = contextvars.Context()

    def run(self, call: Callable[[], Any]) -> Any:
        return self._context.run(call)

    def end(self) -> None:
        pass


# -- the model ------------------------------------------------------------------------------------------


@attrs.define(eq=False, repr=False)
class Applied:
    """A policy in force, as the model sees it."""

    policy: CompilePolicy
    exact: bool
    process: bool
    owner: Any
    asks: dict[str, tuple[Any, bool]]
    handle: Any = None
    fixed: dict[str, Any] = attrs.Factory(dict)
    live: bool = True

    def __repr__(self) -> str:
        return f"<{'process' if self.process else 'context'} {self.asks}>"

    def over(self, name: str, found: Any) -> Any:
        """What this policy makes of a value."""
        value, raising = self.asks[name]
        return max(value, found) if raising else value


@attrs.define(eq=False)
class Patched:
    """One setting under torch's ``patch``. A value that was there already patches nothing."""

    value: Any
    seen: Any

    @property
    def live(self) -> bool:
        return self.value is not self.seen


Item = Applied | Patched


@attrs.define(eq=False, repr=False)
class Cell:
    """What one context holds of each setting, and its open patches."""

    items: dict[str, list[Item]]
    patches: list[tuple[Any, Any, dict[str, Patched]]] = attrs.Factory(list)
    here: list[Applied] = attrs.Factory(list)
    torch_wrote: bool = False

    def __repr__(self) -> str:
        return f"<cell {self.items}>"

    def copy(self) -> Cell:
        """The context of a task that is born here: it can't leave the patches that it inherits."""
        items = {name: list(held) for name, held in self.items.items()}
        return Cell(items, [], list(self.here), self.torch_wrote)

    def top(self, name: str) -> Item | None:
        """What decides the value here, if anything does."""
        return next((item for item in reversed(self.items[name]) if item.live), None)


places = st.runner().flatmap(lambda machine: st.sampled_from(machine.places))
numbers = st.integers(1, 500)
asked = st.fixed_dictionaries(
    {}, optional={"dynamo.specialize_int": st.booleans(), "inductor.max_autotune": st.booleans()}
)


class RestoreMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        can = capabilities()
        self.local = can.context_local_config
        limit, accumulated, fail = limit_names(can)
        self.limit, self.accumulated, self.fail = limit, accumulated, fail
        found = [find(name) for name in (limit, accumulated, fail, "dynamo.specialize_int", "inductor.max_autotune")]
        self.settings: dict[str, Setting] = {one.name: one for one in found if one is not None}
        assert len(self.settings) == len(found)
        self.base = {name: one.override().base() for name, one in self.settings.items()}
        self.used: set[int] = {256, *(value for value in self.base.values() if type(value) is int)}
        self.loop = asyncio.new_event_loop()
        self.places: list[Any] = []
        self.cells: dict[Any, Cell] = {}
        self.process: list[Applied] = []
        self.all: list[Applied] = []

    @initialize()
    def some_places(self) -> None:
        for place in (Context(), Thread(), Thread()):
            self._add(place, self._empty())

    def _empty(self) -> Cell:
        return Cell({name: [] for name in self.settings}, torch_wrote=not self.local)

    def _add(self, place: Any, cell: Cell) -> None:
        # Before torch 2.12 all threads and tasks hold one value.
        self.cells[place] = cell if self.local or not self.places else self.cells[self.places[0]]
        self.places.append(place)

    def _unused(self, number: int) -> int:
        """A number that nothing else asked for, so that torch's writing it back has one meaning."""
        while number in self.used or 4 * number in self.used:
            number += 1
        self.used |= {number, 4 * number}
        return number

    # -- what the model predicts --------------------------------------------------------------------

    def process_value(self, name: str) -> Any:
        value = self.base[name]
        for one in self.process:
            value = one.over(name, value) if name in one.asks else value
        return value

    def value(self, cell: Cell, name: str) -> Any:
        top = cell.top(name)
        if isinstance(top, Patched):
            return top.value
        return self.process_value(name) if top is None or top.process else top.fixed[name]

    def raises(self, cell: Cell) -> bool:
        return any(one.policy.on_limit == "raise" for one in (*self.process, *cell.here) if one.live)

    def _push_here(self, one: Applied, cell: Cell) -> None:
        """A policy wins over the deliberate values of the context that applies it."""
        for name in one.asks:
            top = cell.top(name)
            if top is None or (isinstance(top, Applied) and top.process):
                continue
            own = self.value(cell, name)
            if one.over(name, own) != own:
                cell.items[name].append(one)

    # -- rules --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.places) < 6)
    @rule()
    def start_thread(self) -> None:
        self._add(Thread(), self._empty())

    @precondition(lambda self: len(self.places) < 6)
    @rule(parent=places)
    def start_task(self, parent: Any) -> None:
        self._add(Task(self.loop, parent), self.cells[parent].copy())

    @rule(
        place=places,
        number=numbers,
        asked=asked,
        exact=st.booleans(),
        loud=st.booleans(),
        scope=st.sampled_from(["process", "context"]),
    )
    def apply(self, place: Any, number: int, asked: Any, exact: bool, loud: bool, scope: str) -> None:
        one = self._new(place, number, asked, exact, loud, scope == "process" or not self.local)
        one.handle = place.run(lambda: _quietly(one.policy, scope=scope, exact=exact))
        assert one.handle.scope == ("process" if one.process else "context")
        self._applied(one)

    def _new(self, place: Any, number: int, asked: Any, exact: bool, loud: bool, process: bool) -> Applied:
        number = self._unused(number)
        policy = CompilePolicy(floor=number, ceil=65536, settings=asked, on_limit="raise" if loud else "warn")
        asks: dict[str, tuple[Any, bool]] = {
            self.limit: (number, not exact),
            self.accumulated: (max(256, 4 * number), not exact),
            **{name: (value, False) for name, value in asked.items()},
        }
        if loud or self.raises(self.cells[place]):
            asks[self.fail] = (loud, False)
        return Applied(policy, exact, process, place, asks)

    def _applied(self, one: Applied) -> None:
        cell = self.cells[one.owner]
        if one.process:
            self._push_here(one, cell)
            self.process.append(one)
        else:
            one.fixed = {name: one.over(name, self.value(cell, name)) for name in one.asks}
            cell.here.append(one)
            for name in one.asks:
                cell.items[name].append(one)
        self.all.append(one)

    @rule(place=places, scope=st.sampled_from(["process", "context"]))
    def apply_the_same_again(self, place: Any, scope: str) -> None:
        cell = self.cells[place]
        live_here = [one for one in cell.here if one.live]
        standing = (scope == "context" and self.local and live_here) or self.process
        assume(standing)
        one = standing[-1]
        handle = place.run(lambda: _quietly(one.policy, scope=scope, exact=one.exact))
        self._push_here(one, cell)
        self.check()
        handle.restore()

    @precondition(lambda self: self.all)
    @rule(place=places, data=st.data())
    def restore(self, place: Any, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        here = [other for other in self.cells[place].here if other.live]
        top = self.process if one.process else here
        if one.live and top and top[-1] is one and (one.process or one.owner is place):
            place.run(one.handle.restore)
            self._ended(one)
        else:
            with pytest.raises(RestoreError):
                place.run(one.handle.restore)

    def _ended(self, one: Applied) -> None:
        one.live = False
        (self.process if one.process else self.cells[one.owner].here).remove(one)

    @rule(place=places, number=numbers, asked=asked, loud=st.booleans())
    def leave_a_block_by_an_exception(self, place: Any, number: int, asked: Any, loud: bool) -> None:
        one = self._new(place, number, asked, False, loud, True)

        def block() -> None:
            with contextlib.suppress(ZeroDivisionError), apply_policy(one.policy) as one.handle:
                one.handle.policy.limits.recompile_limit / 0

        place.run(block)
        self._applied(one)
        self._ended(one)

    @rule(
        place=places,
        number=numbers,
        flag=st.booleans(),
        which=st.sampled_from(["limits", "specialize_int", "fail", "inductor"]),
    )
    def enter_patch(self, place: Any, number: int, flag: bool, which: str) -> None:
        cell = self.cells[place]
        number = self._unused(number)
        values: dict[str, Any] = {
            "limits": {self.limit: number, self.accumulated: 4 * number},
            "specialize_int": {"dynamo.specialize_int": flag},
            "fail": {self.fail: flag},
            "inductor": {"inductor.max_autotune": flag},
        }[which]
        seen = {name: self.value(cell, name) for name in values}
        for name, value in values.items():
            # Of two values, the one that the innermost open patch found can't be told from its being left.
            patched = [item for item in cell.items[name] if isinstance(item, Patched)]
            assume(not any(type(value) is bool and item.seen == value for item in patched))
        changes = {self.settings[name].key: value for name, value in values.items()}
        patch = self.settings[next(iter(values))].module.patch(changes)
        place.run(patch.__enter__)
        made = {name: Patched(value, seen[name]) for name, value in values.items()}
        for name, item in made.items():
            cell.items[name].append(item)
        cell.patches.append((place, patch, made))
        cell.torch_wrote = True

    @precondition(lambda self: any(cell.patches for cell in self.cells.values()))
    @rule(data=st.data())
    def leave_patch(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from([cell for cell in self.cells.values() if cell.patches])))

    def _leave(self, cell: Cell) -> None:
        place, patch, made = cell.patches.pop()
        place.run(lambda: patch.__exit__(None, None, None))
        for name, item in made.items():
            cell.items[name].remove(item)

    # -- what must hold after every step ---------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        """Every setting of every context has the value that the model predicts."""
        for place in self.places:
            read = place.run(lambda: {name: one.read() for name, one in self.settings.items()})
            assert read == {name: self.value(self.cells[place], name) for name in self.settings}, type(place)

    def teardown(self) -> None:
        try:
            if self.places:
                self._end_everything()
                self._nothing_is_left()
        finally:
            for one in reversed(self.all):
                if one.live:
                    with contextlib.suppress(RestoreError):
                        one.owner.run(one.handle.restore)
            for place in self.places:
                place.end()
            self.loop.close()

    def _end_everything(self) -> None:
        for cell in set(self.cells.values()):
            while cell.patches:
                self._leave(cell)
        for one in reversed([*self.all]):
            if one.live:
                one.owner.run(one.handle.restore)
                self._ended(one)
        self.check()

    def _nothing_is_left(self) -> None:
        for place in self.places:
            overrides = place.run(lambda: {name: one.override().get() for name, one in self.settings.items()})
            for name, held in overrides.items():
                cell, setting = self.cells[place], self.settings[name]
                if cell.top(name) is None:
                    unset = held is setting.override().unset
                    # Torch writes an explicit default back where no policy watched; it counts as unset.
                    assert unset or (cell.torch_wrote and held == self.base[name]), (type(place), name, held)
        number = self._unused(600)
        with apply_policy(CompilePolicy(floor=number, ceil=65536)):
            for place in self.places:
                if self.cells[place].top(self.limit) is None:
                    assert place.run(self.settings[self.limit].read) == number, type(place)


def _quietly(policy: CompilePolicy, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)
        return apply_policy(policy, **how)


@pytest.mark.usefixtures("torch_ready")
def test_every_setting_of_every_context_is_as_before() -> None:
    """After every step each context reads what the model predicts; in the end each override is as found."""
    run_state_machine_as_test(RestoreMachine, settings=settings(LAW, max_examples=80, stateful_step_count=30))
