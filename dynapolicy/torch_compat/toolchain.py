"""What inductor asks its C++ compiler about itself, remembered for a start without one.

Inductor names a compiled C++ kernel after the compiler's own words. Without the compiler it can't
compute the name, and fails, although the kernel is there. It also compiles and loads a probe in a
child process to see what the CPU can do, and precompiles headers, on every start, even when every
kernel is there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

__all__ = ["Toolchain"]

_QUESTIONS = ("--version", "-v", "-dumpversion", "-dumpmachine", "-print-file-name=bin")
_LONGEST = 1 << 16
_PRECOMPILE = "_precompile_header"


class Toolchain:
    """Stands in for ``subprocess`` in the modules of inductor that ask the compiler, until ``stop``.

    Attributes:
        answers: what was asked, and the answer; JSON-ready.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa

        self.answers = {key: text for key, text in answers.items() if isinstance(text, str)}
        self.replayed = 0
        self._modules: list[Any] = [cpp_builder, cpu_vec_isa]
        self._ours = _Asking(self)
        for module in self._modules:
            if module.subprocess is subprocess:
                module.subprocess = self._ours
        self._names = vars(codecache)
        self._precompile: Any = self._names.get(_PRECOMPILE)
        if self._precompile is not None:
            self._headers: Any = _unless_there(self._precompile)
            self._names[_PRECOMPILE] = self._headers

    def stop(self) -> None:
        """Give torch its own back."""
        if self._precompile is not None and self._names[_PRECOMPILE] is self._headers:
            self._names[_PRECOMPILE] = self._precompile
        for module in self._modules:
            if module.subprocess is self._ours:
                module.subprocess = subprocess

    def ask(self, how: Any, command: Any, options: dict[str, Any]) -> Any:
        """Run the command, or give the remembered answer where it can't be run."""
        probe, question = _probe(command), _question(command)
        if probe is not None:
            # Its answer is about this very file, whose bytes were checked, on this very CPU.
            if probe in self.answers:
                self.replayed += 1
                return _ran(how, command, "")
            result = how(command, **options)
            self.answers[probe] = ""
            return result
        if question is None:
            return how(command, **options)
        try:
            result = how(command, **options)
        except (OSError, subprocess.SubprocessError):
            if question not in self.answers:
                raise
            self.replayed += 1
            text = self.answers[question]
            return text if options.get("text") else text.encode("utf-8", "surrogateescape")
        text = result.decode("utf-8", "surrogateescape") if isinstance(result, bytes) else result
        if isinstance(text, str) and len(text) < _LONGEST:
            self.answers[question] = text
        return result


class _Asking:
    """The ``subprocess`` module, with the calls that inductor asks with replaced."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def check_output(self, args: Any, **options: Any) -> Any:
        return self._toolchain.ask(subprocess.check_output, args, options)

    def check_call(self, args: Any, **options: Any) -> Any:
        return self._toolchain.ask(subprocess.check_call, args, options)

    def run(self, args: Any, **options: Any) -> Any:
        return self._toolchain.ask(subprocess.run, args, options)


def _unless_there(precompile: Callable[..., Any]) -> Callable[..., Any]:
    """Precompile a header only for a kernel that is to be compiled; torch does before it looks."""

    def precompile_unless_there(*args: Any, **kwargs: Any) -> Any:
        source = sys._getframe(1).f_locals.get("main_path")
        if isinstance(source, str) and Path(source).with_suffix(".so").exists():
            return None
        return precompile(*args, **kwargs)

    return precompile_unless_there


def _words(command: Any) -> list[str]:
    return [str(word) for word in command] if isinstance(command, (list, tuple)) else []


def _question(command: Any) -> str | None:
    words = _words(command)
    # The compiler's folder is left out: the same compiler may lie elsewhere.
    return " ".join((PurePath(words[0]).name, *words[1:])) if len(words) == 2 and words[1] in _QUESTIONS else None


def _probe(command: Any) -> str | None:
    """The name of the library that a child Python is to load, where this is such a child."""
    words = _words(command)
    if len(words) != 3 or words[:2] != [sys.executable, "-c"] or "LoadLibrary" not in words[2]:
        return None
    path = words[2].partition('LoadLibrary("')[2].partition('"')[0]
    return f"loads {PurePath(path).name}" if path else None


def _ran(how: Any, command: Any, output: str) -> Any:
    if how is subprocess.run:
        return subprocess.CompletedProcess(command, 0, output, output)
    return 0 if how is subprocess.check_call else output.encode()
