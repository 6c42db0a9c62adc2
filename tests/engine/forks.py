"""Engines one after the other, each in a fork of one process that has imported vLLM already.

The import takes longer than all the rest of a run.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from . import driver
from .process import check, start


class Engines:
    """The side of the tests: `with Engines.started(log) as engines: engines.run("llavanext")`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    @contextlib.contextmanager
    def started(cls, log: Path) -> Iterator["Engines"]:
        with start(__name__, log=log, pipes=True) as process:
            yield cls(process, log)

    def run(self, *arguments: str, log: Path) -> None:
        """Run `tests.engine.driver` with these arguments; it limits its time itself."""
        ask, answers = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([arguments, str(log)]), file=ask, flush=True)
        answer = answers.readline()
        if not answer:
            check(self._process.wait(10) or -1, __name__, self._log)
        check(int(answer), f"driver {' '.join(arguments)}", log)


def serve() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no answer
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.model_executor.models import registry

    # A process that imports vLLM again, to see what a model's class can do.
    registry._run_in_subprocess = lambda see: see()
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
