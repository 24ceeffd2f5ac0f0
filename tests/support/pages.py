"""The code blocks of the documentation, and how a page of them is run.

```python                    runs, after those before it, in one namespace a page
```text                      right behind a python block: what that block prints
```python title="model.py"   is written to the page's folder, as is any block with a title
```bash                      runs in the page's folder
<!-- not run: why -->        the block below it is read only
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from stratagem.cli.app import app

FENCE = re.compile(
    r"^(?P<mark><!-- not run: (?P<reason>[^\n]*?) -->\n+)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$',
    flags=re.MULTILINE | re.DOTALL,
)

RUNNABLE = ("python", "bash")

PRELUDE = """\
set -euo pipefail
torchrun() { "$PYTHON" -m torch.distributed.run "$@"; }
python() { "$PYTHON" "$@"; }
"""
"""Commands of the environment that the tests run in, whatever is on the path."""

OWN = "stratagem"
"""The command that runs in this process, which has imported torch already."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its line, and what is to be done with it."""

    language: str
    code: str
    line: int
    title: str
    reason: str
    follows: int | None
    """The line of the python block that it stands right behind, if it does."""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    Example:
        >>> blocks_of("Hello.\\n\\n```python\\nx = 1\\n```\\n")[0].line
        3
    """
    found: list[Block] = []
    last_end = -1
    last: Block | None = None
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        gap = text[last_end : match.start()] if last_end >= 0 else "x"
        behind = last.line if last is not None and not gap.strip() else None
        block = Block(
            language=match["language"],
            code=match["code"],
            line=line,
            title=match["title"] or "",
            reason=match["reason"] or "",
            follows=behind if last is not None and last.language == "python" else None,
        )
        found.append(block)
        last_end, last = match.end(), block
    return found


class Page:
    """A page whose blocks run one after the other, in the current folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.namespace: dict[str, object] = {"__name__": "__main__"}
        self._printed: dict[int, str] = {}

    def run(self) -> int:
        """Run every block that is to be run; how many did.

        Raises:
            AssertionError: a command failed, or a block printed something else than the page says.
        """
        count = 0
        for block in blocks_of(self.path.read_text(encoding="utf-8")):
            if block.title:
                Path(block.title).write_text(block.code, encoding="utf-8")
            elif block.language == "text" and block.follows is not None:
                self._compare(block)
            elif block.reason or block.language not in RUNNABLE:
                continue
            elif block.language == "python":
                self._run_python(block)
            else:
                self._run_shell(block)
            count += block.language in RUNNABLE
        return count

    def _run_python(self, block: Block) -> None:
        # Blank lines before it, so that a traceback shows the line of the page.
        code = compile("\n" * block.line + block.code, str(self.path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out, _here_first():
            exec(code, self.namespace)
        self._printed[block.line] = out.getvalue()

    def _run_shell(self, block: Block) -> None:
        where = f"{self.path.name}, line {block.line}"
        lines = block.code.replace("\\\n", " ").splitlines()
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        if all(words[0] == OWN for words in commands):
            for words in commands:
                _run_own(words, where)
        else:
            _run_bash(block.code, where)

    def _compare(self, block: Block) -> None:
        assert block.follows is not None
        printed = _tidy(self._printed.get(block.follows, ""))
        assert printed == _tidy(block.code), (
            f"{self.path.name}, line {block.line}: the block before it prints\n{printed}"
        )


def _run_bash(code: str, where: str) -> None:
    done = subprocess.run(
        ["bash", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, f"{where}:\n{done.stdout}\n{done.stderr}"


def _run_own(words: list[str], where: str) -> None:
    with _here_first():
        done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{where}: {shlex.join(words)}\n{done.output}"


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@contextlib.contextmanager
def _here_first() -> Iterator[None]:
    """Modules that a page has written are found, as they are by a script of its folder."""
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())
