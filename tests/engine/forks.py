"""Engines one after the other, each in a fork of one process that has imported vLLM already.

The import takes longer than all the rest of a run.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from . import driver
from .process import check, start


class Engines:
    """The side of the tests: `with Engines.started(log) as engines: engines.run("llavanext")`."""

    def __init__(self, ask: IO[str], answer: IO[str]) -> None:
        self._ask = ask
        self._answer = answer

    @classmethod
    @contextlib.contextmanager
    def started(cls, log: Path) -> Iterator["Engines"]:
        with start(__name__, log=log, pipes=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            yield cls(process.stdin, process.stdout)

    def run(self, *arguments: str, log: Path) -> None:
        """Run `tests.engine.driver` with these arguments; it limits its time itself."""
        print(json.dumps([arguments, str(log)]), file=self._ask, flush=True)
        answer = self._answer.readline()
        check(int(answer) if answer else None, f"driver {' '.join(arguments)}", log)


def serve() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no answer
    import vllm.entrypoints.llm  # noqa: F401

    for line in sys.stdin:
        arguments, log = json.loads(line)
        child = os.fork()
        if child == 0:
            run_and_exit(arguments, log)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answer, flush=True)


def run_and_exit(arguments: list[str], log: str) -> NoReturn:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        driver.main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an orderly end takes seconds, and would return into the loop


if __name__ == "__main__":
    serve()
